"""Records with made-up numbers, only to test how records are written and rendered."""

from __future__ import annotations

import math

from mercer.studies.position_arms import parse_position_arms
from mercer.studies.positions_findings import conclude
from mercer.studies.positions_summary import Measured, summarize
from mercer.studies.records import (
    ApproximationRecord,
    Corpus,
    CostRecord,
    Finding,
    OrdersRecord,
    PositionsRecord,
    Provenance,
    RecallRecord,
)
from mercer.studies.records.approximation import (
    ApproximationArm,
    ApproximationInputs,
    ApproximationNeed,
    ApproximationPoint,
)
from mercer.studies.records.common import Interval
from mercer.studies.records.cost import CostPoint, CostShape, Crossing, MachineRates, Where
from mercer.studies.records.orders import Arm, ArmSummary, OrdersTrial, Point
from mercer.studies.records.positions import PositionsMeasurement, PositionsRun
from mercer.studies.records.recall import Capacity, RecallResult, RecallSummary, RecallTask, RecallTrial
from mercer.studies.statistics import mean_interval, paired_interval

FINAL = {
    "softmax": 1.87,
    "exp-l2": 2.09,
    "exp-l2+gain": 2.0,
    "exp-rms": 2.15,
    "elu-sum": 2.36,
    "taylor1-l2": 2.33,
    "taylor2-l2": 2.28,
    "taylor3-l2": 2.16,
    "taylor4-l2": 2.17,
    "taylor2-sum": 2.13,
    "taylor4-sum": 2.01,
}


def provenance(study: str, seeds: list[int]) -> Provenance:
    return Provenance(
        command=f"mercer study {study} --budget quick --out runs/{study}",
        mercer_version="0.1.0",
        budget="quick",
        seeds=seeds,
        device="cpu",
        started="2026-01-02T03:04:05+00:00",
        updated="2026-01-02T03:13:05+00:00",
        seconds=540.0,
        peak_memory_bytes=2**30,
        environment={"python": "3.11.7", "torch": "2.13.0", "cpu": {"model": "An <example> & more", "threads": 2}},
    )


def _arm(name: str) -> Arm:
    base, _, gain = name.partition("+")
    kernel = "exp" if base == "softmax" else base.split("-")[0]
    order = int(kernel[6:]) if kernel.startswith("taylor") else None
    family = "softmax" if base == "softmax" else "taylor" if order else "linear" if kernel == "elu" else "exp"
    normalizer = "sum" if base == "softmax" else base.split("-")[1]
    return Arm(
        name=name, attention=base, family=family, normalizer=normalizer, order=order, gain_init=0.1 if gain else None
    )


def orders(seeds: int = 1, finished: bool = True) -> OrdersRecord:
    trials = []
    for place, (name, loss) in enumerate(FINAL.items()):
        for seed in range(seeds):
            final = loss + 0.01 * seed * (-1) ** place
            curve = [Point(step=s, loss=final + (5.6 - final) * math.exp(-s / 60)) for s in range(0, 301, 30)]
            blocks = [final + 0.2 * math.sin(b) + 0.01 * math.cos(b * (place + 1)) for b in range(32)]
            trials.append(
                OrdersTrial(
                    arm=name,
                    seed=seed,
                    parameters=820_000,
                    steps=300,
                    train_curve=curve,
                    heldout_curve=curve,
                    heldout_blocks=blocks,
                    loss=final,
                    bits_per_byte=final / math.log(2),
                    tokens_per_second=10_000 - 500 * place,
                    seconds=40,
                )
            )
    by_arm = {name: [t for t in trials if t.arm == name] for name in FINAL}

    def samples(name: str) -> list[float]:
        return [t.loss or 0.0 for t in by_arm[name]] if seeds > 1 else by_arm[name][0].heldout_blocks

    over = "seeds" if seeds > 1 else "blocks"
    summaries = [
        ArmSummary(
            arm=name,
            loss=mean_interval(samples(name), over),
            bits_per_byte=FINAL[name] / math.log(2),
            gap=None if name == "softmax" else paired_interval(samples(name), samples("softmax"), over),
            tokens_per_second=by_arm[name][0].tokens_per_second,
        )
        for name in FINAL
    ]
    return OrdersRecord(
        finished=finished,
        provenance=provenance("orders", list(range(seeds))),
        corpus=Corpus(
            name="Python 3.11.7 standard library",
            sha256="ab" * 32,
            train_files=900,
            heldout_files=45,
            train_tokens=11_000_000,
            heldout_tokens=600_000,
        ),
        model={"dim": 128, "layers": 4, "heads": 8},
        training={"steps": 300, "batch_size": 16, "length": 256, "learning_rate": 0.003},
        calibration=dict.fromkeys(FINAL, 0.2),
        equivalence_margin=0.02,
        seed_allowance=0.03,
        arms=[_arm(name) for name in FINAL],
        trials=trials,
        summaries=summaries,
        findings=[
            Finding(
                question="Does the L2 norm train as well as the sum?",
                verdict="refuted",
                text="Exp with L2 ends 0.220 ± 0.004 nats above softmax, more than the margin of 0.02.",
            ),
            Finding(
                question="Do higher orders come closer to the exponential?",
                verdict="supported",
                text="From order 1 to order 4 the loss falls by 0.160 ± 0.005 nats.",
            ),
            Finding(
                question="Is order 4 as good as exp?", verdict="undecided", text="The interval holds both answers."
            ),
        ],
    )


def recall(finished: bool = True) -> RecallRecord:
    pairs = [4, 8, 16, 32, 64]
    room = {"softmax": 1e9, "taylor2-l2": 40.0, "softmax,taylor2-sum": 30.0, "elu-sum": 9.0, "taylor1-l2": 2.0}
    features = {"softmax": None, "taylor2-l2": 153, "softmax,taylor2-sum": 153, "elu-sum": 16, "taylor1-l2": 17}
    trials, summaries, capacities = [], [], []
    for name, half in room.items():
        accuracy = {n: 1 / (1 + (n / half) ** 3) for n in pairs}
        for rate, share in ((1e-3, 0.9), (3e-3, 1.0)):
            results = [RecallResult(pairs=n, accuracy=share * accuracy[n], loss=1.0) for n in pairs]
            trials.append(
                RecallTrial(
                    attention=name,
                    dim=64,
                    learning_rate=rate,
                    seed=0,
                    results=results,
                    steps=400,
                    seconds=9,
                    parameters=100_000,
                )
            )
        summaries += [
            RecallSummary(
                attention=name,
                dim=64,
                pairs=n,
                accuracy=mean_interval([accuracy[n]]),
                learning_rate=3e-3,
                state_bytes=8192 * n if features[name] is None else 544 * (features[name] or 0),
                predicted=1 / (1 + (n / half / 0.7) ** 2),
            )
            for n in pairs
        ]
        capacities.append(
            Capacity(
                attention=name,
                dim=64,
                feature_dim=features[name],
                effective_features=3.0,
                largest_tried=64,
                smallest_tried=4,
                predicted=None if half > 64 else half * 0.7,
                found=half if 4 < half < 64 else None,
            )
        )
    return RecallRecord(
        finished=finished,
        provenance=provenance("recall", [0]),
        task=RecallTask(vocabulary=256, pairs=pairs, length_per_pair=8, power=0.01, heldout_sequences=128),
        model={"layers": 2, "heads": 4},
        training={"steps": 400, "batch": 64, "learning_rates": [1e-3, 3e-3]},
        trials=trials,
        summaries=summaries,
        capacities=capacities,
        findings=[Finding(question="Does recall follow the state?", verdict="supported", text="It does.")],
    )


def cost(finished: bool = True) -> CostRecord:
    lengths = [256, 1024, 4096, 16384]
    ways = [
        ("softmax", "dense", "pairs"),
        ("softmax", "chunked", "pairs"),
        ("elu-sum", "chunked", "features"),
        ("taylor2-l2", "chunked", "features"),
        ("taylor2-l2", "recurrent", "features"),
    ]
    points = []
    for phase in ("prefill", "decode"):
        for attention, form, path in ways:
            for n in lengths:
                seconds = (1e-9 * n if path == "pairs" else 4e-6) * (2 if form == "recurrent" else 1)
                points.append(
                    CostPoint(
                        attention=attention,
                        form=form,
                        path=path,
                        phase=phase,
                        length=n,
                        seconds_per_token=seconds,
                        low=0.9 * seconds,
                        high=1.2 * seconds,
                        state_bytes=n * 4096 if path == "pairs" else 90_000,
                        planned_flops=1e6 * n,
                        planned_bytes=1e5 * n,
                        planned_state_bytes=n * 4096 if path == "pairs" else 90_000,
                        planned_seconds_per_token=0.8 * seconds,
                    )
                )
    points.append(
        CostPoint(
            attention="softmax",
            form="dense",
            path="pairs",
            phase="prefill",
            length=65536,
            status="skipped",
            reason="scores of 17 GB",
        )
    )
    return CostRecord(
        finished=finished,
        provenance=provenance("cost", [0]),
        shape=CostShape(
            batch=1, heads=8, kv_heads=8, head_dim=16, dtype="float32", lengths=lengths, repeats=5, decode_steps=32
        ),
        rates=MachineRates(flops_per_second=1.5e11, bytes_per_second=4e10),
        points=points,
        crossings=[
            Crossing(
                quantity="time",
                phase="prefill",
                incumbent="softmax",
                challenger="taylor2-l2",
                measured=Where(kind="at", length=4000.0),
                planned=Where(kind="at", length=3500.0),
            ),
            Crossing(
                quantity="state",
                phase="decode",
                incumbent="softmax",
                challenger="elu-sum",
                measured=Where(kind="always"),
                planned=Where(kind="never"),
            ),
        ],
        findings=[
            Finding(question="Does the plan rank the forms as the clock does?", verdict="undecided", text="In 5 of 6.")
        ],
    )


def approximation(finished: bool = True) -> ApproximationRecord:
    arms = [
        ApproximationArm(
            name=f"taylor{p}{'-signed' if p % 2 else ''}-sum", family="taylor", series="taylor-sum", order=p
        )
        for p in range(1, 5)
    ]
    arms += [
        ApproximationArm(name=name.format(m), family="features", series=name.format(""), count=m)
        for name in ("favor{}-sum", "favor{}-sum+independent", "trig{}-signed-sum")
        for m in (16, 64, 256)
    ]
    arms.append(ApproximationArm(name="elu-sum", family="other", series="elu-sum"))
    spreads: list[float | None] = [0.5, 1.0, 4.0, None, None]
    inputs = [
        ApproximationInputs(
            name=f"layer{place - 3}" if spread is None else f"random-D16-sd{spread:g}",
            kind="model" if spread is None else "random", dim=16, batch=1, heads=2, length=64, rows=8, spread=spread,
            layer=place - 3 if spread is None else None, score_low=-4, score_mean=0, score_deviation=spread or 1.2,
            score_high=5,
        )
        for place, spread in enumerate(spreads)
    ]  # fmt: skip
    points, needs = [], []
    for at in inputs:
        size = at.score_deviation
        for arm in arms:
            drawn = arm.count is not None
            error = 0.6 * size
            if arm.order:
                error = size**arm.order / math.factorial(arm.order + 1)
            if arm.count:
                error = size * 6 * arm.count ** (-0.5 if size < 1 else -0.2) * (200 if "trig" in arm.name else 1)
            found = Interval(
                mean=error, low=0.8 * error, high=1.3 * error, count=8, over="rows and draws" if drawn else "rows"
            )
            theory = None if not drawn else math.expm1(4 * size) / (arm.count or 1)
            points.append(
                ApproximationPoint(
                    inputs=at.name, arm=arm.name, error=found, by_head=[error, 1.1 * error],
                    by_draw=[0.9 * error, 1.1 * error] if drawn else [],
                    variation=found.model_copy(update={"mean": error / 3, "low": error / 4, "high": error / 2}),
                    negative=0.1 if (arm.order or 0) % 2 else 0, not_positive=0, theory=theory,
                    median=None if theory is None else theory / 5,
                    measured=None if theory is None else found.model_copy(update={"mean": theory, "low": theory / 2}),
                )
            )  # fmt: skip
        needs.append(
            ApproximationNeed(
                inputs=at.name, series="taylor-sum", kind="order", number=None if size > 3 else 6, error=0.05,
                pointwise=None if size > 3 else 20, text="for an error of 0.1, order 6",
            )
        )  # fmt: skip
        needs.append(
            ApproximationNeed(
                inputs=at.name, series="favor-sum", kind="features", number=1200 if size < 1 else None,
                exponent=Interval(mean=0.5 if size < 1 else 0.2, low=0.1, high=0.6, count=3, over="draws"),
                holds=size < 1, predicted=1200.0, text="1,200 features",
            )
        )  # fmt: skip
    return ApproximationRecord(
        finished=finished,
        provenance=provenance("approximation", [0]),
        corpus=Corpus(
            name="Python 3.11.7 standard library", sha256="ab" * 32, train_files=900, heldout_files=45,
            train_tokens=11_000_000, heldout_tokens=600_000,
        ),
        model={"dim": 32, "layers": 2, "heads": 2},
        training={"steps": 300},
        model_source="trained here",
        heldout_loss=1.9,
        target=0.1,
        draws=8,
        arms=arms,
        inputs=inputs,
        points=points,
        needs=needs,
        findings=[Finding(question="Does the law hold?", verdict="undecided", text="In 1 of 5 cases.")],
    )  # fmt: skip


GROWTH = {"none": 0.4, "sinusoidal": 0.9, "rotary": 0.5, "rotary+yarn": 0.03, "rotary+window": 0.01, "alibi": -0.05}
"""Nats that each way to read loses, from the first bucket beyond the trained length to the last."""


def positions(seeds: int = 1, finished: bool = True) -> PositionsRecord:
    arms = parse_position_arms(["learned", *GROWTH], 8)
    runs, measurements = [], []
    for place, position in enumerate(dict.fromkeys(arm.position for arm in arms)):
        for seed in range(seeds):
            level = 1.8 + 0.03 * place + 0.01 * seed * (-1) ** place
            curve = [Point(step=s, loss=level + 3 * math.exp(-s / 60)) for s in range(0, 301, 30)]
            runs.append(
                PositionsRun(
                    position=position, seed=seed, parameters=820_000, steps=300, heldout_curve=curve,
                    loss=curve[-1].loss, tokens_per_second=10_000, seconds=40,
                )
            )  # fmt: skip
            text = [[0.3 * math.sin(7 * block + bucket) for bucket in range(32)] for block in range(8)]
            for arm in (arm for arm in arms if arm.position == position):
                total = GROWTH.get(arm.name, 0.0)
                losses = [
                    [
                        level + row[b] + (0.1 / (b + 1) if b < 4 else total * (b - 3) / 28)
                        + 0.004 * math.cos(block * (place + 2) + b + seed) for b in range(4 if arm.bounded else 32)
                    ]
                    if arm.reading != "restart" else [level + x for x in row]
                    for block, row in enumerate(text)
                ]  # fmt: skip
                measurements.append(PositionsMeasurement(arm=arm.name, seed=seed, losses=losses, seconds=2))
    measured = Measured(arms, measurements, 4)
    summaries = summarize(measured, 32)
    return PositionsRecord(
        finished=finished,
        provenance=provenance("positions", list(range(seeds))),
        corpus=Corpus(
            name="Python 3.11.7 standard library", sha256="ab" * 32, train_files=900, heldout_files=45,
            train_tokens=11_000_000, heldout_tokens=600_000,
        ),
        model={"dim": 128, "layers": 4, "heads": 4},
        training={"steps": 300, "batch": 16, "length": 128},
        calibration={"none": 0.2, "rotary": 0.2},
        trained_length=128,
        evaluated_length=1024,
        bucket=32,
        windows=64,
        margin=0.05,
        inside_margin=0.02,
        seed_allowance=0.03,
        arms=arms,
        runs=runs,
        measurements=measurements,
        summaries=summaries,
        findings=conclude(measured, summaries, runs, 128, 1024),
    )  # fmt: skip
