"""A decoder whose matrices are packed: the same modules around products with packed weights."""

from __future__ import annotations

import copy
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mercer.backends.packed import Packed, pack
from mercer.errors import Unsupported
from mercer.mixers.base import Mixer
from mercer.mixers.block import MixerBlock
from mercer.models.shared_hybrid import HybridBlock, SharedBlock, SharedHybridLM
from mercer.nn.activations import ACTIVATIONS, GATED
from mercer.nn.block import Block
from mercer.nn.experts import Experts
from mercer.nn.feedforward import FeedForward
from mercer.nn.low_rank import LowRank
from mercer.nn.projection import FusedLinear

if TYPE_CHECKING:
    from mercer.models.decoder import DecoderLM

AT_ONCE = 512
"""Inputs of a gated feed-forward that are multiplied at a time."""


class PackedLinear(nn.Module):
    """y = x W^T + b with a packed W; x of any floating dtype, y of the given one."""

    def __init__(self, weight: Packed, bias: Tensor | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype = weight, bias, dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] -> [..., rows]."""
        y = self.weight.times(x.reshape(-1, x.shape[-1]))
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.to(self.dtype).view(*x.shape[:-1], y.shape[-1])


class PackedFeedForward(nn.Module):
    """A `FeedForward` with packed matrices; the tiles of a gate and what it is multiplied with alternate."""

    def __init__(self, inner: PackedLinear, output: PackedLinear, kind: str) -> None:
        super().__init__()
        self.input, self.output, self.kind = inner, output, kind

    def forward(self, x: Tensor, *, added: Tensor | None = None) -> Tensor:
        """[..., dim] -> [..., dim]. added: as of `FeedForward`."""
        if self.kind in GATED and added is None and x.shape[:-1].numel() > AT_ONCE:
            return self.output(self._gated(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1))
        inner = self.input(x) if added is None else self.input(x).add_(added)
        if self.kind not in GATED:
            return self.output(ACTIVATIONS[self.kind].apply(inner))
        gate, value = inner.chunk(2, -1)
        return self.output(ACTIVATIONS[GATED[self.kind]].apply(gate).mul_(value))

    def _gated(self, x: Tensor) -> Tensor:
        """What the output multiplies, for some inputs at a time: gate and value stay in a cache."""
        activation, out = ACTIVATIONS[GATED[self.kind]], torch.empty(len(x), self.input.weight.rows // 2)
        for rows, to in zip(x.split(AT_ONCE), out.split(AT_ONCE), strict=True):
            gate, value = self.input(rows).chunk(2, -1)
            torch.mul(activation.apply(gate), value, out=to)
        return out


class PackedExperts(Experts):
    """`Experts` whose matrices are packed one by one; the router stays as it is, since it decides."""

    def __init__(self, experts: Experts, kind: str, keep: bool) -> None:
        nn.Module.__init__(self)
        self.dim, self.experts, self.chosen, self.kind = experts.dim, experts.experts, experts.chosen, experts.kind
        self.renormalise, self.capacity, self.router = experts.renormalise, experts.capacity, experts.router
        paired = experts.kind in GATED
        self.input, self.output = (
            PackedExpertLinear([pack(matrix, kind, paired=pair) for matrix in linear.weight])
            for linear, pair in ((experts.input, paired), (experts.output, False))
        )
        if not keep:
            _let_go(experts.input)
            _let_go(experts.output)

    def _expert(self, rows: Tensor, inward: Any, outward: Any) -> Tensor:
        return PackedFeedForward(PackedLinear(inward, None), PackedLinear(outward, None), self.kind)(rows)


class PackedExpertLinear(nn.Module):
    """A packed matrix for each expert."""

    def __init__(self, weight: list[Packed]) -> None:
        super().__init__()
        self.weight = weight


class PackedEmbedding(nn.Module):
    """Rows of a packed matrix, float32."""

    def __init__(self, weight: Packed) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers [...] -> [..., dim]."""
        size = self.weight.rows
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            raise IndexError(f"tokens must be numbers from 0 to {size - 1}")
        return self.weight.rows_of(tokens)


class _Widened(nn.Module):
    """A module whose results are wanted in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float()


def packed_model(model: DecoderLM, kind: str, dtype: torch.dtype, keep: bool) -> DecoderLM:
    """A twin of the model that shares its norms, positions and kernels, and whose matrices are packed as `kind`.

    What embeds and scores tokens is kept with 8 bits where the other weights have 4: rounding it costs most.

    Its residual stream is float32; queries, keys and values have the given dtype. Its `head` is a `PackedLinear`, also
    where the embedding is tied to it. The model itself stays as it is if `keep`; otherwise each matrix is let go when
    it is packed, so that never more than one is there twice.
    """
    other = next((block for block in model.blocks if not isinstance(block, Block | MixerBlock | HybridBlock)), None)
    if other is not None:
        raise Unsupported(f"weights of a {type(other).__name__} cannot be packed yet: use the model as it is")
    held = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    for module in model.modules():  # matrices are not copied, only replaced
        if isinstance(module, nn.Linear | FeedForward | Experts):
            held[id(module)] = module
    embedding, head = model.embedding, model.head
    held[id(embedding)] = embedding
    twin = copy.deepcopy(model, held)
    for block in twin.blocks:
        if isinstance(block, MixerBlock):
            _pack_mixers(block, kind, keep)
        elif isinstance(block, HybridBlock):
            _pack_use(block, kind, dtype, keep)
        else:
            _pack_block(block, kind, dtype, keep)
    for block in twin.shared if isinstance(twin, SharedHybridLM) else ():  # once, whoever reads them
        _pack_block(cast(SharedBlock, block), kind, dtype, keep)
    scored = pack(embedding.weight if head is None else head.weight, "int8" if kind == "int4" else kind)
    bias = None if head is None or head.bias is None else head.bias.detach().float()
    twin.embedding = PackedEmbedding(scored) if head is None else _Widened(embedding)
    twin.head = PackedLinear(scored, bias)
    if not keep:
        _let_go(embedding if head is None else head)
    return twin


def _pack_block(block: Block | SharedBlock, kind: str, dtype: torch.dtype, keep: bool) -> None:
    """Pack the matrices of an attention and of what follows it, in place."""
    attention = block.attention
    for name, module in list(attention.named_children()):
        if isinstance(module, nn.Linear):
            wanted = torch.float32 if name == "output" else dtype
            setattr(attention, name, _linear(module, kind, wanted, keep))
    block.feedforward = cast(Any, _feedforward(block.feedforward, kind, keep))


def _pack_use(block: HybridBlock, kind: str, dtype: torch.dtype, keep: bool) -> None:
    """Pack a mixer, in place, and what its layer has of its own of a shared block."""
    _pack_mixer(block.mixer, kind, keep)
    block.bridge = cast(Any, _linear(block.bridge, kind, torch.float32, keep))
    of_attention, of_feedforward = block.adapters.attention, block.adapters.feedforward
    adapters = [(cast(LowRank, part), dtype) for part in of_attention or ()]
    adapters += [] if of_feedforward is None else [(of_feedforward, torch.float32)]
    for part, wanted in adapters:  # what they are added to has that dtype
        part.down = cast(Any, _linear(part.down, kind, torch.float32, keep))
        part.up = cast(Any, _linear(part.up, kind, wanted, keep))


def _pack_mixers(block: MixerBlock, kind: str, keep: bool) -> None:
    """Pack a mixer, in place, and what follows it."""
    _pack_mixer(block.mixer, kind, keep)
    if isinstance(block.feedforward, Mixer):
        _pack_mixer(block.feedforward, kind, keep)
    elif block.feedforward is not None:
        block.feedforward = cast(Any, _feedforward(block.feedforward, kind, keep))


def _pack_mixer(mixer: Mixer, kind: str, keep: bool) -> None:
    """Pack what a mixer multiplies with, in place; its other numbers become float32, as what it reads is."""
    for path, module in list(mixer.named_modules()):
        name = path.rpartition(".")[2]
        if type(module) is nn.Linear and name not in mixer.unpacked:
            setattr(mixer.get_submodule(path.rpartition(".")[0]), name, _linear(module, kind, torch.float32, keep))
        elif type(module) is nn.Linear:
            setattr(mixer.get_submodule(path.rpartition(".")[0]), name, copy.deepcopy(module).float())
    for path, number in list(mixer.named_parameters()):
        if number.dtype != torch.float32:  # a new one, since the model holds this
            owner, _, name = path.rpartition(".")
            setattr(mixer.get_submodule(owner), name, nn.Parameter(number.detach().float(), requires_grad=False))


def _let_go(module: nn.Module) -> None:
    """Leave a module without its weight's numbers."""
    weight = module.get_parameter("weight")
    weight.data = weight.data.new_empty(0)


def _linear(module: nn.Linear, kind: str, dtype: torch.dtype, keep: bool) -> PackedLinear:
    bias = module.full_bias() if isinstance(module, FusedLinear) else module.bias
    weight = pack(module.weight, kind)
    if not keep:
        _let_go(module)
    return PackedLinear(weight, None if bias is None else bias.detach().float(), dtype)


def _feedforward(module: nn.Module, kind: str, keep: bool) -> PackedFeedForward | PackedExperts:
    if type(module) is Experts:
        return PackedExperts(module, kind, keep)
    if type(module) is not FeedForward:
        raise Unsupported(f"weights of a {type(module).__name__} cannot be packed yet: use the model as it is")
    bias = module.input.bias
    inner = pack(module.input.weight, kind, paired=module.kind in GATED)
    if not keep:
        _let_go(module.input)
    first = PackedLinear(inner, None if bias is None else bias.detach().float())
    return PackedFeedForward(first, _linear(module.output, kind, torch.float32, keep), module.kind)


def weights_of(model: nn.Module) -> list[Packed]:
    """All packed matrices of a model, each once."""
    found: dict[int, Packed] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            found[id(module.weight)] = module.weight
        elif isinstance(module, PackedExpertLinear):
            found |= {id(weight): weight for weight in module.weight}
    return list(found.values())
