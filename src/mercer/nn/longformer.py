"""Longformer's layer: a sliding window, and global tokens that look through projections of their own."""

import torch
from torch import Tensor, nn

from mercer.core.kernels import Kernel
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.patterns import Global, Longformer
from mercer.core.structures import Full, Padding, Structure, Window
from mercer.errors import InvalidArgument
from mercer.nn.kernel_tensors import WithKernel
from mercer.nn.options import gate_size
from mercer.ops import attention


class LongformerAttention(WithKernel):
    """Self-attention within a window, to and from global tokens.

        y_i = W_out attention(W_q x_i; W_k x_j, W_v x_j)        j in the window of i, or global
        y_i = W_out attention(W_q' x_i; W_k' x_j, W_v' x_j)     i global, all j

    The primed projections are `query_global`, `key_global` and `value_global`. Without padding these names and sizes
    are those of the published models' layers, so that their weights load as they are. Work grows with the length times
    the window, and with the number of global tokens times the length.

    dim: channels of x and y. heads: a divisor of dim. window: the whole width, even: window / 2 tokens on either side.
    kernel, normalizer, scale and form are those of `mercer.attention`; default softmax. bias: adds biases to all
    projections, default True. generator: draws a kernel's random features, as in `Attention`; both kinds of queries
    share them.

    Source: Beltagy et al. 2020, arXiv 2004.05150.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        window: int,
        kernel: Kernel | None = None,
        normalizer: Normalizer | None = None,
        scale: float | None = None,
        bias: bool = True,
        form: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        if dim < 1 or heads < 1 or dim % heads:
            raise InvalidArgument(
                f"LongformerAttention needs dim and heads of 1 or more and heads a divisor of dim, got dim={dim}, "
                f"heads={heads}"
            )
        Longformer(window)
        super().__init__(kernel, dim // heads, heads, heads, generator)
        self.dim, self.heads, self.head_dim, self.window = dim, heads, dim // heads, window
        self.normalizer = Sum() if normalizer is None else normalizer
        if gate_size(None, self.normalizer, 1):
            raise InvalidArgument(
                f"LongformerAttention makes no gates, so {self.normalizer} has none; use its inner normaliser"
            )
        self.scale, self.form = scale, form
        for name in ("query", "key", "value", "query_global", "key_global", "value_global", "output"):
            self.add_module(name, nn.Linear(dim, dim, bias=bias))

    def forward(self, x: Tensor, *, global_mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """x: [B, L, dim]; returns [B, L, dim].

        global_mask: bool [B, L], True for global tokens, any number in each row; None for none. padding: bool [B, L],
        True for real tokens, anywhere; masked tokens are as if absent, global ones too.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"LongformerAttention expects [B, L, {self.dim}], got a tensor of {list(x.shape)}")
        for name, mask in (("global_mask", global_mask), ("padding", padding)):
            if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
                raise InvalidArgument(
                    f"{name} must be boolean [B, L] = {list(x.shape[:2])}, not {mask.dtype} {list(mask.shape)}"
                )
        side: Structure = Window(self.window // 2, self.window // 2)
        marked = None if global_mask is None else global_mask if padding is None else global_mask & padding
        if marked is not None and bool(marked.any()):
            side = side | Global(mask=marked, see=False)
        else:
            marked = None
        if padding is not None:
            side = side & Padding(padding)
        local = self._attend(x, x, "", side)
        if marked is not None:
            local = local.masked_scatter(marked[..., None, None], self._global_rows(x, marked, padding))
        return self.output(local.flatten(2))

    def _global_rows(self, x: Tensor, marked: Tensor, padding: Tensor | None) -> Tensor:
        """What the global tokens see, [tokens, H, D], row after row."""
        count = marked.sum(1)
        first = marked.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(count.max())]
        there = torch.arange(first.shape[1], device=x.device) < count.unsqueeze(1)
        tokens = x.gather(1, first.unsqueeze(-1).expand(-1, -1, self.dim))
        every = torch.ones_like(marked) if padding is None else padding
        return self._attend(tokens, x, "_global", Full() & Padding(every, queries=there))[there]

    def _attend(self, queries: Tensor, x: Tensor, which: str, structure: Structure) -> Tensor:
        """Rows [B, Lq, H, D] through one set of projections."""
        names = (("query", queries), ("key", x), ("value", x))
        q, k, v = (
            getattr(self, name + which)(tokens).unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
            for name, tokens in names
        )
        out = attention(
            q,
            k,
            v,
            kernel=self.kernel,
            normalizer=self.normalizer,
            structure=structure,
            scale=self.scale,
            form=self.form,
        )
        return out.transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, heads={self.heads}, window={self.window}, kernel={self._kernel}, "
            f"normalizer={self.normalizer}, scale={self.scale}"
        )
