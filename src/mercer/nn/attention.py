"""The attention layer: projections around any kernel, normaliser and structure."""

import dataclasses
from typing import Literal, overload

import torch
from torch import Tensor, nn

from mercer.core.kernels import Exp, Kernel
from mercer.core.normalizers import L2, RMS, Normalizer, Sum
from mercer.core.state import State
from mercer.core.structures import Alibi, Causal, Documents, Padding, Structure, merge
from mercer.errors import InvalidArgument
from mercer.nn.positions import alibi_slopes, token_positions
from mercer.nn.rotary import Rotary, heads_per_run, split_and_turn
from mercer.ops import attention

GAINS = ("none", "head", "channel")


class Attention(nn.Module):
    """Self-attention with `heads` query heads and `kv_heads` key and value heads.

        [q | k | v] = x W_qkv,   o = attention(turn(q), turn(k), v),   y = o W_out

    dim: channels of x and y. heads: query heads; kv_heads: a divisor of heads (equal: multi-head, the default; 1:
    multi-query; between: grouped). head_dim: default dim / heads. kernel, normalizer, structure, scale, form and path
    are those of `mercer.attention`; default causal softmax. rotary: turns queries and keys by their positions, which
    count real tokens only, start anew in each packed document and go on from the state. alibi: adds the standard
    slopes of ALiBi to the structure. gain: a learned factor on the output of L2 or RMS, "head" (one a head) or
    "channel" (one a head and channel), which starts at `gain_init`. bias: adds biases to both projections.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        kernel: Kernel | None = None,
        normalizer: Normalizer | None = None,
        structure: Structure | None = None,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi: bool = False,
        gain: str = "none",
        gain_init: float = 1.0,
        bias: bool = False,
        form: str = "auto",
        path: str = "auto",
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if dim < 1 or heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise InvalidArgument(
                f"attention needs dim, heads and kv_heads of at least 1 and kv_heads a divisor of heads, "
                f"got dim={dim}, heads={heads}, kv_heads={kv_heads}"
            )
        if head_dim is None and dim % heads:
            raise InvalidArgument(f"dim {dim} is not a multiple of {heads} heads; pass head_dim")
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if rotary is not None and rotary.dim != self.head_dim:
            raise InvalidArgument(f"rotary turns {rotary.dim} channels but a head has {self.head_dim}")
        self.kernel = Exp() if kernel is None else kernel
        self.normalizer = Sum() if normalizer is None else normalizer
        self.structure = Causal() if structure is None else structure
        self.scale, self.form, self.path, self.rotary = scale, form, path, rotary
        self.slopes = alibi_slopes(heads) if alibi else None  # no buffer: a change of the model's dtype would round it
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.output = nn.Linear(heads * self.head_dim, dim, bias=bias)
        self.gain = self._make_gain(gain, gain_init)

    def _make_gain(self, gain: str, start: float) -> nn.Parameter | None:
        if gain not in GAINS:
            raise InvalidArgument(f"gain must be one of {', '.join(GAINS)}, got {gain!r}")
        if gain == "none":
            return None
        if not takes_gain(self.normalizer):
            raise InvalidArgument(f"a learned gain goes with the normalisers L2 and RMS, not with {self.normalizer}")
        shape = (self.heads,) if gain == "head" else (self.heads, self.head_dim)
        return nn.Parameter(torch.full(shape, float(start)))

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        return_state: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        return_state: Literal[True],
    ) -> tuple[Tensor, State]: ...

    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x: [B, L, dim]; returns [B, L, dim], with the state after x if return_state.

        padding: bool [B, L], True for real tokens, anywhere; masked tokens are as if absent. structure: composed with
        the layer's own for this call (documents, decay). state: what earlier tokens left behind; x continues them.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"attention expects [B, L, {self.dim}], got a tensor of {list(x.shape)}")
        used = self.structure if structure is None else self.structure & structure
        if self.slopes is not None:
            used = used & Alibi(self.slopes.to(x.device))
        if padding is not None:
            used = used & Padding(padding)
        q, k, v = self._project(x, padding, merge(used).documents, state)
        normalizer = self.normalizer
        if self.gain is not None:
            normalizer = dataclasses.replace(normalizer, gain=self.gain)  # pyright: ignore[reportCallIssue]
        result = attention(
            q,
            k,
            v,
            kernel=self.kernel,
            normalizer=normalizer,
            structure=used,
            scale=self.scale,
            state=state,
            return_state=return_state,
            form=self.form,
            path=self.path,
        )
        out, after = result if isinstance(result, tuple) else (result, None)
        y = self.output(out.transpose(1, 2).flatten(2))
        return y if after is None else (y, after)

    def _project(
        self, x: Tensor, padding: Tensor | None, documents: Documents | None, state: State | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, L, D], turned if there is a rotary."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, self.heads + 2 * self.kv_heads, self.head_dim)
        if self.rotary is None:
            parts = qkv.split((self.heads, self.kv_heads, self.kv_heads), 2)
        else:
            run = heads_per_run(self.head_dim, self.heads, self.kv_heads)
            dtype = torch.promote_types(qkv.dtype, torch.float32)
            if padding is None and documents is None and state is None:
                turns = self.rotary.first_turns(length, heads=run, dtype=dtype, device=x.device)
            else:
                offset = None if state is None else state.length
                bounds = None if documents is None else documents.bounds(length)
                positions = token_positions(
                    batch, length, padding=padding, bounds=bounds, offset=offset, device=x.device
                )
                turns = self.rotary.turns(positions, heads=run, dtype=dtype)
            parts = split_and_turn(qkv, self.heads, self.kv_heads, turns)
        q, k, v = (part.transpose(1, 2) for part in parts)
        return q, k, v

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"kernel={self.kernel}, normalizer={self.normalizer}, structure={self.structure}, scale={self.scale}"
        )


def takes_gain(normalizer: Normalizer) -> bool:
    """Whether a normaliser can carry a learned gain."""
    return isinstance(normalizer, L2 | RMS)
