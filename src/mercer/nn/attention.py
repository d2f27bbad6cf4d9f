"""The attention layer: projections around any kernel, normaliser and structure."""

from collections.abc import Iterable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from mercer.core.kernels import Kernel
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.state import State
from mercer.core.structures import Causal, Documents, Padding, Structure
from mercer.errors import InvalidArgument
from mercer.nn import turned_by_length
from mercer.nn.kernel_tensors import WithKernel
from mercer.nn.options import filled, gate_size, head_sizes, per_head, split_gates
from mercer.nn.positions import alibi_slopes, token_positions
from mercer.nn.projection import FusedLinear, biased
from mercer.nn.reach import longest
from mercer.nn.rotary import Rotary, heads_per_run, split_and_turn
from mercer.nn.values import with_values
from mercer.ops import attention


class Attention(WithKernel):
    """Self-attention with `heads` query heads and `kv_heads` key and value heads.

        [q | k | v] = x W_qkv,   o = attention(turn(q), turn(k), v),   y = o W_out

    dim: channels of x and y. heads: query heads; kv_heads: a divisor of heads (equal: multi-head, the default; 1:
    multi-query; between: grouped). head_dim: default dim / heads. output_dim: channels of y; default dim. kernel,
    normalizer, structure, scale, form and path are those of `mercer.attention`; default causal softmax. rotary: turns
    queries and keys by their positions, which count real tokens only, start anew in each packed document and go on from
    the state. Where its scaling depends on the length of the sequence, the state keeps keys as they were before
    turning. alibi: adds the standard slopes of ALiBi to the structure. gain: a learned factor on the output of L2, RMS
    or Standardize, "head" (one a head) or "channel" (one a head and channel), which starts at `gain_init`; shift: the
    same for Standardize's bias, which starts at 0. gate: SigmoidGate's gates are x W_gate, one a "channel" (the
    default) or one a "head". bias: adds biases to all of these projections, or to those named out of "query", "key",
    "value" (together "qkv"), "output" and "gate": ("query", "value", "output") is Whisper's, "qkv" Qwen's.

    A kernel that carries tensors (random directions, learned maps) is bound to this layer's heads: `kernel_tensors`
    has them as parameters or buffers, saved and moved with the layer. generator: draws them, and nothing else; without
    one a kernel of random features has the directions of its own seed, the same in every layer.

    recency: a gate g = sigmoid(x W_recency + b) for each key head and token, b 0 at first, weighs the past:
    S_j = g_j S_{j-1} + (1 - g_j) phi(k_j) v_j^T (Peng et al. 2021, arXiv 2103.02143), and likewise for pairs. Needs a
    causal structure.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        output_dim: int | None = None,
        kernel: Kernel | None = None,
        normalizer: Normalizer | None = None,
        structure: Structure | None = None,
        scale: float | None = None,
        rotary: Rotary | None = None,
        alibi: bool = False,
        gain: str = "none",
        gain_init: float = 1.0,
        shift: str = "none",
        gate: str | None = None,
        recency: bool = False,
        bias: bool | str | Iterable[str] = False,
        form: str = "auto",
        path: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        kv_heads, head_dim = head_sizes(dim, heads, kv_heads, head_dim)
        if rotary is not None and rotary.dim != head_dim:
            raise InvalidArgument(f"rotary turns {rotary.dim} channels but a head has {head_dim}")
        super().__init__(kernel, head_dim, heads, kv_heads, generator)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.normalizer = Sum() if normalizer is None else normalizer
        with with_values():
            # No buffer: a change of the model's dtype would round the slopes.
            self.slopes = alibi_slopes(heads) if alibi else None
            self.gain = per_head("gain", gain, gain_init, self.normalizer, heads, self.head_dim)
            self.shift = per_head("shift", shift, 0.0, self.normalizer, heads, self.head_dim)
        self.structure = Causal() if structure is None else structure
        self.scale, self.form, self.path, self.rotary = scale, form, path, rotary
        with_bias = biased(bias)
        self.qkv = FusedLinear(
            dim,
            [n * self.head_dim for n in (heads, kv_heads, kv_heads)],
            [part in with_bias for part in ("query", "key", "value")],
        )
        self.output = nn.Linear(
            heads * self.head_dim, dim if output_dim is None else output_dim, bias="output" in with_bias
        )
        gates = gate_size(gate, self.normalizer, self.head_dim)
        self.gate = nn.Linear(dim, heads * gates, bias="gate" in with_bias) if gates else None
        self.recency = nn.Linear(dim, kv_heads) if recency else None
        if recency:
            merge(self.structure & Decay(torch.ones(1), complement=True))  # says at once if the structure cannot decay

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        added: Tensor | None = None,
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
        added: Tensor | None = None,
        return_state: Literal[True],
    ) -> tuple[Tensor, State]: ...

    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        added: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x: [B, L, dim]; returns [B, L, dim], with the state after x if return_state.

        padding: bool [B, L], True for real tokens, anywhere; masked tokens are as if absent. structure: composed with
        the layer's own for this call (documents, decay). state: what earlier tokens left behind; x continues them.
        added: what this call adds to [q | k | v] [B, L, (heads + 2 kv_heads) head_dim], as a low-rank adapter does.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"attention expects [B, L, {self.dim}], got a tensor of {list(x.shape)}")
        used = self.structure if structure is None else self.structure & structure
        if self.slopes is not None:
            used = used & Alibi(self.slopes.to(x.device))
        if padding is not None:
            used = used & Padding(padding)
        if self.recency is not None:
            used = used & Decay(log_rate=self._log_rates(self.recency(x), padding), complement=True)
        documents = next((part for part in used.parts if isinstance(part, Documents)), None)
        gate = None if self.gate is None else split_gates(self.gate(x), self.heads)
        options: dict[str, Any] = {
            "kernel": self.kernel,
            "normalizer": filled(self.normalizer, gate, self.gain, self.shift),
            "structure": used,
            "scale": self.scale,
            "state": state,
            "return_state": return_state,
            "form": self.form,
            "path": self.path,
        }
        self._check_length(x, padding, documents, state)
        if self.rotary is not None and self.rotary.by_length:
            out, after = turned_by_length.attend(self.rotary, *self._split(x, added), padding=padding, **options)
        else:
            result = attention(*self._project(x, padding, documents, state, added), **options)
            out, after = result if isinstance(result, tuple) else (result, None)
        y = self.output(out.transpose(1, 2).flatten(2))
        return y if after is None else (y, after)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values [B, H, L, head_dim] that the operator is given for x [B, L, dim], turned if
        there is a rotary: what to study an attention with.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"attention expects [B, L, {self.dim}], got a tensor of {list(x.shape)}")
        self._check_length(x, None, None, None)
        if self.rotary is not None and self.rotary.by_length:
            query, key, value = self._split(x)
            query, key = turned_by_length.turned(self.rotary, query, key)
            return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return self._project(x, None, None, None)

    def _check_length(
        self, x: Tensor, padding: Tensor | None, documents: Documents | None, state: State | None
    ) -> None:
        """Refuse sequences beyond what the rotary was trained for."""
        if self.rotary is None or self.rotary.reach is None:
            return
        offset = None if state is None else state.length
        if documents is None:
            self.rotary.check_length(longest(x.shape[1], padding, offset))
            return
        sizes = documents.offsets.diff()
        totals = sizes if offset is None else sizes.to(offset.device) + offset.view(x.shape[0], -1)
        self.rotary.check_length(int(totals.max()))

    def _fused(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Queries, keys and values [B, L, heads + 2 kv_heads, D]."""
        qkv = self.qkv(x)
        if added is not None:
            if added.shape != qkv.shape:
                raise InvalidArgument(f"added must be {list(qkv.shape)}, as [q | k | v] is, got {list(added.shape)}")
            qkv = qkv + added
        return qkv.view(*x.shape[:2], self.heads + 2 * self.kv_heads, self.head_dim)

    def _split(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, L, H, D] as the projection gives them."""
        qkv = self._fused(x, added)
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), 2)
        return query, key, value

    def _project(
        self,
        x: Tensor,
        padding: Tensor | None,
        documents: Documents | None,
        state: State | None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, L, D], turned if there is a rotary."""
        batch, length, _ = x.shape
        if self.rotary is None:
            parts = self._split(x, added)
        else:
            qkv = self._fused(x, added)
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

    def _log_rates(self, logits: Tensor, padding: Tensor | None) -> Tensor:
        """log sigmoid of the recency gates' logits [B, L, kv_heads], as [B, kv_heads, L]; 0 where a token is not."""
        logs = nn.functional.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32))).transpose(1, 2)
        return logs if padding is None else logs.masked_fill(~padding.unsqueeze(1), 0)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"kernel={self._kernel}, normalizer={self.normalizer}, structure={self.structure}, scale={self.scale}"
        )
