"""The public operator over several processes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.normalizers import Normalizer
from mercer.core.structures import Structure
from mercer.distributed.agreement import agree, describe
from mercer.distributed.by_ring import ring_rows
from mercer.distributed.by_state import state_rows
from mercer.distributed.links import Link
from mercer.distributed.request import Request, request
from mercer.distributed.sharding import Sharding
from mercer.errors import InvalidArgument, MercerError
from mercer.ops import plan


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sharding: Sharding,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    group: Any = None,
    timeout: float = 300.0,
    overlap: bool = True,
) -> Tensor:
    link = Link(group, timeout)
    made = _agreed(
        link, "ring", query, key, value, kernel, normalizer, structure, scale, sharding, f"overlap={overlap}"
    )
    return ring_rows(made, link, overlap)


def state_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sharding: Sharding,
    kernel: Kernel,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    group: Any = None,
    timeout: float = 300.0,
) -> Tensor:
    link = Link(group, timeout)
    made = _agreed(link, "state", query, key, value, kernel, normalizer, structure, scale, sharding)
    return state_rows(made, link)


def _agreed(
    link: Link,
    exchange: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | None,
    normalizer: Normalizer | None,
    structure: Structure | None,
    scale: float | None,
    sharding: Sharding,
    option: str = "",
) -> Request:
    """This process's request, once it is known that everybody's is the same."""
    try:
        if isinstance(sharding, Sharding) and sharding.processes != link.size:
            raise InvalidArgument(f"{sharding} is for {sharding.processes} processes; the group has {link.size}.")
        made = request(query, key, value, kernel, normalizer, structure, scale, sharding, link.rank)
        plan(
            query,
            key,
            value,
            kernel=made.kernel,
            normalizer=made.normalizer,
            structure=made.local(slice(None), None),
            scale=scale,
            path="pairs" if exchange == "ring" else "features",
        )
    except MercerError as refusal:
        if isinstance(query, Tensor):
            agree(link, {}, str(refusal), query.device)
        raise
    facts = {
        "query": f"[{query.shape[0]}, {query.shape[1]}, tokens, {query.shape[3]}] {query.dtype}",
        "key": f"[{key.shape[0]}, {key.shape[1]}, tokens, {key.shape[3]}] {key.dtype}",
        "value": f"[{value.shape[0]}, {value.shape[1]}, tokens, {value.shape[3]}] {value.dtype}",
        "kernel": str(made.kernel),
        "normalizer": str(made.normalizer),
        "structure": describe(made.merged),
        "scale": str(scale),
        "sharding": str(sharding),
        "exchange": exchange + option,
        "gradient wanted": str(made.wants_gradient),
        "number of the call": str(link.call),
    }
    agree(link, facts, None, query.device)
    return made
