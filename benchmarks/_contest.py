"""One case: who may take part, whether their answers are right, and how long each takes, in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks._clock import Spread, interleave, ratios, seconds
from benchmarks._contestant import Contestant
from benchmarks._record import Case, Quartiles, Row
from benchmarks._tasks import OURS, TASKS, expected, inputs
from benchmarks._work import Shape, least_bytes, least_flops

AGREES = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest error, relative to the largest entry of the formula in float64, of who has to agree: a thousand roundings are
1e-4 of them in float32; in bfloat16 the output's own rounding is 2e-3, and running sums in it a few times that."""
CHECKED = 512
"""Tokens on which answers are checked, with the case's head dimension, for one sequence and two heads."""
PROBED = 1024
"""Tokens from whose time that of a longer sequence is estimated."""


@dataclass(frozen=True)
class Rules:
    """What every contestant gets.

    Attributes:
        rounds: timed calls each.
        budget: seconds after which a slow one sits out, after 3 rounds at least.
        longest: estimated seconds of one call above which it is left out.
        memory: bytes above which it is left out.
    """

    rounds: int
    budget: float
    longest: float
    memory: float


def contest(
    task: str,
    shape: Shape,
    dtype: str,
    backward: bool,
    contestants: Sequence[Contestant],
    rules: Rules,
    device: torch.device,
    say: Callable[[str], None],
) -> Case:
    """Check, estimate, time; ours is the first and has to take part for ratios to be given."""
    rows: dict[str, Row] = {}
    entered: dict[str, Contestant] = {}
    for one in contestants:
        row, reason = admit(one, task, shape, dtype, backward, rules, device)
        rows[one.name] = row.model_copy(update={"skipped": reason})
        if reason:
            say(f"    {one.name}: left out, {reason}")
        else:
            entered[one.name] = one
    given = inputs(shape, dtype, device)
    calls = {name: call(one, given, backward) for name, one in entered.items()}
    times = interleave(calls, rules.rounds, rules.budget, device)
    for name, spent in times.items():
        found = {"times": spent, "seconds": Quartiles.of(Spread.of(spent))}
        if name != OURS and OURS in times:
            found["ratio"] = Quartiles.of(ratios(times[OURS], spent))
        rows[name] = rows[name].model_copy(update=found)
    return Case(
        task=task,
        batch=shape.batch,
        heads=shape.heads,
        length=shape.length,
        dim=shape.dim,
        dtype=dtype,
        backward=backward,
        flops=least_flops(shape, TASKS[task].features(shape.dim), backward),
        bytes=least_bytes(shape, getattr(torch, dtype).itemsize, backward),
        limit_seconds=math.nan,
        rows=list(rows.values()),
    )


def admit(
    one: Contestant, task: str, shape: Shape, dtype: str, backward: bool, rules: Rules, device: torch.device
) -> tuple[Row, str]:
    """Its row so far, and why it may not take part (empty if it may)."""
    row = Row(name=one.name, differs=one.difference(dtype), plan=one.plan)
    if dtype not in one.dtypes:
        return row, f"takes {' and '.join(one.dtypes)} only"
    if shape.length % one.multiple:
        return row, f"takes lengths that are multiples of {one.multiple} only"
    needed = one.memory(shape, backward) * getattr(torch, dtype).itemsize
    if needed > rules.memory:
        return row, f"would keep about {needed / 2**30:.1f} GiB"
    error = error_of(one, task, shape.dim, dtype, device)
    row = row.model_copy(update={"error": error})
    if not row.differs and not error <= AGREES[dtype]:
        return row, f"its answer is off by {error:.1e} (allowed {AGREES[dtype]:.0e})"
    estimate = estimated(one, shape, dtype, backward, device, rules.longest)
    if estimate > rules.longest:
        return row, f"one call would take about {estimate:.0f} s"
    return row, ""


def error_of(one: Contestant, task: str, dim: int, dtype: str, device: torch.device) -> float:
    """Largest error against the formula in float64, relative to its largest entry; infinite if it is not finite."""
    q, k, v, _ = inputs(Shape(1, 2, CHECKED, dim), dtype, device, seed=1)
    exact = expected(task, *(x.cpu() for x in (q, k, v)))
    with torch.no_grad():
        out = one.run(q, k, v).double().cpu()
    error = float((out - exact).abs().max() / exact.abs().max())
    return error if math.isfinite(error) else math.inf


def estimated(one: Contestant, shape: Shape, dtype: str, backward: bool, device: torch.device, longest: float) -> float:
    """Seconds of one call, from the second of two calls on a short sequence of the same heads.

    It is tried on 64 tokens, on 256 and so on up to ``PROBED``, for as long as the next try, too, should be allowed.
    """
    short = min(shape.length, PROBED, max(64, one.multiple))
    while True:
        run = call(one, inputs(replace(shape, length=short), dtype, device), backward)
        run()
        spent = seconds(run, device)
        longer = min(4 * short, shape.length, PROBED)
        if longer == short or spent * (longer / short) ** one.growth > longest:
            return spent * (shape.length / short) ** one.growth
        short = longer


def call(one: Contestant, given: tuple[torch.Tensor, ...], backward: bool) -> Callable[[], object]:
    """Its call on these inputs: forward without gradients, or forward and backward."""
    q, k, v, upstream = given
    if not backward:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return one.run(q, k, v)

        return forward
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(one.run(*leaves), leaves, upstream)
