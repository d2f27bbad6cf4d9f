"""A mixture of experts: many feed-forwards, of which a router lets few serve each token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.nn.activations import ACTIVATIONS, GATED, check_kind, default_hidden
from mercer.nn.feedforward import gated_linear
from mercer.nn.routing import Routing, route


class ExpertLinear(nn.Module):
    """A matrix for each expert: `weight` is [experts, outputs, inputs]. It starts as nn.Linear's weights do."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs).uniform_(-(inputs**-0.5), inputs**-0.5))

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.weight.shape
        return f"experts={experts}, in_features={inputs}, out_features={outputs}"


class Experts(nn.Module):
    """y = sum over the chosen experts e of g_e W_out,e f(W_in,e x), with l = x W_router deciding which and how much.

    dim: channels of x and y. hidden: channels inside of each expert; default as `FeedForward`. experts: how many there
    are; chosen: how many serve a token. kind: f, as in `FeedForward`; gated ones store the rows of the gate first.

    renormalise: whether the weights g of the chosen experts sum to 1, softmax over the chosen logits (Mixtral), or are
    what softmax over all logits gives them (Switch Transformer with chosen=1, Jamba); default True. A single expert's
    weight is then 1, and trains no router.

    capacity: the most tokens of a sequence that an expert takes, the earliest first. An expert that has no room adds
    exactly 0. Counted within a call and a batch row, whatever documents are packed in it: a call that decodes a single
    token always has room. Default None, no limit.

    router_bias: adds a bias to the router's logits.

    Tokens are sorted by expert, so that each expert is two products of the rows it serves, and none of them where it
    serves none. The router's product and the sum over experts are float32 at least, inside of torch.autocast too.

    Source: Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2022, arXiv 2101.03961; Jiang et al. 2024, arXiv
    2401.04088.
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        experts: int = 8,
        chosen: int = 2,
        *,
        kind: str = "swiglu",
        renormalise: bool = True,
        capacity: int | None = None,
        router_bias: bool = False,
    ) -> None:
        super().__init__()
        check_kind(kind)
        hidden = default_hidden(dim, kind) if hidden is None else hidden
        if dim < 1 or hidden < 1 or not 1 <= chosen <= experts:
            raise InvalidArgument(
                f"experts need dim and hidden of at least 1 and from 1 to all of them chosen, got dim={dim}, "
                f"hidden={hidden}, experts={experts}, chosen={chosen}"
            )
        if capacity is not None and capacity < 1:
            raise InvalidArgument(f"capacity must be at least 1 token, or None for no limit, got {capacity}")
        self.dim, self.experts, self.chosen, self.kind = dim, experts, chosen, kind
        self.renormalise, self.capacity = renormalise, capacity
        self.router = nn.Linear(dim, experts, bias=router_bias)
        self.input = ExpertLinear(experts, dim, 2 * hidden if kind in GATED else hidden)
        self.output = ExpertLinear(experts, hidden, dim)

    def forward(self, x: Tensor, *, padding: Tensor | None = None, routings: list[Routing] | None = None) -> Tensor:
        """x: [B, L, dim]; returns [B, L, dim].

        padding: bool [B, L], True for real tokens, anywhere; others get 0 and take no expert's place. routings: a list
        that this call's `Routing` is appended to, for `balance_loss` and `z_loss`.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"experts expect [B, L, {self.dim}], got a tensor of {list(x.shape)}")
        if padding is not None:
            if padding.dtype != torch.bool or padding.shape != x.shape[:2]:
                raise InvalidArgument(
                    f"padding must be boolean [B, L] = {list(x.shape[:2])}, not {padding.dtype} {list(padding.shape)}"
                )
            x = x.masked_fill(~padding.unsqueeze(-1), 0)  # what stands there must not reach the router's gradient
        routing = route(
            self._logits(x), self.chosen, renormalise=self.renormalise, capacity=self.capacity, padding=padding
        )
        if routings is not None:
            routings.append(routing)
        return self._serve(x.reshape(-1, self.dim), routing).view(x.shape)

    def _logits(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.router.bias is None else self.router.bias.to(wide)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(wide), self.router.weight.to(wide), bias)

    def _serve(self, x: Tensor, routing: Routing) -> Tensor:
        """The sum of what the experts make of each token [tokens, dim], by their weights."""
        expert = torch.where(routing.kept, routing.chosen, self.experts).flatten()
        order = expert.argsort(stable=True)
        *counts, idle = expert.bincount(minlength=self.experts + 1).tolist()
        served = order[: len(order) - idle]
        rows = x.index_select(0, served // self.chosen)
        inward, outward = self.input.weight, self.output.weight
        if torch.is_grad_enabled():  # so that gradients are stacked once, and not added up in full size for each expert
            inward, outward = inward.unbind(), outward.unbind()
        parts = [self._expert(own, inward[e], outward[e]) for e, own in enumerate(rows.split(counts)) if counts[e]]
        made = torch.cat(parts) if parts else rows
        weighed = made * routing.weights.flatten().index_select(0, served).unsqueeze(-1)
        if idle:
            weighed = torch.cat((weighed, weighed.new_zeros(idle, self.dim)))
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return weighed.index_select(0, place).view(len(x), self.chosen, self.dim).sum(1).to(made.dtype)

    def _expert(self, rows: Tensor, inward: Tensor, outward: Tensor) -> Tensor:
        if self.kind in GATED:
            inner = gated_linear(rows, inward, gate=GATED[self.kind])
        else:
            inner = ACTIVATIONS[self.kind].apply(nn.functional.linear(rows, inward))
        return nn.functional.linear(inner, outward)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, experts={self.experts}, chosen={self.chosen}, kind={self.kind!r}, "
            f"renormalise={self.renormalise}, capacity={self.capacity}"
        )
