"""The public operators over several processes: :func:`attention`, :func:`plan` and :func:`gather`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.normalizers import Normalizer
from mercer.core.structures import Structure
from mercer.distributed import sums
from mercer.distributed.agreement import agree, describe
from mercer.distributed.by_ring import ring_rows
from mercer.distributed.by_state import state_rows
from mercer.distributed.links import Link
from mercer.distributed.planning import Plan, choose
from mercer.distributed.request import Request, request
from mercer.distributed.sharding import Sharding
from mercer.errors import InvalidArgument, MercerError


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sharding: Sharding,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    exchange: str = "auto",
    backend: str = "auto",
    group: Any = None,
    timeout: float = 300.0,
    overlap: bool = True,
) -> Tensor:
    """:func:`mercer.attention` of a sequence that several processes hold in parts: the same rows, forward and backward.

    Every process of the group calls it, and later runs its backward pass, with its own part. Two ways:

    - ``"ring"``: keys and values travel round all processes that see any of them, and partial rows are merged by
      log-sum-exp. For every kernel by pairs, every structure of distances, padding and documents.
    - ``"state"``: one state of a finite kernel runs along the sequence instead of all keys.

    Args:
        query: this process's part, ``[B, Hq, size, D]``, as :meth:`Sharding.shard` cuts it.
        key: ``[B, Hk, size, D]``, the same tokens.
        value: ``[B, Hk, size, Dv]``.
        sharding: the whole length, the number of processes and the order of the parts.
        kernel: as of :func:`mercer.attention`; default ``Exp()``.
        normalizer: likewise; default ``Sum()``. Tensors with an entry per token are those of this process.
        structure: likewise, over the whole sequence; default ``Full()``. What has an entry per token, a mask of
            ``Padding`` or rates of ``Decay``, is that of this process (:func:`shard_structure` cuts it); offsets of
            documents and lengths are those of the whole sequence.
        scale: likewise.
        exchange: ``"auto"`` (the one that the plan expects to be faster), ``"ring"`` or ``"state"``.
        backend: ``"auto"``, ``"torch"`` or ``"numba"``.
        group: a group of ``torch.distributed``, gloo or nccl; default: all processes. Without any initialised group
            the process is alone.
        timeout: seconds that any one wait for another process may last, backward too.
        overlap: send for the next keys of a ring before computing with the present ones. False is for measurements.

    Returns:
        ``[B, Hq, size, Dv]``, the rows of this process's queries.

    Raises:
        PeerError: another process is dead, stuck or slower than ``timeout`` allows. The group is of no use afterwards.
        InvalidArgument: also if processes were asked different things, on all of them alike.
        Unsupported: parts that cannot be combined; the message says what would work.
    """
    link = Link(group, timeout)
    try:
        made, chosen = _planned(
            query, key, value, kernel, normalizer, structure, scale, sharding, exchange, backend, link
        )
    except MercerError as refusal:  # told to the others, who would wait for this process
        agree(link, {}, str(refusal), query.device if isinstance(query, Tensor) else torch.device("cpu"))
        raise
    agree(link, _facts(made, chosen, overlap, link), None, query.device)
    with torch.autocast(query.device.type, enabled=False):  # sums are float32 or float64, whatever surrounds the call
        if chosen.exchange == "ring":
            return ring_rows(made, link, chosen.backend, overlap)
        return state_rows(made, link, backend)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sharding: Sharding,
    rank: int = 0,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    exchange: str = "auto",
    backend: str = "auto",
) -> Plan:
    """How :func:`attention` would compute the same arguments, and what every process would send. Sends nothing.

    Only shapes and dtypes of query, key and value are read; they are those of process ``rank``.
    """
    return _planned(query, key, value, kernel, normalizer, structure, scale, sharding, exchange, backend, rank)[1]


def gather(x: Tensor, sharding: Sharding, *, dim: int = 2, group: Any = None, timeout: float = 300.0) -> Tensor:
    """The whole tensor on every process, from each one's part of ``size`` tokens in dimension ``dim``.

    For looking at results: the tensor is cut from the graph. Every process of the group has to call it.
    """
    link = Link(group, timeout)
    _fits(sharding, link)
    if x.shape[dim] != sharding.size(link.rank):
        raise InvalidArgument(
            f"gather: dimension {dim} has {x.shape[dim]} entries, but process {link.rank} holds "
            f"{sharding.size(link.rank)} tokens."
        )
    return sums.gather(x, sharding, link, dim)


def _fits(sharding: Sharding, link: Link) -> None:
    if not isinstance(sharding, Sharding):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"sharding must be a Sharding(length, processes), not {sharding!r}.")
    if sharding.processes != link.size:
        raise InvalidArgument(f"{sharding} is for {sharding.processes} processes, but the group has {link.size}.")


def _planned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | None,
    normalizer: Normalizer | None,
    structure: Structure | None,
    scale: float | None,
    sharding: Sharding,
    exchange: str,
    backend: str,
    place: Link | int,
) -> tuple[Request, Plan]:
    if isinstance(place, Link):
        _fits(sharding, place)
    rank = place.rank if isinstance(place, Link) else place
    made = request(query, key, value, kernel, normalizer, structure, scale, sharding, rank)
    return made, choose(made, exchange, backend)


def _facts(made: Request, chosen: Plan, overlap: bool, link: Link) -> dict[str, str]:
    """What has to be the same on every process."""
    tensors = {"query": made.query, "key": made.key, "value": made.value}
    shapes = {
        name: f"[{x.shape[0]}, {x.shape[1]}, tokens, {x.shape[3]}] {x.dtype} on {x.device.type}"
        for name, x in tensors.items()
    }
    return shapes | {
        "kernel": str(made.kernel),
        "normalizer": str(made.normalizer),
        "structure": describe(made.merged),
        "scale": str(made.given_scale),
        "sharding": str(made.sharding),
        "exchange": f"{chosen.exchange} by {chosen.backend}",
        "overlap": str(overlap),
        "a gradient": "wanted" if made.wants_gradient else "not wanted",
        "the call's number": str(link.call),
    }
