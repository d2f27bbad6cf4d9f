"""Backward passes that are written by hand have no derivative of their own; they say so instead of being wrong in
silence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from mercer.errors import Unsupported


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward pass of an autograd function refuse ``create_graph=True``, and run outside of autocast.

    torch's ``once_differentiable`` would not do: it notices a derivative of the incoming gradients only and takes the
    saved inputs for constants, so a Hessian would come out wrong.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise Unsupported(
                "Second derivatives were asked for (create_graph=True), and this backward pass has first ones only: "
                "use form='dense', or finite differences of gradients."
            )
        device = next((g.device.type for g in grads if isinstance(g, torch.Tensor)), "cpu")
        with torch.autocast(device, enabled=False):  # in the dtypes of the forward pass, wherever backward() is called
            return backward(ctx, *grads)

    return checked
