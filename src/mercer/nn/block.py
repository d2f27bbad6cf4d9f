"""The residual block: attention, then a feed-forward, each with its norm before or after."""

from typing import Literal, overload

from torch import Tensor, nn

from mercer.core.state import State
from mercer.core.structures import Structure
from mercer.errors import InvalidArgument
from mercer.nn.attention import Attention
from mercer.nn.feedforward import FeedForward
from mercer.nn.norms import LayerNorm, RMSNorm


class Block(nn.Module):
    """norm_position="pre":  x + f(norm(x))   (the residual stream stays unnormalised; close it with a final norm).
    norm_position="post": norm(x + f(x))   (Vaswani et al. 2017), for f the attention and then the feed-forward.
    """

    def __init__(
        self,
        attention: Attention,
        feedforward: FeedForward,
        attention_norm: LayerNorm | RMSNorm,
        feedforward_norm: LayerNorm | RMSNorm,
        *,
        norm_position: str = "pre",
    ) -> None:
        super().__init__()
        if norm_position not in ("pre", "post"):
            raise InvalidArgument(f'norm_position must be "pre" or "post", got {norm_position!r}')
        self.attention, self.feedforward = attention, feedforward
        self.attention_norm, self.feedforward_norm = attention_norm, feedforward_norm
        self.norm_position = norm_position

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
        """x: [B, L, dim]; padding: bool [B, L], True for real tokens; structure: composed with the attention's own for
        this call. Returns x's shape, and the state if asked.
        """
        pre = self.norm_position == "pre"
        inner = self.attention_norm(x) if pre else x
        after: State | None = None
        if return_state:
            mixed, after = self.attention(inner, padding=padding, structure=structure, state=state, return_state=True)
        else:
            mixed = self.attention(inner, padding=padding, structure=structure, state=state)
        x = x + mixed if pre else self.attention_norm(x + mixed)
        x = x + self.feedforward(self.feedforward_norm(x)) if pre else self.feedforward_norm(x + self.feedforward(x))
        return x if after is None else (x, after)
