"""From which length on something is cheaper."""

from __future__ import annotations

from collections.abc import Callable

LIMIT = 2**24
"""Tokens up to which a crossing is looked for: 16,777,216."""
_PER_OCTAVE = 4


def first_length(cheaper: Callable[[int], bool]) -> int | None:
    """The least n with ``cheaper(m)`` for every m from n to :data:`LIMIT`; None if it is false at the limit.

    Looked for from above in steps of a quarter of an octave, then by halving; a change of mind within one step is
    overlooked.
    """
    lengths = sorted({round(2 ** (i / _PER_OCTAVE)) for i in range(LIMIT.bit_length() * _PER_OCTAVE)} | {LIMIT})
    high = None
    for low in reversed([n for n in lengths if n <= LIMIT]):
        if cheaper(low):
            high = low
            continue
        if high is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if cheaper(middle) else (middle, high)
        return high
    return high
