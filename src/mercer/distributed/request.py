"""What one process asks for: the arguments of a call, checked, with everything that the two exchanges share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mercer.core.kernels import Exp, Kernel
from mercer.core.log_weights import Decay
from mercer.core.merged import Merged, merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.structures import Both, Full, Padding, Structure, Window
from mercer.distributed.sharding import Sharding
from mercer.errors import InvalidArgument, NonFinite, Unsupported

KNOWN = {"left", "right", "patterns", "padding", "documents", "alibi", "relative", "decay"}
"""The parts of a merged structure that this package knows of."""


@dataclass(frozen=True, eq=False)
class Request:
    """A process's part of a call: its own tokens, and a structure over the whole sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    kernel: Kernel
    normalizer: Normalizer
    merged: Merged
    given_scale: float | None
    sharding: Sharding
    rank: int

    @property
    def scale(self) -> float:
        """The factor on the inner product: the kernel's own unless one was given."""
        return self.kernel.default_scale(self.query.shape[-1]) if self.given_scale is None else self.given_scale

    @property
    def precision(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def slopes(self) -> Tensor | None:
        """Slopes of the distance ``[Hq]``, or log-weights by distance ``[Hq, n]``, as a layout takes them."""
        if self.merged.relative is None:
            return None if self.merged.alibi is None else self.merged.alibi.slopes
        table = self.merged.relative.table
        return table.to(torch.promote_types(table.dtype, torch.float32))

    @property
    def keeps_keys(self) -> bool:
        """Whether the kernel does nothing to keys before the product, so that they travel in their own dtype."""
        kind = type(self.kernel)
        return kind.map_key is Kernel.map_key and kind.scaled_key is Kernel.scaled_key

    @property
    def wants_gradient(self) -> bool:
        """Whether a backward pass may come, in which every process has to take part."""
        tensors = [self.query, self.key, self.value, *self.kernel.tensors().values()]
        if self.slopes is not None:
            tensors.append(self.slopes)
        if self.merged.decay is not None:
            tensors += [x for x in (self.merged.decay.rate, self.merged.decay.log_rate) if x is not None]
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def local(self, tokens: slice, valid: Tensor | None) -> Structure:
        """The structure for some of this process's tokens, as if they were all; documents left out.

        Args:
            tokens: which of them.
            valid: which of all of this process's tokens are real, ``[B, size]``, or None.
        """
        merged = self.merged
        parts: list[Structure] = [Window(merged.left, merged.right)]
        if valid is not None and merged.padding is not None:
            queries = merged.padding.queries
            parts.append(Padding(valid[:, tokens], queries=None if queries is None else queries[:, tokens]))
        parts += [part for part in (merged.alibi, merged.relative) if part is not None]
        if merged.decay is not None:
            parts.append(_rates(merged.decay, lambda x: x[..., tokens]))
        return Both(tuple(parts))


def request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | None,
    normalizer: Normalizer | None,
    structure: Structure | None,
    scale: float | None,
    sharding: Sharding,
    rank: int,
) -> Request:
    """Check what belongs to several processes; the rest is checked by :func:`mercer.plan` of a process's own part."""
    if not isinstance(sharding, Sharding):
        raise InvalidArgument(f"sharding must be a Sharding(length, processes), not {sharding!r}.")
    for name, part, kind in (("kernel", kernel, Kernel), ("normalizer", normalizer, Normalizer)):
        if part is not None and not isinstance(part, kind):
            raise InvalidArgument(f"{name} must be a {name} object, not {part!r}.")
    if structure is not None and not isinstance(structure, Structure):
        raise InvalidArgument(f"structure must be a structure object, not {structure!r}.")
    merged = merge(Full() if structure is None else structure)
    for part in merged.pairwise:
        raise Unsupported(
            f"{part} is not computed over several processes: say it by position, as Visible(function) does, or "
            "with Causal, Window, Alibi or Decay."
        )
    made = Request(
        query,
        key,
        value,
        Exp() if kernel is None else kernel,
        Sum() if normalizer is None else normalizer,
        merged,
        scale,
        sharding,
        rank,
    )
    size = sharding.size(rank)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise InvalidArgument(f"{name} must be a tensor [B, H, tokens, D], four dimensions.")
        if x.shape[2] != size:
            raise InvalidArgument(
                f"{name} has {x.shape[2]} tokens, but process {rank} holds {size} of the {sharding.length} tokens of "
                f"{sharding}: queries, keys and values are the same tokens, cut by sharding.shard(x, rank)."
            )
    if isinstance(made.kernel, Mixed):
        raise Unsupported(f"{made.kernel} is not computed over several processes: use one of its two kernels.")
    for part in fields(merged):
        if part.name not in KNOWN and getattr(merged, part.name):
            raise Unsupported(
                f"{getattr(merged, part.name)} is not computed over several processes: leave it out, or use one."
            )
    if merged.patterns and merged.padding is not None:
        raise Unsupported(
            f"{merged.patterns[0]} with Padding is not computed over several processes: leave the padding out, or pack "
            "sequences as Documents."
        )
    _padding(made, size)
    decay = merged.decay
    if decay is not None and decay.per_token and decay.logs().shape[::2] != (query.shape[0], size):
        raise InvalidArgument(
            f"Decay: rates per token are those of a process's own tokens, [{query.shape[0]}, heads, {size}], not "
            f"{list(decay.logs().shape)}."
        )
    if merged.documents is not None:
        merged.documents.bounds(sharding.length)
    made.normalizer.check(query.shape[0], query.shape[1], size, value.shape[-1])
    return made


def _padding(made: Request, size: int) -> None:
    padding, batch = made.merged.padding, made.query.shape[0]
    if padding is None:
        return
    for name, x in (("mask", padding.mask), ("queries", padding.queries)):
        if x is not None and x.shape != (batch, size):
            raise InvalidArgument(
                f"Padding: {name} has one entry for each of a process's own tokens, [{batch}, {size}], not "
                f"{list(x.shape)}."
            )
    lengths = padding.lengths
    if lengths is None:
        return
    if lengths.shape != (batch,):
        raise InvalidArgument(f"Padding: lengths must have one entry per batch row, [{batch}], not {lengths.shape}.")
    if bool(((lengths < 0) | (lengths > made.sharding.length)).any()):
        raise InvalidArgument(
            f"Padding: lengths are those of the whole sequence, between 0 and {made.sharding.length} tokens."
        )


def shard_structure(structure: Structure, sharding: Sharding, rank: int) -> Structure:
    """A structure of the whole sequence with what has an entry per token cut for one process.

    Those are the mask and queries of ``Padding`` and rates of ``Decay`` per token; offsets of documents, lengths,
    slopes and rates per head are given whole to every process. Differentiable.
    """
    parts: list[Structure] = []
    for part in structure.parts:
        if isinstance(part, Padding):
            cut = {
                name: None if x is None else sharding.shard(x, rank, 1)
                for name, x in (("mask", part.mask), ("queries", part.queries))
            }
            parts.append(Padding(lengths=part.lengths, **cut))
        elif isinstance(part, Decay) and part.per_token:
            parts.append(_rates(part, lambda x: sharding.shard(x, rank, -1)))
        else:
            parts.append(part)
    return Both(tuple(parts))


def _rates(decay: Decay, select: Callable[[Tensor], Tensor]) -> Decay:
    """A decay with its rates per token selected."""
    if not decay.per_token:
        return decay
    rate, log_rate = (None if x is None else select(x) for x in (decay.rate, decay.log_rate))
    return Decay(rate=rate, log_rate=log_rate, complement=decay.complement)


def finish(
    made: Request, numerator: Tensor, denominator: Tensor | None, log_factor: Tensor | None, query_valid: Tensor | None
) -> Tensor:
    """The output from the rows of a ring: normalised, 0 where a query is not real, in the dtype of the queries."""

    def blank(x: Tensor) -> Tensor:
        if query_valid is None:
            return x
        hidden = ~query_valid.unsqueeze(1)
        return x.masked_fill(hidden if x.dim() == 3 else hidden.unsqueeze(-1), 0)

    normalizer = made.normalizer.map_tokens(blank)
    if log_factor is None or normalizer.scale_invariant:
        out = normalizer.apply(numerator, denominator)
    else:
        out = normalizer.apply_factored(numerator, denominator, log_factor)
    out = blank(out).to(made.query.dtype)
    if out.device.type == "cpu" and not math.isfinite(out.detach().sum().item()):
        given = (made.query, made.key, made.value)
        if all(bool(torch.isfinite(x).all()) for x in given) and not bool(torch.isfinite(out).all()):
            raise NonFinite(
                f"{made.kernel} with {made.normalizer} left the range of {out.dtype} or of its sums on process "
                f"{made.rank}, though all inputs are finite: use a smaller scale, a lower order, or a scale-invariant "
                "normaliser."
            )
    return out
