"""Context lengths from which a fixed state beats a cache: as `mercer.advise` predicts them, and as measured.

python -m benchmarks.crossings [--threads N] [--rounds N] [--machine FILE] [--json FILE]

Causal, float32, 8 heads. Around each predicted length softmax and the other kernel take turns, and where the medians
cross is read off between the lengths. Predictions come from numbers measured at the start, or from FILE, and beside
them stands what the default numbers say.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KERNELS = ("elu-sum", "taylor2-sum", "favor256-sum")
DIMS = (16, 64)
HEADS = 8
AROUND = (0.4, 0.63, 1.0, 1.6, 2.5)
"""Lengths that are timed, in units of the predicted crossing."""
SHORTEST, LONGEST = 16, 20_000
BUDGET = 1.5
"""Seconds after which a slow call sits out further rounds."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="crossings", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes by itself")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--machine", type=Path, help="numbers of a machine instead of measuring them")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)

    from mercer.runtime.allocator import tune

    tune()
    import torch

    from mercer.advice import advise, measure_machine
    from mercer.core.machine import Machine
    from mercer.core.machine_default import DEFAULT

    if options.threads:
        torch.set_num_threads(options.threads)
    machine = Machine.from_json(options.machine.read_text()) if options.machine else measure_machine()
    print(f"{machine.name}, {machine.threads} threads; 8 heads, float32, causal, median of up to {options.rounds}")
    print(f"{'':14}{'D':>4} {'':8}{'predicted':>11}{'measured':>11}{'ratio':>7}{'by default numbers':>20}")
    rows: list[dict[str, Any]] = []
    for dim in DIMS:
        found = {
            which: advise(dim=dim, heads=HEADS, context=1024, kernels=KERNELS, machine=numbers)
            for which, numbers in (("here", machine), ("default", DEFAULT))
        }
        for place, name in enumerate(KERNELS):
            for phase in ("reading", "decode"):
                predicted, default = (getattr(found[which].options[place].crossings, phase) for which in found)
                measured = measure(name, dim, phase, predicted, options.rounds)
                ratio = None if measured is None or predicted is None else max(predicted, SHORTEST) / measured
                words = "" if ratio is None else f"{ratio:.2f}"
                print(
                    f"{name:14}{dim:4} {phase:8}{_length(predicted):>11}{_length(measured):>11}{words:>7}"
                    f"{_length(default):>20}",
                    flush=True,
                )
                rows.append(
                    {"attention": name, "dim": dim, "phase": phase, "predicted": predicted, "measured": measured,
                     "ratio": ratio, "default": default}
                )  # fmt: skip
    ratios = [abs(math.log(row["ratio"])) for row in rows if row["ratio"]]
    for factor in (1.5, 2.0):
        print(f"within a factor of {factor}: {sum(r <= math.log(factor) for r in ratios)} of {len(rows)}")
    if options.json:
        record = {"machine": json.loads(machine.to_json()), "heads": HEADS, "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(name: str, dim: int, phase: str, predicted: int | None, rounds: int) -> float | None:
    """Where the medians cross; the shortest length timed if the kernel is always the quicker one, None if never."""
    import torch

    from benchmarks._clock import Spread, interleave
    from mercer.studies.cost_summary import crossing

    cpu = torch.device("cpu")
    middle = LONGEST / AROUND[-1] if predicted is None else predicted
    lengths = sorted({min(max(round(middle * factor), SHORTEST), LONGEST) for factor in AROUND})
    if lengths[-1] < 4 * SHORTEST:  # predicted to be quicker from the beginning, or nearly so
        lengths = [SHORTEST * 2**step for step in range(6)]
    curves: dict[str, dict[int, float]] = {"softmax": {}, name: {}}
    with torch.inference_mode():
        for length in lengths:
            calls = {other: call(other, dim, phase, length) for other in curves}
            for other, times in interleave(calls, rounds, BUDGET, cpu).items():
                curves[other][length] = Spread.of(times).median
    where = crossing(curves["softmax"], curves[name])
    return {"at": where.length, "always": float(lengths[0])}.get(where.kind)


def call(name: str, dim: int, phase: str, length: int) -> Callable[[], object]:
    """Reading a context and keeping the state, or 8 times the token after it."""
    import torch

    from mercer import Causal, attention, parse_attention

    kernel, normalizer = parse_attention(name)
    parts: dict[str, Any] = {"kernel": kernel, "normalizer": normalizer, "structure": Causal(), "return_state": True}
    context = [torch.randn(1, HEADS, length, dim) for _ in range(3)]
    if phase == "reading":
        return lambda: attention(*context, **parts)
    token = [torch.randn(1, HEADS, 1, dim) for _ in range(3)]
    state = attention(*context, **parts)[1]

    def steps() -> None:
        for _ in range(8):
            attention(*token, **parts, state=state)

    return steps


def _length(value: float | None) -> str:
    return "never" if value is None else "always" if value <= SHORTEST else f"{value:,.0f}"


if __name__ == "__main__":
    main(sys.argv[1:])
