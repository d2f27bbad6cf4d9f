"""From training runs to the tables and the conclusions of ``mercer study recall``."""

from __future__ import annotations

from collections.abc import Sequence

from mercer.core.names import parse_attention
from mercer.mixers.names import is_mixer
from mercer.models.layer_names import expand
from mercer.studies.layers import finite_attention, layers_of
from mercer.studies.recall_memory import best_overlaps, half_point, predicted_recall, state_bytes
from mercer.studies.records.common import Finding, Verdict
from mercer.studies.records.recall import Capacity, RecallSummary, RecallTask, RecallTrial
from mercer.studies.report.marks import label
from mercer.studies.statistics import mean_interval

CLOSE = 0.1
"""Accuracies nearer than this count as equal when predictions and findings are compared."""
RELIABLE = 0.95


def summarize(
    trials: Sequence[RecallTrial], task: RecallTask, heads: int, head_dims: dict[int, int], layers: int
) -> list[RecallSummary]:
    """For every attention, width and number of pairs: the learning rate that recalls most, and its accuracy.

    Args:
        head_dims: from a model's width to its head dimension.
    """
    summaries: list[RecallSummary] = []
    keys = dict.fromkeys((t.attention, t.dim) for t in trials)
    for attention, dim in keys:
        kinds = layers_of(attention, layers)
        for pairs in task.pairs:
            by_rate: dict[float, list[float]] = {}
            for t in trials:
                if (t.attention, t.dim) == (attention, dim):
                    found = [r.accuracy for r in t.results if r.pairs == pairs]
                    by_rate.setdefault(t.learning_rate, []).extend(found)
            by_rate = {rate: found for rate, found in by_rate.items() if found}
            best = max(by_rate, key=lambda rate: sum(by_rate[rate]) / len(by_rate[rate]), default=None)
            summaries.append(
                RecallSummary(
                    attention=attention,
                    dim=dim,
                    pairs=pairs,
                    accuracy=None if best is None else mean_interval(by_rate[best]),
                    learning_rate=best,
                    state_bytes=state_bytes(kinds, heads, head_dims[dim], task.length_per_pair * pairs),
                    predicted=predicted_recall(kinds[-1], heads, head_dims[dim], pairs),
                )
            )
    return summaries


def capacities(summaries: Sequence[RecallSummary], heads: int, head_dims: dict[int, int]) -> list[Capacity]:
    """Where recall falls through a half, predicted and found."""
    rows: list[Capacity] = []
    for attention, dim in dict.fromkeys((s.attention, s.dim) for s in summaries):
        chosen = [s for s in summaries if (s.attention, s.dim) == (attention, dim) and s.accuracy]
        if not chosen:
            continue
        pairs = [s.pairs for s in chosen]
        last = expand(attention)[-1]
        if is_mixer(last):
            continue  # what its state holds of random keys, no formula here says
        many = [2**power for power in range(1, 21)]
        rows.append(
            Capacity(
                attention=attention,
                dim=dim,
                feature_dim=parse_attention(last)[0].feature_dim(head_dims[dim]),
                effective_features=best_overlaps(last, head_dims[dim]).effective_features,
                predicted=half_point(many, [predicted_recall(last, heads, head_dims[dim], n) or 0.0 for n in many]),
                found=half_point(pairs, [s.accuracy.mean for s in chosen if s.accuracy]),
                smallest_tried=min(pairs),
                largest_tried=max(pairs),
            )
        )
    return rows


def conclude(summaries: Sequence[RecallSummary], task: RecallTask) -> list[Finding]:
    """What the numbers say."""
    known = [s for s in summaries if s.accuracy]
    return [*_softmax(known), *_ranks(known), *_reached(known), *_fell(known, task), *_bought(known, task)]


def _accuracy(summary: RecallSummary) -> float:
    assert summary.accuracy is not None
    return summary.accuracy.mean


def _softmax(known: Sequence[RecallSummary]) -> list[Finding]:
    chosen = [s for s in known if s.attention == "softmax"]
    if not chosen:
        return []
    hardest = max(chosen, key=lambda s: (s.pairs, s.dim))
    value = _accuracy(hardest)
    return [
        Finding(
            question="Does softmax recall every pair?",
            verdict="supported" if value >= RELIABLE else "refuted",
            text=f"At {hardest.pairs} pairs and width {hardest.dim} it answers {100 * value:.1f} % rightly. "
            + (
                "Its cache keeps every pair apart, and training found that."
                if value >= RELIABLE
                else "Its cache could keep every pair apart, so what is missing is training: read the others by that."
            ),
        )
    ]


def _ranks(known: Sequence[RecallSummary]) -> list[Finding]:
    agree = disagree = ties = 0
    for place, a in enumerate(known):
        for b in known[place + 1 :]:
            if a.predicted is None or b.predicted is None:
                continue
            if (a.pairs, a.dim) == (b.pairs, b.dim) and abs(a.predicted - b.predicted) > CLOSE:
                found = _accuracy(a) - _accuracy(b)
                if abs(found) <= CLOSE:
                    ties += 1
                elif (found > 0) == (a.predicted > b.predicted):
                    agree += 1
                else:
                    disagree += 1
    total = agree + disagree + ties
    if not total:
        return []
    verdict: Verdict = "undecided"
    if agree >= 0.75 * total:
        verdict = "supported"
    elif disagree > agree:
        verdict = "refuted"
    return [
        Finding(
            question="Does the memory view rank the attentions as training does?",
            verdict=verdict,
            text=f"Where it predicts a difference of more than {CLOSE:g} in accuracy ({total} comparisons at equal "
            f"pairs and width), training finds the same order in {agree}, the opposite in {disagree} and no "
            f"difference in {ties}.",
        )
    ]


def _reached(known: Sequence[RecallSummary]) -> list[Finding]:
    finite = [(s, s.predicted) for s in known if s.predicted is not None and finite_attention(expand(s.attention)[-1])]
    if not finite:
        return []
    above = [s for s, predicted in finite if _accuracy(s) > predicted + CLOSE]
    below = [s for s, predicted in finite if _accuracy(s) < predicted - CLOSE]
    worst, promised = min(finite, key=lambda pair: _accuracy(pair[0]) - pair[1])
    verdict: Verdict = "undecided"
    if not below:
        verdict = "supported"
    elif len(below) > len(finite) / 2:
        verdict = "refuted"
    return [
        Finding(
            question="Does training reach the memory that a finite state offers?",
            verdict=verdict,
            text=f"Of {len(finite)} cells of finite attentions, {len(below)} fall short of the prediction for random "
            f"keys by more than {CLOSE:g}, {len(above)} exceed it by more. The largest shortfall: "
            f"{label(worst.attention)} at {worst.pairs} pairs, {100 * promised:.0f} % predicted and "
            f"{100 * _accuracy(worst):.0f} % found."
            + (" Room in the state is not what limits these runs." if verdict == "refuted" else ""),
        )
    ]


def _fell(known: Sequence[RecallSummary], task: RecallTask) -> list[Finding]:
    largest = max(task.pairs)
    softmax = {s.dim: s for s in known if s.attention == "softmax" and s.pairs == largest}
    rest = [s for s in known if s.attention != "softmax" and s.pairs == largest and s.dim in softmax]
    if not rest:
        return []
    best = max(rest, key=_accuracy)
    gap = _accuracy(softmax[best.dim]) - _accuracy(best)
    least, most = _lead(softmax[best.dim], best)
    share = best.state_bytes / softmax[best.dim].state_bytes
    verdict: Verdict = "supported" if most <= 0.05 else "refuted" if least > 0.05 else "undecided"
    return [
        Finding(
            question="Does another model recall as well as softmax in every layer?",
            verdict=verdict,
            text=f"At {largest} pairs the best other model is {label(best.attention)} with "
            f"{100 * _accuracy(best):.1f} %, {100 * gap:.1f} points from softmax, and {share:.2g} times its bytes of "
            "state.",
        )
    ]


def _lead(one: RecallSummary, other: RecallSummary) -> tuple[float, float]:
    """From the least to the largest lead in accuracy that intervals over seeds leave; with one seed what was found."""

    def bounds(s: RecallSummary) -> tuple[float, float]:
        if s.accuracy is None or s.accuracy.low is None or s.accuracy.high is None:
            return _accuracy(s), _accuracy(s)
        return max(s.accuracy.low, 0.0), min(s.accuracy.high, 1.0)

    (low, high), (others_low, others_high) = bounds(one), bounds(other)
    return low - others_high, high - others_low


def _bought(known: Sequence[RecallSummary], task: RecallTask) -> list[Finding]:
    """For each model of one kind of layer that has some softmax layers in another arm: what these buy."""
    largest = max(task.pairs)
    have = {(s.attention, s.dim): s for s in known if s.pairs == largest}
    found: list[Finding] = []
    for (attention, dim), mixed in have.items():
        names = expand(attention)
        others = set(names) - {"softmax"}
        plain = have.get((next(iter(others)), dim)) if len(others) == 1 and "softmax" in names else None
        if plain is None:
            continue
        gain = _accuracy(mixed) - _accuracy(plain)
        least, most = _lead(mixed, plain)
        softmax = names.count("softmax")
        found.append(
            Finding(
                question=f"What does softmax in {softmax} of {len(names)} layers buy {label(plain.attention)}?",
                verdict="supported" if least > CLOSE else "refuted" if most < CLOSE / 2 else "undecided",
                text=f"At {largest} pairs and width {dim} {label(attention)} answers {100 * _accuracy(mixed):.1f} % "
                f"rightly and {label(plain.attention)} alone {100 * _accuracy(plain):.1f} %: {100 * gain:+.1f} points"
                + (f" ({100 * least:+.1f} to {100 * most:+.1f} by the intervals over seeds)" if least < most else "")
                + f", for {mixed.state_bytes / max(plain.state_bytes, 1):.2g} times its bytes of state.",
            )
        )
    return found
