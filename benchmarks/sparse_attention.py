"""Sparse patterns: time and memory against length, and the same patterns in other libraries.

The line: forward, forward and backward, and peak memory of exact attention under each pattern, 8 heads of 64, float32,
for lengths to 65,536. Pairs are the visible ones of a head; a forward pass takes 4 D operations of each, with backward
14 D. Memory is the peak above the inputs of a pass forward and backward, in a process of its own (Linux only).

The rivals: ours, torch's SDPA with a dense mask, the cores of transformers' Longformer and BigBird, local-attention
and, with --compile (which needs a C++ compiler), flex_attention, on the same inputs. Whoever differs from the formula
in float64 is not timed. Bigbird here is what the hub's models compute when they are evaluated.

    python -m benchmarks sparse_attention [--part line|rivals] [--pattern NAME] [--length N] [--compile] [--rounds N]
        [--budget SECONDS] [--threads N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_child, prepare

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks._sparse_rivals import Rival
    from mercer.core.structures import Structure

HEADS, DIM = 8, 64
LINE = ("longformer", "strided", "bigbird", "blocks", "dilated", "causal")
RIVALS = ("window", "blocks", "bigbird")
AGREES = 1e-5
"""Largest error of float32, relative to the largest entry of the formula in float64, of who is timed."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sparse_attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("line", "rivals"), action="append", help="default: both")
    parser.add_argument("--pattern", choices=sorted({*LINE, *RIVALS}), action="append", help="default: all")
    parser.add_argument("--length", type=int, action="append", help="default: 4,096 to 65,536; rivals 4,096 and 8,192")
    parser.add_argument("--compile", action="store_true", help="also time flex_attention")
    parser.add_argument("--rounds", type=int, default=11, help="timed calls each (default 11)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds, after 3 rounds at least (default 20)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens, 3 rounds: a look, no result")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--one", nargs=2, metavar=("PATTERN", "LENGTH"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def pattern(name: str) -> Structure:
    """The patterns of the line."""
    from mercer import BigBird, Blocks, Causal, Longformer, Strided, Window

    patterns: dict[str, Structure] = {
        "longformer": Longformer(512, (0,)),
        "strided": Strided(256),
        "bigbird": BigBird(64),
        "blocks": Blocks(256, before=1) & Causal(),
        "dilated": Window(256, 0, dilation=4),
        "causal": Causal(),
    }
    return patterns[name]


def pairs(structure: Structure, length: int) -> int:
    """Visible pairs of one head."""
    from mercer.core.cost import visible_pairs
    from mercer.core.merged import merge
    from mercer.core.support import Sizes

    return visible_pairs(merge(structure), Sizes(1, HEADS, HEADS, length, length, DIM, DIM))


def operations(pairs: int, backward: bool) -> int:
    """Of all heads: two products forward, and five more backward, which makes the scores again."""
    return (14 if backward else 4) * DIM * HEADS * pairs


def inputs(length: int) -> tuple[Tensor, ...]:
    import torch

    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(4))


def call(run: Callable[..., Tensor], given: tuple[Tensor, ...], backward: bool) -> Callable[[], object]:
    """Forward without gradients, or forward and backward."""
    import torch

    q, k, v, upstream = given
    if backward:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(run(*leaves), leaves, upstream)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(q, k, v)

    return forward


def timed(calls: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median and quartiles in seconds of each, in turns."""
    import torch

    from benchmarks._clock import Spread, interleave

    times = interleave(calls, options.rounds, options.budget, torch.device("cpu"))
    spreads = {name: Spread.of(taken) for name, taken in times.items()}
    return {n: {"median": s.median, "low": s.low, "high": s.high, "calls": len(times[n])} for n, s in spreads.items()}


def peak(name: str, length: int) -> int:
    """Peak bytes above the inputs of one pass in this process."""
    from benchmarks._memory import peak_above
    from mercer import attention

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, structure=pattern(name), form="chunked")

    call(run, inputs(1024), True)()  # loads and compiles what it needs
    given = inputs(length)
    leaves = [x.requires_grad_() for x in given[:3]]
    return peak_above(lambda: run(*leaves).backward(given[3]))


def line_case(name: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of one pattern at one length."""
    from mercer import attention, plan

    structure, given = pattern(name), inputs(length)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, structure=structure, form="chunked")

    seconds = timed({"forward": call(run, given, False), "with backward": call(run, given, True)}, options)
    command = [sys.executable, "-m", "benchmarks.sparse_attention", "--one", name, str(length)]
    command += ["--threads", str(options.threads)] if options.threads else []
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seen = pairs(structure, length)
    rates = {way: operations(seen, way == "with backward") / spread["median"] / 1e9 for way, spread in seconds.items()}
    return {
        "part": "line",
        "pattern": name,
        "structure": str(structure),
        "length": length,
        "pairs": seen,
        "seconds": seconds,
        "gflops": rates,
        "peak_bytes": json.loads(out.splitlines()[-1])["peak"],
        "backend": plan(*given[:3], structure=structure, form="chunked").backend,
    }


def admitted(name: str, rivals: list[Rival], length: int) -> tuple[dict[str, Rival], dict[str, str]]:
    """Those whose answers are right in the first head, and why the others may not take part."""
    import torch

    from benchmarks._sparse_rivals import expected, tasks

    q, k, v, _ = inputs(length)
    exact = expected(tasks()[name], q[:, :1], k[:, :1], v[:, :1])
    entered: dict[str, Rival] = {}
    refused: dict[str, str] = {}
    for one in rivals:
        with torch.no_grad():
            error = float((one.run(q, k, v)[:, :1] - exact).abs().max() / exact.abs().max())
        if error <= AGREES:
            entered[one.name] = one
        else:
            refused[one.name] = f"its answer is off by {error:.1e} (allowed {AGREES:.0e})"
    return entered, refused


def rival_case(name: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """All ways to compute a pattern at one length."""
    from benchmarks._sparse_rivals import rivals, tasks

    task = tasks()[name]
    if length % task.multiple:
        raise SystemExit(f"sparse_attention: {name} takes lengths that are multiples of {task.multiple}, not {length}")
    entered, refused = admitted(name, rivals(name, HEADS, DIM, length, options.compile), length)
    given = inputs(length)
    seconds: dict[str, dict[str, dict[str, float]]] = {}
    for way, backward in (("forward", False), ("with backward", True)):
        calls = {n: call(one.run, given, backward) for n, one in entered.items() if one.backward or not backward}
        seconds[way] = timed(calls, options)
    return {
        "part": "rivals",
        "pattern": name,
        "structure": str(task.structure),
        "length": length,
        "pairs": pairs(task.structure, length),
        "seconds": seconds,
        "refused": refused,
        "notes": {n: one.note for n, one in entered.items() if one.note},
    }


def milliseconds(spread: dict[str, float]) -> str:
    return f"{1e3 * spread['median']:10,.1f} ({1e3 * spread['low']:,.1f} to {1e3 * spread['high']:,.1f})"


def shown(found: dict[str, Any]) -> str:
    """Lines of the table for a case."""
    title = f"{found['pattern']:11}{found['length']:7,} tokens, {found['pairs'] / found['length']:8,.1f} pairs a query"
    if found["part"] == "line":
        rates = ", ".join(
            f"{way} {milliseconds(spread)} ms, {found['gflops'][way]:.0f} GFLOP/s"
            for way, spread in found["seconds"].items()
        )
        return f"{title}: {rates}, {found['peak_bytes'] / found['length']:,.0f} bytes a token at the peak"
    lines = [f"{title}, {found['structure']}"]
    for way, spreads in found["seconds"].items():
        ours = spreads.get("ours")
        for name, spread in spreads.items():
            ratio = f"  {spread['median'] / ours['median']:6.2f} of ours" if ours and name != "ours" else ""
            lines.append(f"  {way:15}{name:26}{milliseconds(spread)} ms{ratio}")
    lines += [f"  {name}: left out, {reason}" for name, reason in found["refused"].items()]
    lines += [f"  {name}: {note}" for name, note in found["notes"].items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.one:
        prepare(options.threads)
        print(json.dumps({"peak": peak(options.one[0], int(options.one[1]))}))
        return
    if not in_child("benchmarks.sparse_attention", arguments):
        return
    prepare(options.threads)

    import torch

    if options.quick:
        options.rounds = 3
    print(
        f"{HEADS} heads of {DIM}, float32, batch 1, {torch.get_num_threads()} threads, milliseconds, median (quartiles)"
    )
    results: list[dict[str, Any]] = []
    parts = {
        "line": (LINE, (4096, 8192, 16384, 32768, 65536), line_case),
        "rivals": (RIVALS, (4096, 8192), rival_case),
    }
    for part in options.part or parts:
        names, lengths, case = parts[part]
        for name in [n for n in names if n in (options.pattern or names)]:
            for length in options.length or ([1024] if options.quick else lengths):
                found = case(name, length, options)
                results.append(found)
                print(shown(found), flush=True)
                if options.json:
                    record = {"heads": HEADS, "dim": DIM, "threads": torch.get_num_threads(), "cases": results}
                    options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
