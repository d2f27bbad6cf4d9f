"""The same weights in a model with other attentions."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def sharing(model: Model, attention: str | Sequence[str]) -> Model:
    """A model whose configuration names other attentions, with the parameters of this one; what kernels bring along is
    new.

    Raises:
        InvalidArgument: a name is unknown, or does not go with the configuration.
    """
    names = attention if isinstance(attention, str) else tuple(attention)
    config = type(model.config)(**{**model.config.model_dump(), "attention": names})  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    with torch.device("meta"):  # shapes alone; what a kernel brings along has values all the same
        twin = type(model)(config)
    old = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in twin.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    held[name] = old[f"{path}.{name}".removeprefix(".")]
    return twin.to(next(model.parameters()).device).train(model.training)
