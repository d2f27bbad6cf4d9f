"""One small configuration of each mixer, and more where an option changes what is computed."""

from typing import Any

import torch

from mercer.mixers.base import Mixer
from mercer.mixers.names import mixer_config

DIM, HEADS = 16, 2

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "retnet": ("retnet", {}),
    "retnet, rms": ("retnet", {"norm": "rms", "value_expand": 1.0}),
    "mamba": ("mamba", {"state": 5}),
    "mamba, norms": ("mamba", {"state": 3, "inner": 20, "rank": 3, "width": 2, "bias": True, "inner_norms": "learned"}),
    "mamba, plain norms": ("mamba", {"expand": 1, "convolution_bias": False, "inner_norms": "plain"}),
    "mamba, heads": ("mamba", {"state": 4, "heads": 4, "inner_norms": "learned"}),
    "mamba2": ("mamba2", {"state": 6, "head_dim": 8}),
    "mamba2, groups": (
        "mamba2",
        {"state": 3, "head_dim": 4, "groups": 2, "width": 2, "bias": True, "step_least": 0.01, "step_most": 0.5},
    ),
    "mamba2, norm first": (
        "mamba2",
        {"state": 4, "head_dim": 16, "norm_before_gate": True, "norm_groups": 4, "convolution_bias": False},
    ),
    "gla": ("gla", {"rank": 4}),
    "deltanet": ("deltanet", {}),
    "deltanet, twice": ("deltanet", {"twice": True, "gate": True, "key_expand": 0.5, "width": 2}),
    "gated-deltanet": ("gated-deltanet", {}),
    "gated-deltanet, twice": ("gated-deltanet", {"twice": True, "heads": 4, "value_expand": 1.0}),
    "rg-lru": ("rg-lru", {}),
    "rwkv4": ("rwkv4", {}),
    "rwkv4, wide": ("rwkv4", {"width": 24}),
    "rwkv5": ("rwkv5", {}),
    "rwkv6": ("rwkv6", {"mix_rank": 3, "decay_rank": 4}),
    "rwkv7": ("rwkv7", {"decay_rank": 4, "rate_rank": 3, "value_rank": 2, "gate_rank": 5}),
    "rg-lru, wide": ("rg-lru", {"width": 24, "blocks": 3, "conv": 2, "bias": False}),
    "s4d": ("s4d", {"state": 8}),
    "s4d, real, bilinear": ("s4d", {"state": 4, "init": "real", "rule": "bilinear", "glu": False}),
    "s4d, convolution": ("s4d", {"state": 6, "init": "inv", "form": "convolution"}),
    "s4": ("s4", {"state": 6}),
    "s4, convolution": ("s4", {"state": 4, "form": "convolution"}),
}
"""Of each case the mixer's name and its options."""


def build(case: str, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Mixer:
    """A mixer with every parameter moved away from where it starts."""
    name, options = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mixer = mixer_config(name, options).build(DIM, HEADS, layer=1, layers=3)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return mixer.to(dtype)


def inputs(batch: int, length: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[batch, length, DIM] from N(0, 1)."""
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=dtype)
