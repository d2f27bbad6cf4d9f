"""Backward passes that are written by hand have no derivative of their own; they say so instead of being wrong in
silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, overload

import torch

from mercer.errors import Unsupported

DENSE = "form='dense'"


@overload
def first_order(backward: Callable[..., Any]) -> Callable[..., Any]: ...


@overload
def first_order(*, instead: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def first_order(
    backward: Callable[..., Any] | None = None,
    *,
    instead: str = "a form in torch's operators, such as form='recurrent'",
) -> Callable[..., Any]:
    """Make the backward pass of an autograd function refuse ``create_graph=True``, and run outside of autocast.

    instead: what has second derivatives, for the message.

    torch's ``once_differentiable`` would not do: it notices a derivative of the incoming gradients only and takes the
    saved inputs for constants, so a Hessian would come out wrong.
    """
    if backward is None:
        return lambda backward: _checked(backward, instead)
    return _checked(backward, instead)


def _checked(backward: Callable[..., Any], instead: str) -> Callable[..., Any]:
    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported(
                "Second derivatives were asked for (create_graph=True), and this backward pass has first ones only: "
                f"use {instead}, or finite differences of gradients."
            )
        device = next((g.device.type for g in grads if isinstance(g, torch.Tensor)), "cpu")
        with torch.autocast(device, enabled=False):  # in the dtypes of the forward pass, wherever backward() is called
            return backward(ctx, *grads)

    return checked
