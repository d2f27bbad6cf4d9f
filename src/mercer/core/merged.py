"""A structure's parts, merged into what the forms and the support table ask about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch.compiler import is_compiling

from mercer.core.log_weights import Alibi, Decay, RelativeBias
from mercer.core.structures import Both, Causal, Documents, Full, Padding, Pairwise, Pattern, Structure, Window
from mercer.errors import Unsupported


@dataclass(frozen=True, eq=False)
class Merged:
    """A structure's parts, merged: what the forms and the support table ask about."""

    left: int | None
    right: int | None
    padding: Padding | None
    documents: Documents | None
    alibi: Alibi | None
    decay: Decay | None
    relative: RelativeBias | None = None
    patterns: tuple[Pattern, ...] = ()
    """What is visible beside the band from ``left`` to ``right``: all of these must show a pair."""
    mask: Pairwise | None = None
    bias: Pairwise | None = None

    @property
    def pairwise(self) -> tuple[Pairwise, ...]:
        """What is said of every pair by a tensor."""
        if self.mask is self.bias is None:
            return ()
        return tuple(part for part in (self.mask, self.bias) if part is not None)

    @property
    def causal(self) -> bool:
        """Nothing after a query's own position is visible."""
        return self.right == 0

    @property
    def ordered(self) -> bool:
        """Positions matter, so queries and keys are the same tokens (self-attention)."""
        band = self.left is not None or self.right is not None
        return band or self.weighted or self.documents is not None or bool(self.patterns)

    @property
    def weighted(self) -> bool:
        """Log-weights are not all 0."""
        parts = (self.alibi, self.decay, self.relative)
        return any(p is not None for p in parts) or any(p.weighs for p in self.patterns)

    def entries(self, batch: int) -> int:
        """Batch entries of a state: one per row, or per document of each row."""
        return batch * (self.documents.offsets.numel() - 1) if self.documents is not None else batch

    def weight_heads(self, query_heads: int, key_heads: int) -> int:
        """Heads of a feature state: those of the keys, or of the queries where each of them has a decay of its own."""
        decays = 1 if self.decay is None else self.decay.heads
        return query_heads if self.alibi is not None or decays not in (1, key_heads) else key_heads

    def without_documents(self, padding: Padding) -> Structure:
        """The same structure for documents laid out as a padded batch (per-token decay must be re-laid by the
        caller).
        """
        parts: list[Structure] = [Window(self.left, self.right), padding, *self.patterns]
        parts += [p for p in (self.alibi, self.decay, self.relative) if p is not None]
        return Both(tuple(parts))


def merge(structure: Structure) -> Merged:
    """Merge a structure's parts; raises :class:`Unsupported` where they exclude each other."""
    if type(structure) in (Full, Causal, Window) and not is_compiling():
        return _merged(structure)  # remembered: every layer asks at every token, and these are values
    return _merge(structure)


def _merge(structure: Structure) -> Merged:
    left: int | None = None
    right: int | None = None
    found: dict[type, Structure] = {}
    patterns: list[Pattern] = []
    for part in structure.parts:
        if isinstance(part, Pattern):
            bands = _bands(part)
            if bands is None:
                patterns.append(part)
            for band in bands or ():
                left, right = _tighter(left, band.left), _tighter(right, band.right)
        elif isinstance(part, Padding | Documents | Alibi | Decay | RelativeBias | Pairwise):
            kind = type(part)
            if kind in found:
                raise Unsupported(f"Two {kind.__name__} in one structure: combine their tensors into one.")
            found[kind] = part
        else:
            raise Unsupported(
                f"{type(part).__name__} is not a structure that the forms know; compose the ones in "
                "mercer.core.structures, or subclass its Pattern."
            )
    padding, documents, alibi, decay, relative = (
        found.get(kind) for kind in (Padding, Documents, Alibi, Decay, RelativeBias)
    )
    if alibi is not None and relative is not None:
        raise Unsupported("Alibi together with RelativeBias: take the slopes' log-weights into the table.")
    if decay is not None and right != 0:
        raise Unsupported("Decay needs a causal structure: write Causal() & Decay(...).")
    if padding is not None and documents is not None:
        raise Unsupported(
            "Padding together with Documents: leave the padding tokens out of the packed sequence, or make them a "
            "document."
        )
    mask, bias = (
        next((p for p in found.values() if isinstance(p, Pairwise) and p.hides == h), None) for h in (True, False)
    )
    for part in (mask, bias):
        if part is not None and documents is not None:
            raise Unsupported(
                f"{type(part).__name__} together with Documents: make the boundaries of documents a part of a Mask."
            )
    if documents is not None:
        patterns = [part.in_documents() for part in patterns]
    merged = Merged(left, right, padding, documents, alibi, decay, relative, tuple(patterns), mask, bias)  # pyright: ignore[reportArgumentType]
    if merged.padding is not None and merged.padding.queries is not None and merged.ordered:
        raise Unsupported(
            "Padding's queries= is for cross-attention: under a structure that orders its tokens the queries are the "
            "last of the keys, so leave it out, and mask or lengths tell which of them are real."
        )
    return merged


_merged = lru_cache(maxsize=64)(_merge)


def _bands(pattern: Pattern) -> list[Window] | None:
    """Windows without gaps whose intersection is the pattern, none for all pairs; None if it is something else."""
    alternatives = pattern.planned().alternatives()
    if () in alternatives:
        return []
    bands = [one for one in alternatives[0] if isinstance(one, Window) and one.dilation == 1]
    return bands if len(alternatives) == 1 and len(bands) == len(alternatives[0]) else None


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
