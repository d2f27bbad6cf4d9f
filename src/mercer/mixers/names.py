"""Names of mixers, as in the pattern of a model's attentions: ``["mamba", "mamba", "mamba", "softmax"]``.

A closed registry: a name never becomes an import path.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mercer.errors import InvalidArgument
from mercer.mixers.mixer_config import MixerConfig

_HOMES: dict[str, tuple[str, str]] = {
    "retnet": ("retnet_config", "RetNetConfig"),
    "mamba": ("mamba_config", "MambaConfig"),
    "mamba2": ("mamba2_config", "Mamba2Config"),
    "gla": ("gla_config", "GLAConfig"),
    "deltanet": ("deltanet_config", "DeltaNetConfig"),
    "gated-deltanet": ("gated_deltanet_config", "GatedDeltaNetConfig"),
    "rg-lru": ("rg_lru_config", "RGLRUConfig"),
    "rwkv4": ("rwkv4_config", "RWKV4Config"),
    "rwkv5": ("rwkv5_config", "RWKV5Config"),
    "rwkv6": ("rwkv6_config", "RWKV6Config"),
    "rwkv7": ("rwkv7_config", "RWKV7Config"),
    "s4d": ("s4d_config", "S4DConfig"),
    "s4": ("s4_config", "S4Config"),
}
"""Of each name the module of `mercer.mixers` and its class of options."""
CHANNEL_MIXING: dict[str, tuple[str, str]] = {
    "rwkv4": ("channel_mixing", "ChannelMixing"),
    "rwkv7": ("channel_mixing", "UngatedChannelMixing"),
}
"""Feed-forwards that are mixers themselves: of each kind the module of `mercer.mixers` and the class, made with (dim,
hidden or None, layer=, layers=)."""


def mixer_names() -> tuple[str, ...]:
    """All names."""
    return tuple(_HOMES)


def is_mixer(name: object) -> bool:
    """Whether a name is a mixer's, and not an attention's."""
    return name in _HOMES


def mixer_config(name: str, options: Mapping[str, Any] | None = None) -> MixerConfig:
    """The options of a mixer, checked; those that are not given have their defaults.

    Raises:
        InvalidArgument: there is no such mixer, or no such option.
    """
    if name not in _HOMES:
        raise InvalidArgument(f"there is no mixer {name!r}; there are {', '.join(_HOMES)}")
    home, kind = _HOMES[name]
    made: type[MixerConfig] = getattr(import_module(f"mercer.mixers.{home}"), kind)
    try:
        return made(**(options or {}))
    except InvalidArgument as error:
        raise InvalidArgument(f"the options of {name}: {error}") from error
