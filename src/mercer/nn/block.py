"""The residual block: an attention and a feed-forward, one after the other or side by side, with their norms."""

from typing import Literal, overload

from torch import Tensor, nn

from mercer.core.state import State
from mercer.core.structures import Structure
from mercer.errors import InvalidArgument
from mercer.nn.attention import Attention
from mercer.nn.experts import Experts
from mercer.nn.feedforward import FeedForward
from mercer.nn.longformer import LongformerAttention
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.routing import Routing

NORM_POSITIONS = ("pre", "post", "both")
PARALLEL = ("none", "own_norms", "one_norm")


class Block(nn.Module):
    """Two residual parts, f the attention and then g the feed-forward, and where their norms stand.

    norm_position="pre":  y = x + f(norm(x)), then y + g(norm(y)). The residual stream stays unnormalised; close it with
        a final norm.
    norm_position="post": y = norm(x + f(x)), then norm(y + g(y)) (Vaswani et al. 2017).
    norm_position="both": y = x + norm_after(f(norm(x))), then the same of g: the norms of "pre", and one more of each
        part's result before it is added (Gemma 2). `attention_norm_after` and `feedforward_norm_after` are these.
    parallel="own_norms": x + f(norm(x)) + g(norm'(x)), with the norms of "pre" (GPT-NeoX).
    parallel="one_norm": x + f(n) + g(n) with n = norm(x); there is no `feedforward_norm` (GPT-J, PaLM).
    """

    def __init__(
        self,
        attention: Attention | LongformerAttention,
        feedforward: FeedForward | Experts,
        attention_norm: LayerNorm | RMSNorm,
        feedforward_norm: LayerNorm | RMSNorm | None,
        *,
        norm_position: str = "pre",
        parallel: str = "none",
        attention_norm_after: LayerNorm | RMSNorm | None = None,
        feedforward_norm_after: LayerNorm | RMSNorm | None = None,
    ) -> None:
        super().__init__()
        if norm_position not in NORM_POSITIONS:
            raise InvalidArgument(f"norm_position must be one of {', '.join(NORM_POSITIONS)}, got {norm_position!r}")
        if parallel not in PARALLEL:
            raise InvalidArgument(f"parallel must be one of {', '.join(PARALLEL)}, got {parallel!r}")
        if parallel != "none" and norm_position != "pre":
            raise InvalidArgument(
                f'parallel={parallel!r} has its norms before both parts: norm_position must be "pre", got '
                f"{norm_position!r}"
            )
        if (feedforward_norm is None) != (parallel == "one_norm"):
            raise InvalidArgument('feedforward_norm is given for every block but one with parallel="one_norm"')
        for after in (attention_norm_after, feedforward_norm_after):
            if (after is None) == (norm_position == "both"):
                raise InvalidArgument(
                    'attention_norm_after and feedforward_norm_after are both given for norm_position="both", and '
                    "neither of them otherwise"
                )
        self.attention, self.feedforward = attention, feedforward
        self.attention_norm, self.feedforward_norm = attention_norm, feedforward_norm
        self.attention_norm_after, self.feedforward_norm_after = attention_norm_after, feedforward_norm_after
        self.norm_position, self.parallel = norm_position, parallel

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        routings: list[Routing] | None = None,
        return_state: Literal[False] = False,
        global_mask: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        routings: list[Routing] | None = None,
        return_state: Literal[True],
    ) -> tuple[Tensor, State]: ...

    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        routings: list[Routing] | None = None,
        return_state: bool = False,
        global_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """x: [B, L, dim]; padding: bool [B, L], True for real tokens; structure: composed with the attention's own for
        this call; routings: a list that the routing of experts, if there are any, is appended to; global_mask: as
        `LongformerAttention` takes it, which has neither a structure nor a state. Returns x's shape, and the state if
        asked.
        """
        sparse = isinstance(self.attention, LongformerAttention)
        if sparse and (structure is not None or state is not None or return_state):
            raise InvalidArgument("LongformerAttention takes neither a structure nor a state")
        if global_mask is not None and not sparse:
            raise InvalidArgument("global_mask is for LongformerAttention")
        post = self.norm_position == "post"
        read = x if post else self.attention_norm(x)
        after: State | None = None
        if sparse:
            mixed = self.attention(read, global_mask=global_mask, padding=padding)
        elif return_state:
            mixed, after = self.attention(read, padding=padding, structure=structure, state=state, return_state=True)
        else:
            mixed = self.attention(read, padding=padding, structure=structure, state=state)
        if self.attention_norm_after is not None:
            mixed = self.attention_norm_after(mixed)
        middle = self.attention_norm(x + mixed) if post else x + mixed
        if post:
            read = middle
        elif self.feedforward_norm is not None:  # otherwise both parts read the same
            read = self.feedforward_norm(middle if self.parallel == "none" else x)
        if isinstance(self.feedforward, Experts):
            fed = self.feedforward(read, padding=padding, routings=routings)
        else:
            fed = self.feedforward(read)
        if self.feedforward_norm_after is not None:
            fed = self.feedforward_norm_after(fed)
        y = middle + fed
        if post and self.feedforward_norm is not None:
            y = self.feedforward_norm(y)
        return y if after is None else (y, after)
