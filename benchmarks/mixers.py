"""Operators of recurrent mixers beside other libraries, and beside what the machine can do at most.

A row for every operator, length and direction: our form as `auto` chooses it, our other forms, the peers, and the
limit, which is the operations of the formula at the rate of a large float32 matrix product in the same run. Everyone
gets the same inputs and threads, in turns; answers and gradients are compared before anything is timed. Forms that go
token by token in Python are left out beyond 4,096 tokens.

    python -m benchmarks mixers [--quick] [--row NAME] [--length N] [--direction forward|backward] [--rounds N]
        [--budget S] [--threads N] [--ours] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_child, prepare

if TYPE_CHECKING:
    from benchmarks._mixer_rows import Case, Run

DIRECTIONS = ("forward", "backward")
AGREES = 1e-3
"""Largest difference from ours, relative to the largest entry, of an answer or a gradient: sums of float32 over
thousands of tokens, in other orders."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mixers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", action="append", help="an operator; default: all")
    parser.add_argument("--length", type=int, action="append", help="tokens; default: 2,048 and 16,384")
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
                return (run(*case.tensors),)

        return forward
    leaves = [x.detach().clone().requires_grad_() for x in case.tensors]
    with torch.no_grad():
        shape = run(*case.tensors).shape
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return lambda: torch.autograd.grad(run(*leaves), leaves, upstream)


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
            error = float((x - y).abs().max() / y.abs().max().clamp_min(1e-30))
            if not error <= AGREES:
                raise SystemExit(f"mixers: {name} of {row} is off by {error:.1e}, so nothing of it is timed")
        calls[name] = made
    times = interleave(calls, rounds, budget, torch.device("cpu"))
    spreads = {name: Spread.of(taken) for name, taken in times.items()}
    return {
        "row": row,
        "shape": case.shape,
        "length": length,
        "backward": backward,
        "flops": case.flops[backward],
        "ms": {n: {"median": 1e3 * s.median, "low": 1e3 * s.low, "high": 1e3 * s.high} for n, s in spreads.items()},
        "left_out": left_out,
    }


def shown(found: dict[str, Any], rate: float) -> str:
    """Lines of the table for a row; rate: FLOP a second of the products."""
    limit = 1e3 * found["flops"] / rate
    direction = "forward and backward" if found["backward"] else "forward"
    lines = [f"{found['row']}, {found['shape']}, {direction}: {found['flops'] / 1e9:.3g} GFLOP, at best {limit:.3g} ms"]
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

    if unknown := [name for name in options.row or () if name not in ROWS]:
        raise SystemExit(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    torch.manual_seed(0)
    lengths = options.length or ([256] if options.quick else [2048, 16384])
    rounds, budget = (3, 0.5) if options.quick else (options.rounds, options.budget)
    device = torch.device("cpu")
    print(f"{torch.get_num_threads()} threads, median of {rounds} (quartiles), milliseconds", flush=True)
    limits = limits_of(("float32",), device, quick=options.quick)
    results: list[dict[str, Any]] = []
    for name in options.row or ROWS:
        for length in lengths:
            for direction in options.direction or DIRECTIONS:
                case, backward = ROWS[name](length), direction == "backward"
                results.append(measure(name, case, length, backward, rounds, budget, options.ours))
                print(shown(results[-1], limits.flops("float32")), flush=True)
    limits = limits.merge(limits_of(("float32",), device, quick=options.quick))
    rate = limits.flops("float32")
    print(f"\nBy the best rate of the whole run, {rate / 1e9:,.0f} GFLOP/s:\n")
    print("\n".join(shown(found, rate) for found in results))
    if options.json:
        record = {"threads": torch.get_num_threads(), "rounds": rounds, "products": rate, "cases": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
