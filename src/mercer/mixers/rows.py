"""Sequences as rows whose real tokens come first: what padding and packed documents are to a recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.core.structures import Documents
from mercer.errors import InvalidArgument


@dataclass(frozen=True)
class Rows:
    """Some sequences of a batch [B, L], laid out as rows of one width.

    entries: int64 [R], which sequence each row is: b, or with documents b N + d.
    index: int64 [R, W], places in the B L tokens; only the first `lengths` of each row are meant.
    lengths: int64 [R], real tokens of each row.
    whole: whether index has each of the B L places once, so that no tensor has to be read to write them all.
    """

    entries: Tensor
    index: Tensor
    lengths: Tensor
    whole: bool = False

    @property
    def real(self) -> Tensor:
        """bool [R, W]."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.lengths.unsqueeze(1)

    def gather(self, x: Tensor) -> Tensor:
        """[B, L, C] -> [R, W, C], zeros where nothing is."""
        rows = x.flatten(0, 1)[self.index.flatten()].view(*self.index.shape, x.shape[-1])
        return rows.masked_fill(~self.real.unsqueeze(-1), 0)

    def put(self, out: Tensor, rows: Tensor) -> Tensor:
        """out [B L, C] with the real tokens of rows [R, W, C] in their places."""
        if self.whole:
            return out.index_copy(0, self.index.flatten(), rows.masked_fill(~self.real.unsqueeze(-1), 0).flatten(0, 1))
        keep = self.real.flatten()
        return out.index_copy(0, self.index.flatten()[keep], rows.flatten(0, 1)[keep])


def lay_out(
    batch: int, length: int, padding: Tensor | None, documents: Documents | None, device: torch.device
) -> tuple[int, list[Rows]]:
    """How many sequences a batch is, and their layout: all in one, or documents of similar length together, so that
    none is padded to more than twice its length.

    padding: bool [B, L], True for real tokens, in any document.
    """
    if padding is not None and (padding.shape != (batch, length) or padding.dtype != torch.bool):
        raise InvalidArgument(
            f"padding must be a bool tensor of shape [{batch}, {length}], got {padding.dtype} of shape "
            f"{list(padding.shape)}"
        )
    bounds = [0, length] if documents is None else documents.bounds(length)
    edges = torch.tensor(bounds, device=device)
    sizes = edges.diff()
    if documents is None:
        number = torch.zeros(length, dtype=torch.int64, device=device)
    else:
        number = torch.arange(len(sizes), device=device).repeat_interleave(sizes)  # the document of each token
    absent = torch.zeros(batch, length, dtype=torch.int64, device=device) if padding is None else (~padding).long()
    order = torch.argsort(2 * number + absent, dim=1, stable=True)  # by document, real tokens first
    counts = torch.zeros(batch, len(sizes), dtype=torch.int64, device=device)
    counts.scatter_add_(1, number.expand(batch, -1), 1 - absent)
    order = order + torch.arange(batch, device=device).unsqueeze(1) * length
    return batch * len(sizes), list(_groups(order.flatten(), counts, edges[:-1], length))


def _groups(order: Tensor, counts: Tensor, starts: Tensor, length: int) -> Iterator[Rows]:
    """Rows of similar length, those of one group together."""
    batch, documents = counts.shape
    first = (torch.arange(batch, device=starts.device).unsqueeze(1) * length + starts).flatten()
    lengths = counts.flatten()
    if documents == 1:
        chosen = [torch.arange(batch, device=starts.device)]
    else:
        classes = [n.bit_length() for n in lengths.tolist()]
        kinds = torch.tensor(classes, device=starts.device)
        chosen = [(kinds == kind).nonzero().squeeze(-1) for kind in sorted(set(classes))]
    for entries in chosen:
        own = lengths[entries]
        whole = torch.compiler.is_compiling() and documents == 1 and length > 0  # a graph's sizes depend on no values
        most = length if whole else int(own.max()) if len(entries) else 0
        width = max(most, 1)  # an empty sequence is a row of nothing
        places = first[entries].unsqueeze(1) + torch.arange(width, device=starts.device)
        index = order[places.clamp_max(max(order.numel() - 1, 0))] if order.numel() else torch.zeros_like(places)
        yield Rows(entries, index, own, whole)
