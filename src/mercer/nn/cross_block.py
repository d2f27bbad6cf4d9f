"""The residual block of a decoder that looks at a memory: attention to itself, to the memory, then a feed-forward."""

from torch import Tensor, nn

from mercer.core.state import State
from mercer.core.structures import Structure
from mercer.errors import InvalidArgument
from mercer.nn.attention import Attention
from mercer.nn.cross_attention import CrossAttention
from mercer.nn.experts import Experts
from mercer.nn.feedforward import FeedForward
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.routing import Routing


class CrossBlock(nn.Module):
    """Three residual parts: f the attention of x to itself, g that of x to the memory, h the feed-forward.

    norm_position="pre":  y = x + f(norm(x)), z = y + g(norm(y)), then z + h(norm(z)).
    norm_position="post": y = norm(x + f(x)), z = norm(y + g(y)), then norm(z + h(z)) (Vaswani et al. 2017).
    """

    def __init__(
        self,
        attention: Attention,
        cross: CrossAttention,
        feedforward: FeedForward | Experts,
        norms: tuple[LayerNorm | RMSNorm, LayerNorm | RMSNorm, LayerNorm | RMSNorm],
        *,
        norm_position: str = "pre",
    ) -> None:
        super().__init__()
        if norm_position not in ("pre", "post"):
            raise InvalidArgument(f'norm_position must be "pre" or "post", got {norm_position!r}')
        self.attention, self.cross, self.feedforward = attention, cross, feedforward
        self.attention_norm, self.cross_norm, self.feedforward_norm = norms
        self.norm_position = norm_position

    def forward(
        self,
        x: Tensor,
        memory: Tensor | State,
        *,
        memory_padding: Tensor | None = None,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        routings: list[Routing] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x: [B, L, dim]; memory: [B, M, dim] with memory_padding, or what `cross.remember` made of it. The others as
        of `Block`. Returns x's shape, and the state of the attention to itself if asked.
        """
        pre = self.norm_position == "pre"
        options = {"padding": padding, "structure": structure, "state": state}
        found = self.attention(self.attention_norm(x) if pre else x, **options, return_state=return_state)
        mixed, after = found if isinstance(found, tuple) else (found, None)
        x = x + mixed if pre else self.attention_norm(x + mixed)
        looked = self.cross(self.cross_norm(x) if pre else x, memory, padding=memory_padding)
        x = x + looked if pre else self.cross_norm(x + looked)
        read = self.feedforward_norm(x) if pre else x
        if isinstance(self.feedforward, Experts):
            fed = self.feedforward(read, padding=padding, routings=routings)
        else:
            fed = self.feedforward(read)
        x = x + fed if pre else self.feedforward_norm(x + fed)
        return x if after is None else (x, after)
