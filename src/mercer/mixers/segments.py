"""A recurrence over a long sequence in segments of tokens, each of which is computed again for the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mercer.core.first_order import first_order

Run = Callable[[int, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor]]
"""From the number of the first token, the state before it, what has a row for each token, [B, n, ...], and what all
share: outputs [B, n, ...] and the state after them."""


def by_segments(
    run: Run, size: int, state: Tensor, along: Sequence[Tensor], across: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """run over all tokens, `size` at a time; outputs [B, L, ...] and the last state, with first derivatives.

    What run makes in between exists for one segment at a time; for the gradient the states between segments stay.
    Every tensor that wants a gradient must be state, in `along` or in `across`. A sequence of one segment, and one
    under `torch.compile`, is run as it is, with any derivative that run has.
    """
    length = along[0].shape[1]
    if length <= size or torch.compiler.is_compiling():
        return run(0, state, along, across)
    return _Segments.apply(run, size, len(along), state, *along, *across)  # pyright: ignore[reportGeneralTypeIssues]


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, size: int, count: int, state: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        along, across = given[:count], given[count:]
        length = along[0].shape[1]
        states, out = [state], None
        for start in range(0, length, size):
            y, state = run(start, states[-1], [v[:, start : start + size] for v in along], across)
            if out is None:
                out = y.new_empty(y.shape[0], length, *y.shape[2:])
            out[:, start : start + size] = y
            states.append(state)
        assert out is not None
        kind = given[0].device.type
        ctx.autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        ctx.run, ctx.size, ctx.count = run, size, count
        ctx.save_for_backward(*given, *states[:-1])
        return out, states[-1]

    @staticmethod
    @first_order(instead="segments of one sequence in calls of their own")
    def backward(ctx: Any, grad_out: Tensor, carried: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[4:]
        saved, size, count = ctx.saved_tensors, ctx.size, ctx.count
        given, states = saved[: len(wanted)], saved[len(wanted) :]
        length, kind = given[0].shape[1], given[0].device.type
        rows = [torch.empty_like(v) if w else None for v, w in zip(given[:count], wanted, strict=False)]
        sums: list[Tensor | None] = [None] * (len(given) - count)
        for number, start in reversed(list(enumerate(range(0, length, size)))):
            at = slice(start, start + size)
            parts = [v[:, at] if i < count else v for i, v in enumerate(given)]
            leaves = [v.detach().requires_grad_(w) for v, w in zip(parts, wanted, strict=True)]
            before = states[number].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(kind, **ctx.autocast):
                y, after = ctx.run(start, before, leaves[:count], leaves[count:])
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            ends = (grad_out[:, at], carried)
            found = cast(
                "tuple[Tensor | None, ...]",
                torch.autograd.grad((y, after), (before, *asked), ends, allow_unused=True),
            )
            carried = torch.zeros_like(before) if found[0] is None else found[0]
            grads = iter(found[1:])
            for i, leaf in enumerate(leaves):
                grad = next(grads) if leaf.requires_grad else None
                if i >= count:
                    sums[i - count] = _add(sums[i - count], grad)
                elif (into := rows[i]) is not None:
                    into[:, at] = 0 if grad is None else grad
        shared = [None if s is None else s.to(v.dtype) for s, v in zip(sums, given[count:], strict=True)]
        return None, None, None, carried if ctx.needs_input_grad[3] else None, *rows, *shared


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Sums over segments are float32 at least."""
    if grad is None:
        return total
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return wide if total is None else total + wide
