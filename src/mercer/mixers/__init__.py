"""Recurrent and state-space mixers: what stands in an attention's place and is none.

The classes below are imported when they are first used; names as in configurations are in
`mercer.mixers.names`, which does without torch. Operators are functions of the modules that bear their names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mercer.mixers.base import Mixer
    from mercer.mixers.block import MixerBlock
    from mercer.mixers.deltanet import DeltaNet
    from mercer.mixers.gated_deltanet import GatedDeltaNet
    from mercer.mixers.gla import GatedLinearAttention
    from mercer.mixers.mamba import Mamba
    from mercer.mixers.mamba2 import Mamba2
    from mercer.mixers.mixer_config import MixerConfig
    from mercer.mixers.names import mixer_names
    from mercer.mixers.retnet import Retention
    from mercer.mixers.rg_lru import RGLRU
    from mercer.mixers.rwkv4 import RWKV4
    from mercer.mixers.rwkv5 import RWKV5
    from mercer.mixers.rwkv6 import RWKV6
    from mercer.mixers.rwkv7 import RWKV7
    from mercer.mixers.s4 import S4
    from mercer.mixers.s4d import S4D
    from mercer.mixers.short_convolution import ShortConvolution

_HOME = {
    "DeltaNet": "deltanet",
    "GatedDeltaNet": "gated_deltanet",
    "GatedLinearAttention": "gla",
    "Mamba": "mamba",
    "Mamba2": "mamba2",
    "Mixer": "base",
    "MixerBlock": "block",
    "MixerConfig": "mixer_config",
    "RGLRU": "rg_lru",
    "RWKV4": "rwkv4",
    "RWKV5": "rwkv5",
    "RWKV6": "rwkv6",
    "RWKV7": "rwkv7",
    "Retention": "retnet",
    "S4": "s4",
    "S4D": "s4d",
    "ShortConvolution": "short_convolution",
    "mixer_names": "names",
}

__all__ = [
    "RGLRU",
    "RWKV4",
    "RWKV5",
    "RWKV6",
    "RWKV7",
    "S4",
    "S4D",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "Mamba",
    "Mamba2",
    "Mixer",
    "MixerBlock",
    "MixerConfig",
    "Retention",
    "ShortConvolution",
    "mixer_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mercer.mixers' has no attribute {name!r}")
    value = getattr(import_module(f"mercer.mixers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
