"""T5's relative positions: a learned log-weight for each head and each bucket of distances."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mercer.core.log_weights import RelativeBias
from mercer.errors import InvalidArgument
from mercer.nn.values import with_values


def t5_buckets(ahead: Tensor, *, bidirectional: bool, buckets: int = 32, max_distance: int = 128) -> Tensor:
    """The bucket of a key that stands `ahead` positions after the query (negative: before it), integers [...].

    Of b buckets for one direction (all of them if not bidirectional, where keys ahead share bucket 0 with the query's
    own place; else half, the upper half for keys ahead) the first e = b // 2 are one distance n each, and the others
    grow geometrically up to max_distance, beyond which all distances share the last:

        bucket = n  for n < e,     min(e + floor(ln(n / e) / ln(max_distance / e) (b - e)), b - 1)  from there on.

    A value within 1e-6 below a whole number counts as that number: rounding must not move a distance whose exact
    logarithm is one.

    Source: Raffel et al. 2020, arXiv 1910.10683.
    """
    each = buckets // 2 if bidirectional else buckets
    exact = each // 2
    if exact < 1 or (bidirectional and buckets % 2):
        raise InvalidArgument(
            f"T5 needs at least 2 buckets for a direction, and an even number for two directions, not {buckets}"
        )
    if max_distance <= exact:
        raise InvalidArgument(
            f"T5's max_distance must be above {exact}, the distances with a bucket of their own, not {max_distance}"
        )
    distance = ahead.abs() if bidirectional else (-ahead).clamp_min(0)
    wide = torch.float32 if ahead.device.type == "mps" else torch.float64
    far = (distance.clamp_min(exact).to(wide) / exact).log() / torch.tensor(max_distance / exact, dtype=wide).log()
    far = (exact + (far * (each - exact) + 1e-6).floor().to(torch.int64)).clamp_max(each - 1)
    near = torch.where(distance < exact, distance.to(torch.int64), far)
    return near + each * (ahead > 0) if bidirectional else near


class T5Bias(nn.Module):
    """A log-weight for each head and bucket of distances, learned; calling it gives the structure to compose with.

        w_ij = exp(weight[bucket(j - i), h])

    In the models of T5 the layers share one, and the scores have no factor 1/sqrt(d) (scale=1).

    Args:
        heads: query heads.
        bidirectional: whether keys ahead of the query have buckets of their own; default False, for causal attention.
        buckets: see :func:`t5_buckets`; default 32.
        max_distance: from which on all distances share a bucket; default 128.

    Source: Raffel et al. 2020, arXiv 1910.10683.
    """

    def __init__(self, heads: int, *, bidirectional: bool = False, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        if heads < 1:
            raise InvalidArgument(f"T5's bias needs at least one head, got {heads}")
        self.bidirectional, self.max_distance = bidirectional, max_distance
        with with_values():
            ahead = torch.arange(-max_distance, max_distance + 1 if bidirectional else 1)
            found = t5_buckets(ahead, bidirectional=bidirectional, buckets=buckets, max_distance=max_distance)
        self.bucket: Tensor  # of each distance
        self.register_buffer("bucket", found, persistent=False)
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self) -> RelativeBias:
        """The log-weights by distance, as a structure."""
        return RelativeBias(self.weight[self.bucket].t(), left=self.max_distance)

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        return f"{heads}, bidirectional={self.bidirectional}, buckets={buckets}, max_distance={self.max_distance}"
