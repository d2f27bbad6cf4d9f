"""What attention layers share: the sizes of heads, and what a normaliser may have learned beside it (a gain, a shift, a
gate), which goes with which, and how it is set.
"""

import dataclasses

import torch
from torch import Tensor, nn

from mercer.core.denominators import SigmoidGate
from mercer.core.normalizers import L2, RMS, Normalizer, Standardize
from mercer.errors import InvalidArgument

GAINS = ("none", "head", "channel")
GATES = ("head", "channel")


def head_sizes(dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Key and value heads, by default as many as heads, and the channels of a head, by default dim / heads."""
    kv_heads = heads if kv_heads is None else kv_heads
    if dim < 1 or heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise InvalidArgument(
            f"attention needs dim, heads and kv_heads of at least 1 and kv_heads a divisor of heads, "
            f"got dim={dim}, heads={heads}, kv_heads={kv_heads}"
        )
    if head_dim is None and dim % heads:
        raise InvalidArgument(f"dim {dim} is not a multiple of {heads} heads; pass head_dim")
    return kv_heads, dim // heads if head_dim is None else head_dim


def takes_gain(normalizer: Normalizer) -> bool:
    """Whether a normaliser, or what its gate holds, can carry a learned gain."""
    return isinstance(ungated(normalizer), L2 | RMS | Standardize)


def ungated(normalizer: Normalizer) -> Normalizer:
    """The normaliser inside of a gate, or the normaliser itself."""
    return ungated(normalizer.inner) if isinstance(normalizer, SigmoidGate) else normalizer


def per_head(what: str, kind: str, start: float, normalizer: Normalizer, heads: int, dim: int) -> nn.Parameter | None:
    """A gain ("gain") or a shift ("shift"), one a head or one a head and channel, where it goes with the normaliser."""
    if kind not in GAINS:
        raise InvalidArgument(f"{what} must be one of {', '.join(GAINS)}, got {kind!r}")
    if kind == "none":
        return None
    if what == "gain" and not takes_gain(normalizer):
        raise InvalidArgument(
            f"a learned gain goes with the normalisers L2 and RMS and with Standardize, not with {normalizer}"
        )
    if what == "shift" and not isinstance(ungated(normalizer), Standardize):
        raise InvalidArgument(f"a learned shift goes with the normaliser Standardize, not with {normalizer}")
    return nn.Parameter(torch.full((heads,) if kind == "head" else (heads, dim), float(start)))


def gate_size(kind: str | None, normalizer: Normalizer, head_dim: int) -> int:
    """How many gates a head has: 0 without `SigmoidGate`, 1 or, by default, one a channel with it."""
    if not isinstance(normalizer, SigmoidGate):
        if kind is not None:
            raise InvalidArgument(f"gate={kind!r} goes with the normaliser SigmoidGate, not with {normalizer}")
        return 0
    if isinstance(normalizer.inner, SigmoidGate):
        raise InvalidArgument("a SigmoidGate inside of a SigmoidGate would need a second gate; the layer makes one")
    if normalizer.gate is not None:
        raise InvalidArgument("the layer makes the gate of SigmoidGate from its input; pass SigmoidGate() without one")
    if kind is not None and kind not in GATES:
        raise InvalidArgument(f"gate must be one of {', '.join(GATES)}, got {kind!r}")
    return 1 if kind == "head" else head_dim


def split_gates(gates: Tensor, heads: int) -> Tensor:
    """Gates [B, L, heads n] as [B, heads, L, n], or [B, heads, L] for one a head."""
    split = gates.unflatten(2, (heads, -1)).transpose(1, 2)
    return split.squeeze(-1) if split.shape[-1] == 1 else split


def filled(normalizer: Normalizer, gate: Tensor | None, gain: Tensor | None, shift: Tensor | None) -> Normalizer:
    """The normaliser of a call, with what the layer has learned or made for it."""
    if isinstance(normalizer, SigmoidGate):
        return SigmoidGate(gate, filled(normalizer.inner, None, gain, shift))
    given = {name: tensor for name, tensor in (("gain", gain), ("bias", shift)) if tensor is not None}
    return dataclasses.replace(normalizer, **given) if given else normalizer  # pyright: ignore[reportArgumentType]
