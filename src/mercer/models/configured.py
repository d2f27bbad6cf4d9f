"""What every model that a configuration describes can do: have its parameters counted, and its attention swapped."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from mercer.errors import InvalidArgument
from mercer.mixers.names import is_mixer
from mercer.models.block_config import as_layers


class ConfiguredModel(nn.Module):
    """A module that is made of its `config` alone, a `BlockConfig`."""

    config: Any

    def with_attention(self, attention: str | Sequence[str]) -> Self:
        """The same model with another attention in its layers, to a memory too where they have one, as
        `BlockConfig.attention` names it: a model that shares this one's weights. What a kernel has to learn, and random
        features, start as in a new model; a learned gain stays where the new normaliser takes one.

        Raises:
            InvalidArgument: a name is unknown, or does not go with this configuration; a layer is a mixer, whose
                weights nothing else can take. (One name is for the layers of attention and leaves mixers as they are.)
        """
        config = swapped(self.config, attention)
        with torch.device("meta"):  # shapes alone; what a kernel brings along has values all the same
            twin: Self = type(self)(config)  # pyright: ignore[reportCallIssue]
        old = dict(self.named_parameters()) | dict(self.named_buffers())
        for path, module in twin.named_modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None and tensor.is_meta:
                        held[name] = old[f"{path}.{name}".removeprefix(".")]
        return twin.to(next(self.parameters()).device).train(self.training)

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters, shared ones once."""
        return sum(p.numel() for p in self.parameters())


def swapped(config: Any, attention: str | Sequence[str]) -> Any:
    """A `BlockConfig` with another attention in its layers; errors as of `ConfiguredModel.with_attention`."""
    names = _swapped_names(config.attentions, attention)
    return type(config)(**{**config.model_dump(), "attention": names})


def _swapped_names(old: tuple[str, ...], attention: str | Sequence[str]) -> str | tuple[str, ...]:
    """The names of a swap, checked against the layers that are mixers."""
    attention = as_layers(attention)
    mixers = [is_mixer(name) for name in old]
    if isinstance(attention, str):
        if all(mixers):
            raise InvalidArgument(f"no layer of this model is an attention: they are {', '.join(dict.fromkeys(old))}")
        if is_mixer(attention) or any(mixers):
            attention = [name if own else attention for name, own in zip(old, mixers, strict=True)]
        else:
            return attention
    new = [attention[i % len(attention)] for i in range(len(old))] if attention else []
    for layer, (was, name) in enumerate(zip(old, new, strict=False)):
        if was != name and (is_mixer(was) or is_mixer(name)):
            raise InvalidArgument(f"layer {layer} is {was!r}, and {name!r} cannot take its weights")
    return tuple(attention)
