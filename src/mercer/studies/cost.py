"""``mercer study cost``: time per token and bytes of state against the context length, beside the plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mercer.advice import measure_machine
from mercer.core.machine import Machine
from mercer.core.names import attention_name, parse_attention
from mercer.errors import Unsupported
from mercer.models.config import causal_attention
from mercer.runtime.device import find_device
from mercer.studies.cost_measure import Shape, Way, machine_rates, planned, planned_seconds, prepare, seconds
from mercer.studies.cost_summary import conclude, crossings
from mercer.studies.folder import Budget, StudyFolder, check_budget
from mercer.studies.progress import StudyProgress
from mercer.studies.records import CostRecord, write_record
from mercer.studies.records.cost import CostPoint, CostShape, MachineRates, Phase
from mercer.studies.report import write_page
from mercer.studies.report.marks import label
from mercer.studies.report.numbers import duration, size
from mercer.studies.runner import Study

PHASES: tuple[Phase, ...] = ("prefill", "decode")
SCORES_LIMIT = 2**30
"""Bytes of scores from which the dense form is left out."""


@dataclass(frozen=True)
class Plan:
    """What a budget measures. ``slowest``: a call expected to take longer, from the length before, is left out."""

    attentions: tuple[str, ...]
    lengths: tuple[int, ...]
    repeats: int
    head_dim: int
    slowest: float
    heads: int = 8
    batch: int = 1
    decode_steps: int = 16


_FEW = ("softmax", "exp-l2", "elu-sum", "taylor1-l2", "taylor2-l2")
_MANY = (*_FEW, "exp-rms", "taylor2-sum", "taylor3-l2", "relu-sum", "power2-sum")
BUDGETS: dict[Budget, Plan] = {
    "quick": Plan(_FEW, (256, 512, 1024, 2048, 4096, 8192), repeats=5, head_dim=32, slowest=2.0),
    "standard": Plan(_MANY, tuple(2**p for p in range(7, 15)), repeats=9, head_dim=32, slowest=10.0),
    "full": Plan(_MANY, tuple(2**p for p in range(7, 17)), repeats=15, head_dim=64, slowest=60.0),
}


def run(
    budget: str = "quick",
    out: str | Path = "runs/cost-quick",
    *,
    attentions: Sequence[str] = (),
    device: str = "auto",
    command: str = "mercer study cost",
    quiet: bool = False,
) -> Path:
    """Run the study in ``out``, or continue the one that was begun there. Returns the path of its page.

    All ways of computing are timed in turn, and that again for every repeat, so that a slow minute of the machine
    falls on all alike. Everything is float32 and causal; prefill keeps no state.

    Args:
        budget: "quick" (256 to 8k tokens), "standard" (128 to 16k), "full" (128 to 64k).
        out: receives cost.json, its schema and cost.html.
        attentions: names instead of the budget's. Softmax, if among them, is what the others are compared with.
        device, command, quiet: as in ``mercer.studies.orders.run``.

    Raises:
        InvalidArgument: an unknown budget, attention or device, or a folder begun with other settings.
        Interrupted: stopped by a signal; the same call continues.
    """
    return _Study(check_budget(budget), Path(out), attentions, device, command, quiet).run()


class _Study(Study[tuple[Phase, int], list[CostPoint]]):
    def __init__(
        self, budget: Budget, out: Path, attentions: Sequence[str], device: str, command: str, quiet: bool
    ) -> None:
        super().__init__(budget, out, device, quiet)
        self.plan = plan = BUDGETS[budget]
        named = [attention_name(*causal_attention(name)) for name in attentions or plan.attentions]
        self.attentions = list(dict.fromkeys(named))
        self.shape = Shape(plan.batch, plan.heads, plan.head_dim, torch.float32, find_device(device))
        asked = {"study": "cost", "budget": budget, "attentions": self.attentions, "device": device}
        self.folder = StudyFolder(out, asked, command)
        numbers = self.folder.remembered("machine")
        self.machine = measure_machine(self.shape.device) if numbers is None else Machine.from_json(json.dumps(numbers))
        self.folder.remember("machine", json.loads(self.machine.to_json()))
        kept = self.folder.remembered("rates")
        self.rates = machine_rates(self.shape) if kept is None else MachineRates.model_validate(kept)
        self.folder.remember("rates", self.rates.model_dump())

    def _ways(self, phase: Phase) -> list[Way]:
        ways: list[Way] = []
        for name in self.attentions:
            finite = parse_attention(name)[0].feature_dim(self.plan.head_dim) is not None
            if phase == "decode":
                ways.append(Way(name, "auto", "pairs", phase))
            else:
                ways += [Way(name, form, "pairs", phase) for form in ("dense", "chunked")]
            if finite:
                forms = ("recurrent",) if phase == "decode" else ("chunked", "recurrent")
                ways += [Way(name, form, "features", phase) for form in forms]
        return ways

    def parts(self) -> list[tuple[Phase, int]]:
        return [(phase, length) for phase in PHASES for length in self.plan.lengths]

    def opening(self) -> str:
        return f"{len(self.parts())} lengths and phases, {self.plan.repeats} repeats each, in {self.out}."

    def kept_at(self, part: tuple[Phase, int]) -> tuple[Path, type[list[CostPoint]]]:
        phase, length = part
        return self.out / f"points-{phase}-{length}.json", list[CostPoint]

    def measure(self, part: tuple[Phase, int], place: str, progress: StudyProgress) -> list[CostPoint]:
        return self._cell(*part, progress)

    def _points(self) -> list[CostPoint]:
        return [point for cell in self.results for point in cell]

    def _cell(self, phase: Phase, length: int, progress: StudyProgress) -> list[CostPoint]:
        """All ways at one phase and length, interleaved."""
        before = self._points()
        done: dict[Way, CostPoint] = {}
        ready = {}
        for way in self._ways(phase):
            point = self._planned(way, length)
            reason = point.reason or self._too_much(way, length, before)
            if reason:
                done[way] = point.model_copy(update={"status": "skipped", "reason": reason})
                continue
            task, tokens, state = prepare(way, self.shape, length, self.plan.decode_steps)
            _, count = seconds(task, self.shape.device)  # also warms up
            ready[way] = (task, tokens, count, [])
            done[way] = point.model_copy(update={"state_bytes": state})
        for repeat in range(self.plan.repeats):
            for way, (task, tokens, count, times) in ready.items():
                times.append(seconds(task, self.shape.device, count)[0] / tokens)
                share = (repeat + 1) / self.plan.repeats
                text = f"{phase}, {length:,} tokens: {label(way.attention)} {duration(times[-1])} a token"
                progress.update(self.done + 0.99 * share, text)
        for way, (_, _, _, times) in ready.items():
            low, middle, high = _quartiles(times)
            done[way] = done[way].model_copy(update={"seconds_per_token": middle, "low": low, "high": high})
        return list(done.values())

    def _planned(self, way: Way, length: int) -> CostPoint:
        """A point with its plan, or the reason why it cannot be computed."""
        common = {"attention": way.attention, "path": way.path, "phase": way.phase, "length": length}
        try:
            whole = planned(way, self.shape, length)
        except Unsupported as error:
            return CostPoint(**common, form=way.form, status="skipped", reason=str(error))
        flops, traffic, form = float(whole.flops), float(whole.bytes), whole.form
        if way.phase == "decode":
            # the last token of the context: its row of pairs, or one step of the state, and the state read once
            one = planned(Way(way.attention, "auto", way.path, "decode"), self.shape, 1)
            flops = one.flops * (length if way.path == "pairs" else 1)
            traffic, form = float(one.bytes + whole.state_bytes), one.form
        return CostPoint(
            **common, form=form, planned_flops=flops, planned_bytes=traffic,
            planned_seconds_per_token=planned_seconds(way, self.shape, length, self.machine),
            planned_state_bytes=planned(Way(way.attention, "auto", way.path, "decode"), self.shape, length).state_bytes,
        )  # fmt: skip

    def _too_much(self, way: Way, length: int, before: list[CostPoint]) -> str | None:
        scores = self.plan.batch * self.plan.heads * length * length * 4
        if way.form == "dense" and scores > SCORES_LIMIT:
            return f"scores of {size(scores)}"
        if way.phase == "decode":
            return None
        same = [
            p
            for p in before
            if (p.attention, p.form, p.path, p.phase) == (way.attention, way.form, way.path, way.phase)
            and p.length < length
        ]
        if not same:
            return None
        last = max(same, key=lambda p: p.length)
        if last.seconds_per_token is None:
            return "a shorter context was already too slow" if last.reason else None
        growth = (length / last.length) ** (2 if way.path == "pairs" else 1)
        expected = last.seconds_per_token * last.length * growth
        if expected > self.plan.slowest:
            return f"about {duration(expected)} a call, more than {duration(self.plan.slowest)}"
        return None

    def write(self) -> Path:
        plan, points = self.plan, self._points()
        rows = crossings(points) if "softmax" in self.attentions else []
        record = CostRecord(
            finished=len(self.results) == len(self.parts()),
            provenance=self.folder.provenance(self.budget, [0], self.device),
            shape=CostShape(
                batch=plan.batch, heads=plan.heads, kv_heads=plan.heads, head_dim=plan.head_dim, dtype="float32",
                lengths=list(plan.lengths), repeats=plan.repeats, decode_steps=plan.decode_steps,
            ),
            rates=self.rates,
            points=points,
            crossings=rows,
            findings=conclude(points, rows),
        )  # fmt: skip
        return write_page(write_record(record, self.out))


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, by linear interpolation."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    return at(0.25), at(0.5), at(0.75)
