"""Exact softmax attention beside torch's fused one, and beside the products it cannot do without.

Both compute the same in one process, in turns, with the same threads, allocator and OMP_WAIT_POLICY. Answers, and where
they are timed gradients, are checked against the formula in float64 on a short sequence before anything is timed. torch
gets what it is quickest with: `is_causal` where that says all, else a mask of booleans, which it needs whole. The limit
is the time of the products alone at the best rate of large matrix products in that dtype: 2 (D + Dv) operations a
visible pair forward, and 6 D + 4 Dv more backward.

    python -m benchmarks exact_attention [--quick] [--case NAME] [--length N] [--dtype NAME]
        [--direction forward|backward] [--dim N] [--rounds N] [--budget S] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_child, prepare

if TYPE_CHECKING:
    from torch import Tensor

    from mercer.core.structures import Structure

HEADS, CHECKED = 8, 300
"""Query heads; tokens on which answers are checked."""
AGREES = {"float32": 1e-5, "bfloat16": 1.5e-2}
"""Largest error, relative to the largest entry of the formula in float64, of rows and gradients: in bfloat16 weights,
slopes and results are each rounded, by 2e-3."""
DTYPES = tuple(AGREES)
DIRECTIONS = {"forward": False, "backward": True}


@dataclass(frozen=True)
class Case:
    """What is computed: causal, over the last `window` tokens, with so many key heads and sequences; in a batch of more
    than one the first has the whole length, the last `shortest` of it, and the others lie between.
    """

    window: int | None = None
    key_heads: int = HEADS
    batch: int = 1
    shortest: float = 1.0

    def lengths(self, length: int) -> list[int]:
        steps = max(self.batch - 1, 1)
        return [round(length * (1 - (1 - self.shortest) * b / steps)) for b in range(self.batch)]

    def structure(self, length: int) -> Structure:
        import torch

        from mercer import Causal, Padding, Window

        made: Structure = Causal() if self.window is None else Window.last(self.window)
        return made if self.batch == 1 else made & Padding(lengths=torch.tensor(self.lengths(length)))

    def pairs(self, length: int) -> int:
        """Visible pairs of all heads."""
        width = length if self.window is None else self.window
        return HEADS * sum(sum(min(i + 1, width) for i in range(n)) for n in self.lengths(length))

    def mask(self, length: int) -> Tensor | None:
        """For torch: `[B, 1, L, L]`, or None where `is_causal` says all."""
        import torch

        if self.window is None and self.batch == 1:
            return None
        places = torch.arange(length)
        back = places.unsqueeze(1) - places
        seen = (back >= 0) & (back < (length if self.window is None else self.window))
        if self.batch == 1:
            return seen.view(1, 1, length, length)
        there = places < torch.tensor(self.lengths(length)).unsqueeze(1)
        # A row that is not there sees itself, or torch's answer would be NaN; it is not compared.
        return (seen & (there.unsqueeze(1) | (back == 0))).unsqueeze(1)


CASES = {
    "causal": Case(),
    "window": Case(window=512),
    "shared heads": Case(key_heads=2),
    "padding": Case(batch=4, shortest=0.25),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="exact_attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--length", type=int, action="append", help="default: 2,048 and 8,192")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument(
        "--direction", choices=DIRECTIONS, action="append", help="default: both; backward has forward in it"
    )
    parser.add_argument("--dim", type=int, default=64, help="head dimension (default 64)")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls each (default 15)")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds a case after which a slow one sits out (8)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="256 tokens, 3 rounds: a look, no result")
    parser.add_argument("--json", type=Path, help="also write the numbers here, after every case")
    return parser.parse_args(arguments)


def inputs(case: Case, length: int, dim: int, dtype: str) -> list[Tensor]:
    """Query, key, value and a gradient of the rows, 0 where a sequence has ended, strided as projections give them."""
    import torch

    kind = getattr(torch, dtype)
    given = [
        torch.randn(case.batch, length, heads, dim).to(kind).transpose(1, 2)
        for heads in (HEADS, case.key_heads, case.key_heads, HEADS)
    ]
    for b, n in enumerate(case.lengths(length)):
        given[3][b, :, n:] = 0
    return given


def contestants(case: Case, length: int) -> dict[str, Callable[..., Tensor]]:
    """Ours and torch's, of query, key and value."""
    import torch

    from mercer import attention

    structure, mask = case.structure(length), case.mask(length)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, structure=structure)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=case.key_heads != HEADS
        )

    return {"mercer": ours, "torch SDPA": theirs}


def call(run: Callable[..., Tensor], given: list[Tensor], backward: bool) -> Callable[[], object]:
    """Forward without gradients, or forward and backward."""
    import torch

    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return run(*given[:3])

        return forward
    leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
    return lambda: torch.autograd.grad(run(*leaves), leaves, given[3])


def formula(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in float64, all pairs at once."""
    import torch

    length, group = query.shape[2], HEADS // case.key_heads
    q, k, v = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    mask = case.mask(length)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if mask is None else ~mask
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def errors(case: Case, dim: int, dtype: str, backward: bool) -> dict[str, float]:
    """Each contestant's largest error of rows that are there, or also of gradients, relative to the largest entry."""
    import torch

    given = inputs(case, CHECKED, dim, dtype)
    there = torch.arange(CHECKED) < torch.tensor(case.lengths(CHECKED)).view(-1, 1)

    def results(run: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
        rows = run(*leaves)
        grads = torch.autograd.grad(rows, leaves, given[3].to(rows.dtype)) if backward else ()
        return [rows.detach().masked_fill(~there[:, None, :, None], 0), *grads]

    wanted = results(lambda *leaves: formula(case, *leaves))
    found: dict[str, float] = {}
    for name, run in contestants(case, CHECKED).items():
        apart = [
            float((a.double() - b.double()).abs().max() / b.abs().max())
            for a, b in zip(results(run), wanted, strict=True)
        ]
        found[name] = max(apart)
    return found


def measure_case(
    name: str, length: int, dim: int, dtype: str, backward: bool, rate: float, rounds: int, budget: float
) -> dict[str, Any]:
    """Check, then time, one case; `rate` is that of large products."""
    import torch

    from benchmarks._clock import Spread, interleave, ratios
    from mercer import plan

    case = CASES[name]
    off = errors(case, dim, dtype, backward)
    if not max(off.values()) <= AGREES[dtype]:
        raise SystemExit(f"exact_attention: {name} in {dtype} is off by {off}, so nothing is timed")
    given = inputs(case, length, dim, dtype)
    runs = contestants(case, length)
    times = interleave(
        {who: call(run, given, backward) for who, run in runs.items()}, rounds, budget, torch.device("cpu")
    )
    flops = case.pairs(length) * dim * (14 if backward else 4)
    spreads = {who: Spread.of(taken) for who, taken in times.items()}
    ratio = ratios(times["mercer"], times["torch SDPA"])
    leaves = [x.requires_grad_(backward) for x in given[:3]]
    return {
        "case": name,
        "batch": case.batch,
        "key_heads": case.key_heads,
        "length": length,
        "dim": dim,
        "dtype": dtype,
        "direction": "backward" if backward else "forward",
        "plan": plan(*leaves, structure=case.structure(length)).reason,
        "errors": off,
        "flops": flops,
        "limit_ms": 1e3 * flops / rate,
        "ms": {who: {"median": 1e3 * s.median, "low": 1e3 * s.low, "high": 1e3 * s.high} for who, s in spreads.items()},
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
    }


def shown(found: dict[str, Any]) -> str:
    """Lines of the table for a case."""
    ratio = found["ratio"]
    direction = "forward and backward" if found["direction"] == "backward" else "forward"
    size = f"{found['batch']} x {found['length']:,} tokens, D = {found['dim']}, {found['dtype']}, {direction}"
    spread = f"{ratio['median']:.2f} times as long ({ratio['low']:.2f} to {ratio['high']:.2f})"
    lines = [f"{found['case']}, {size}: torch takes {spread}"]
    for who, ms in found["ms"].items():
        share = f"{100 * found['limit_ms'] / ms['median']:6.0f} % of the products' limit"
        taken = f"{ms['median']:10,.1f} ms  ({ms['low']:,.1f} to {ms['high']:,.1f})"
        lines.append(f"  {who:12}{taken}{share}, off by {found['errors'][who]:.1e}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if not in_child("benchmarks.exact_attention", arguments):
        return
    prepare(options.threads)

    import torch

    from benchmarks._machine import measure
    from mercer.runtime.environment import environment

    torch.manual_seed(0)
    rounds, lengths = options.rounds, options.length or [2048, 8192]
    if options.quick:
        rounds, lengths = 3, options.length or [256]
    dtypes = tuple(options.dtype or DTYPES)
    about = environment()
    limits = measure(dtypes, torch.device("cpu"), quick=options.quick)
    rates = {dtype: limits.flops(dtype) for dtype in dtypes}
    print(
        f"{about['processor']}, {about['threads']} threads, {HEADS} query heads, median of {rounds} (quartiles); ",
        end="",
    )
    print(", ".join(f"{1e-9 * rate:,.0f} GFLOP/s of products in {dtype}" for dtype, rate in rates.items()), flush=True)
    results: list[dict[str, Any]] = []
    for name in options.case or CASES:
        for length in lengths:
            for dtype in dtypes:
                for direction in options.direction or DIRECTIONS:
                    backward = DIRECTIONS[direction]
                    args = (options.dim, dtype, backward, rates[dtype], rounds, options.budget)
                    results.append(measure_case(name, length, *args))
                    print(shown(results[-1]), flush=True)
                    if options.json is not None:
                        record = {"environment": about, "rounds": rounds, "rates": rates, "cases": results}
                        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
