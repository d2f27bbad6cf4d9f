"""Operators of recurrent mixers beside other libraries, and beside what the machine can do at most.

A row for every operator, length and direction: our form as `auto` chooses it, our other forms, the peers, and the
limit: the operations of the formula at the rate of a large matrix product in the same run, or what has to be read and
written at the rate of memory, whichever takes longer. Everyone gets the same inputs and threads, in turns; answers and
gradients are compared before anything is timed. Forms that go token by token in Python are left out beyond 4,096
tokens. Rows that end in -step are one token from a state, and whole models (-model) are timed forward only.

    python -m benchmarks mixers [--quick] [--row NAME] [--length N] [--batch N] [--direction forward|backward]
        [--rounds N] [--budget S] [--threads N] [--ours] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_child, prepare

if TYPE_CHECKING:
    from benchmarks._machine import Limits
    from benchmarks._mixer_rows import Case, Run

DIRECTIONS = ("forward", "backward")
DTYPES = ("float32", "bfloat16")
STEP_ROUNDS = 5
"""Times as many rounds for a single token, which takes microseconds."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mixers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", action="append", help="an operator; default: all")
    parser.add_argument("--length", type=int, action="append", help="tokens; default: 2,048 and 16,384")
    parser.add_argument("--batch", type=int, action="append", help="sequences in a step of an operator; default: 16")
    parser.add_argument(
        "--direction", choices=DIRECTIONS, action="append", help="default: both; backward has forward in it"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed calls each (default 9)")
    parser.add_argument("--budget", type=float, default=6.0, help="seconds a case after which a slow one sits out (6)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--ours", action="store_true", help="without peers and our slower forms")
    parser.add_argument("--quick", action="store_true", help="256 tokens, 3 rounds: a look, no result")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args(arguments)


def contestants(case: Case, length: int, alone: bool) -> tuple[dict[str, Run], dict[str, str]]:
    """Who takes part, ours first, and why others do not."""
    from benchmarks._mixer_rows import SLOW

    first = next(iter(case.ours))
    given: dict[str, Run] = {}
    out: dict[str, str] = {}
    for name, run in (case.ours | case.peers).items():
        if alone and name != first:
            continue
        if length > SLOW and name in case.slow:
            out[name] = "token by token"
            continue
        given[name] = run
    return given, out


def call(run: Run, case: Case, backward: bool) -> Callable[[], tuple[Any, ...]]:
    """Outputs, or the gradients of all inputs."""
    import torch

    if not backward:

        def forward() -> tuple[Any, ...]:
            with torch.no_grad():
                found = run(*case.tensors)
            return found if isinstance(found, tuple) else (found,)

        return forward
    leaves = [x.detach().clone().requires_grad_() for x in case.tensors]
    with torch.no_grad():
        shape = run(*case.tensors).shape  # pyright: ignore[reportAttributeAccessIssue]
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return lambda: torch.autograd.grad(run(*leaves), leaves, upstream)  # pyright: ignore[reportArgumentType]


def moved(case: Case, backward: bool) -> float:
    """Bytes that have to be read and written: forward as the case says, or inputs and outputs once; a backward pass
    reads the inputs again, the outputs' gradients, and writes those of the inputs.
    """
    if case.moved is not None:
        return case.moved
    outputs = call(next(iter(case.ours.values())), case, backward=False)()
    inside, outside = (sum(x.nbytes for x in each) for each in (case.tensors, outputs))
    return 3 * inside + 2 * outside if backward else inside + outside


def measure(
    row: str, case: Case, length: int, backward: bool, rounds: int, budget: float, alone: bool
) -> dict[str, Any]:
    """Median and quartiles of everyone in milliseconds, after their answers were compared."""
    import torch

    from benchmarks._clock import Spread, interleave

    given, left_out = contestants(case, length, alone)
    calls: dict[str, Callable[[], object]] = {}
    right: tuple[Any, ...] | None = None
    for name, run in given.items():
        try:
            made = call(run, case, backward)
            found = made()
        except ImportError as error:
            left_out[name] = str(error)
            continue
        right = found if right is None else right
        for x, y in zip(found, right, strict=True):
            error = float((x.float() - y.float()).abs().max() / y.abs().max().clamp_min(1e-30))
            if not error <= case.agrees:
                raise SystemExit(f"mixers: {name} of {row} is off by {error:.1e}, so nothing of it is timed")
        calls[name] = made
    times = interleave(calls | case.beside, rounds, budget, torch.device("cpu"))
    spreads = {name: Spread.of(taken) for name, taken in times.items()}
    return {
        "row": row,
        "shape": case.shape,
        "length": length,
        "backward": backward,
        "dtype": case.dtype,
        "flops": case.flops[backward],
        "bytes": moved(case, backward),
        "ms": {n: {"median": 1e3 * s.median, "low": 1e3 * s.low, "high": 1e3 * s.high} for n, s in spreads.items()},
        "left_out": left_out,
    }


def limit_ms(found: dict[str, Any], limits: Limits) -> float:
    return 1e3 * limits.least_seconds(found["flops"], found["bytes"], found["dtype"])


def cases(name: str, options: argparse.Namespace) -> Iterator[tuple[Case, int, bool]]:
    """Of a row: the case, its tokens, and whether it is timed with backward."""
    from benchmarks._mixer_rows import ROWS
    from benchmarks._rwkv_rows import TOKENS
    from benchmarks._step_rows import STEPS

    directions = options.direction or DIRECTIONS
    if name not in ROWS and "forward" in directions:
        made = [STEPS[name](batch) for batch in options.batch or [16]] if name in STEPS else [TOKENS[name]()]
        yield from ((case, 1, False) for case in made)
    if name not in ROWS:
        return
    for length in options.length or ([256] if options.quick else [2048, 16384]):
        for direction in directions:
            case, backward = ROWS[name](length), direction == "backward"
            if case.flops[backward] is not None:
                yield case, length, backward


def shown(found: dict[str, Any], limits: Limits) -> str:
    """Lines of the table for a row."""
    limit = limit_ms(found, limits)
    direction = "forward and backward" if found["backward"] else "forward"
    work = f"{found['flops'] / 1e9:.3g} GFLOP, {found['bytes'] / 1e6:.3g} MB, at best {limit:.3g} ms"
    lines = [f"{found['row']}, {found['shape']}, {direction}: {work}"]
    lines.append(f"  {'':40}{'ms':>10}  {'quartiles':20}{'/ limit':>8}{'/ ours':>9}")
    ours = next(iter(found["ms"].values()))["median"]
    for name, s in found["ms"].items():
        spread = f"{s['low']:.4g} to {s['high']:.4g}"
        lines.append(f"  {name:40}{s['median']:10.4g}  {spread:20}{s['median'] / limit:8.2f}{s['median'] / ours:9.2f}")
    lines += [f"  {name:40}{'-':>10}  left out: {reason}" for name, reason in found["left_out"].items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if not in_child("benchmarks.mixers", arguments):
        return
    prepare(options.threads)

    import torch

    from benchmarks._machine import measure as limits_of
    from benchmarks._mixer_rows import ROWS
    from benchmarks._rwkv_rows import TOKENS
    from benchmarks._step_rows import STEPS

    rows = [*ROWS, *STEPS, *TOKENS]
    if unknown := [name for name in options.row or () if name not in rows]:
        raise SystemExit(f"there is no row {unknown[0]!r}; there are {', '.join(rows)}")
    torch.manual_seed(0)
    rounds, budget = (3, 0.5) if options.quick else (options.rounds, options.budget)
    device = torch.device("cpu")
    print(f"{torch.get_num_threads()} threads, median of {rounds} (quartiles), milliseconds", flush=True)
    limits = limits_of(DTYPES, device, quick=options.quick)
    results: list[dict[str, Any]] = []
    for name in options.row or rows:
        for case, length, backward in cases(name, options):
            turns = rounds if length > 1 or options.quick else STEP_ROUNDS * rounds
            results.append(measure(name, case, length, backward, turns, budget, options.ours))
            print(shown(results[-1], limits), flush=True)
    if not results:
        raise SystemExit(f"{', '.join(options.row)}: forward only, so that nothing is timed backward")
    limits = limits.merge(limits_of(DTYPES, device, quick=options.quick))
    rates = ", ".join(f"{limits.flops(dtype) / 1e9:,.0f} GFLOP/s in {dtype}" for dtype in DTYPES)
    print(f"\nBy the best rates of the whole run, {rates}, {limits.bandwidth / 1e9:.3g} GB/s:\n")
    print("\n".join(shown(found, limits) for found in results))
    if options.json:
        record = {
            "threads": torch.get_num_threads(),
            "rounds": rounds,
            "products": {dtype: limits.flops(dtype) for dtype in DTYPES},
            "bytes_per_second": limits.bandwidth,
            "cases": [found | {"limit_ms": limit_ms(found, limits)} for found in results],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
