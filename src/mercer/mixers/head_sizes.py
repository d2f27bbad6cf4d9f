"""Channels of a head, from those of a model and a factor."""

from __future__ import annotations

from mercer.errors import InvalidArgument


def head_size(mixer: str, what: str, dim: int, expand: float, heads: int) -> int:
    """expand dim / heads, which must be a whole number of 1 or more.

    Raises:
        InvalidArgument: it is none.
    """
    if heads < 1:
        raise InvalidArgument(f"{mixer} needs at least 1 head, not {heads}")
    size = expand * dim / heads
    if size != int(size) or size < 1:
        raise InvalidArgument(
            f"{mixer} needs a whole number of {what} channels in each head: {expand:g} * {dim} / {heads} heads is "
            f"{size:g}"
        )
    return int(size)
