"""Attention from one sequence to another: a decoder's to what the encoder made of the input."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mercer.core.kernels import Kernel
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.state import State
from mercer.core.structures import Full, Padding, Structure
from mercer.errors import InvalidArgument, Unsupported
from mercer.nn.kernel_tensors import WithKernel
from mercer.nn.options import filled, gate_size, head_sizes, per_head, split_gates
from mercer.nn.projection import FusedLinear, biased
from mercer.nn.values import with_values
from mercer.ops import attention


class CrossAttention(WithKernel):
    """Attention of queries from x to keys and values from a memory m, which may have another length and other channels.

        q = x W_query,   [k | v] = m W_key_value,   o_i = N( sum_j K(q_i, k_j) v_j ),   y = o W_out

    Every token of x sees the whole memory, except its padding. `remember` computes what is needed of the memory once,
    as a `State`: a cache of keys and values, or, of a kernel with finitely many features, the sums over the memory,
    whose size does not depend on its length. A `State` is a value: rows are selected from it as from any other.

    dim: channels of x and y. heads: query heads. memory_dim: channels of m; default dim. kv_heads, head_dim, kernel,
    normalizer, scale, gain, gain_init, shift, gate, bias, form, path and generator: as in `Attention`, the gate and its
    bias from x. `Mixed` kernels are refused: the tokens of a memory stand at no distance from those of x.

    Source: Vaswani et al. 2017, arXiv 1706.03762.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        memory_dim: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        kernel: Kernel | None = None,
        normalizer: Normalizer | None = None,
        scale: float | None = None,
        gain: str = "none",
        gain_init: float = 1.0,
        shift: str = "none",
        gate: str | None = None,
        bias: bool | str | Iterable[str] = False,
        form: str = "auto",
        path: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        kv_heads, head_dim = head_sizes(dim, heads, kv_heads, head_dim)
        memory_dim = dim if memory_dim is None else memory_dim
        if memory_dim < 1:
            raise InvalidArgument(f"memory_dim must be at least 1, got {memory_dim}")
        if isinstance(kernel, Mixed):
            raise Unsupported(
                f"{kernel} tells near keys from far ones, and a memory has no distances: use {kernel.near} or "
                f"{kernel.far} alone."
            )
        super().__init__(kernel, head_dim, heads, kv_heads, generator)
        self.dim, self.memory_dim = dim, memory_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.normalizer = Sum() if normalizer is None else normalizer
        self.scale, self.form, self.path = scale, form, path
        with with_values():
            self.gain = per_head("gain", gain, gain_init, self.normalizer, heads, head_dim)
            self.shift = per_head("shift", shift, 0.0, self.normalizer, heads, head_dim)
        with_bias = biased(bias)
        self.query = nn.Linear(dim, heads * head_dim, bias="query" in with_bias)
        widths = [kv_heads * head_dim] * 2
        self.key_value = FusedLinear(memory_dim, widths, ["key" in with_bias, "value" in with_bias])
        self.output = nn.Linear(heads * head_dim, dim, bias="output" in with_bias)
        gates = gate_size(gate, self.normalizer, head_dim)
        self.gate = nn.Linear(dim, heads * gates, bias="gate" in with_bias) if gates else None

    def remember(self, memory: Tensor, *, padding: Tensor | None = None) -> State:
        """What `forward` needs of a memory [B, M, memory_dim], to be passed in its place any number of times.

        padding: bool [B, M], True for real tokens, anywhere; masked tokens are as if absent. Under path="auto" a kernel
        with F features keeps their sums, F (D + 1) numbers a head, where that is less than the 2 D M of a cache.
        """
        key, value = self._keys_and_values(memory, padding)
        path = self.path
        if path == "auto":
            features = self.kernel.feature_dim(self.head_dim)
            small = features is not None and features * (self.head_dim + 1) < 2 * self.head_dim * memory.shape[1]
            path = "features" if small else "pairs"
        query = key.new_empty(key.shape[0], self.heads, 0, self.head_dim)
        _, state = attention(
            query,
            key,
            value,
            kernel=self.kernel,
            normalizer=self._normalizer(memory.new_empty(memory.shape[0], 0, self.dim)),
            structure=_hidden(padding),
            scale=self.scale,
            return_state=True,
            path=path,
        )
        return state

    def forward(self, x: Tensor, memory: Tensor | State, *, padding: Tensor | None = None) -> Tensor:
        """x: [B, L, dim]; memory: [B, M, memory_dim], or what `remember` made of it. Returns [B, L, dim].

        padding: bool [B, M], True for real tokens, of a memory that is a tensor. A row whose whole memory is masked is
        the bias of the output.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"cross-attention expects x of [B, L, {self.dim}], got a tensor of {list(x.shape)}")
        query = self.query(x).unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
        if isinstance(memory, State):
            if padding is not None:
                raise InvalidArgument("the padding of a memory is given to remember(), which keeps it")
            state, path = memory, "auto"  # a state is continued on the path that it was made on
            key = value = query.new_empty(x.shape[0], self.kv_heads, 0, self.head_dim)
        else:
            state, path = None, self.path
            key, value = self._keys_and_values(memory, padding)
        out = attention(
            query,
            key,
            value,
            kernel=self.kernel,
            normalizer=self._normalizer(x),
            structure=_hidden(padding),
            scale=self.scale,
            state=state,
            form=self.form,
            path=path,
        )
        return self.output(out.transpose(1, 2).flatten(2))

    def _keys_and_values(self, memory: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, M, head_dim]."""
        if memory.dim() != 3 or memory.shape[-1] != self.memory_dim:
            raise InvalidArgument(
                f"cross-attention expects a memory of [B, M, {self.memory_dim}], got a tensor of {list(memory.shape)}"
            )
        if padding is not None and (padding.dtype != torch.bool or padding.shape != memory.shape[:2]):
            raise InvalidArgument(
                f"padding must be boolean [B, M] = {list(memory.shape[:2])}, not {padding.dtype} {list(padding.shape)}"
            )
        both = self.key_value(memory).unflatten(2, (2, self.kv_heads, self.head_dim))
        key, value = (part.transpose(1, 2) for part in both.unbind(2))
        return key, value

    def _normalizer(self, x: Tensor) -> Normalizer:
        gate = None if self.gate is None else split_gates(self.gate(x), self.heads)
        return filled(self.normalizer, gate, self.gain, self.shift)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, heads={self.heads}, memory_dim={self.memory_dim}, kv_heads={self.kv_heads}, "
            f"head_dim={self.head_dim}, kernel={self._kernel}, normalizer={self.normalizer}, scale={self.scale}"
        )


def _hidden(padding: Tensor | None) -> Structure:
    return Full() if padding is None else Padding(padding)
