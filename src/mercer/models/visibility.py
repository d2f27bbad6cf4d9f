"""Who sees whom in the layers of a causal language model: from the names in its configuration to structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mercer.core.structures import Structure


def as_names(value: Any) -> Any:
    """A structure, or several, given by name or as a value, as the names that are saved."""
    from mercer.core.structure_names import parse_structure, structure_name
    from mercer.core.structures import Structure

    if isinstance(value, list | tuple):
        return tuple(map(as_names, value))
    if isinstance(value, str):
        value = parse_structure(value)
    return structure_name(value) if isinstance(value, Structure) else value


def causal_structure(name: str, window: int | None = None) -> Structure:
    """What a token sees: of itself and what came before, the last ``window`` tokens (None: all), and of those what the
    structure of this name shows.

    Raises:
        InvalidArgument: the name is unknown.
    """
    from mercer.core.structure_names import causal, parse_structure
    from mercer.core.structures import Window

    found = causal(parse_structure(name))
    return found if window is None else found & Window.last(window)


def ending(structure: Structure) -> str | None:
    """Why a state cannot continue a structure, as the predicate of a sentence; None if one can."""
    from mercer.core.merged import merge

    return next((pattern.ends for pattern in merge(structure).patterns if pattern.ends is not None), None)


def check_structures(
    attentions: Sequence[str], structures: Sequence[str], window: int | None, query_heads: int
) -> None:
    """Refuse layers whose attention cannot be computed under their structure, or that have more heads than it.

    Raises:
        ValueError: in one sentence.
    """
    from mercer.core.bigbird import RandomBlocks
    from mercer.core.merged import merge
    from mercer.core.names import parse_attention
    from mercer.core.structures import intersection
    from mercer.core.support import unsupported
    from mercer.mixers.names import is_mixer

    for attention, name in dict.fromkeys(zip(attentions, structures, strict=True)):
        if is_mixer(attention):
            continue
        structure = causal_structure(name, window)
        reason = unsupported(*parse_attention(attention), merge(structure), "chunked", "pairs")
        if reason is not None:
            under = f"window {window}" if name == "causal" else f"structure {name!r}"
            raise ValueError(f"attention {attention!r} under {under}: {reason}")
        for pattern in (p for together in intersection(structure.parts) for p in together):
            if isinstance(pattern, RandomBlocks) and pattern.heads is not None and pattern.heads != query_heads:
                raise ValueError(f"structure {name!r} is for {pattern.heads} heads, but the model has {query_heads}")
