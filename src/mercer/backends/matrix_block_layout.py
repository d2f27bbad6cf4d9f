"""What is known of a block of the matrix recurrence, and where in scratch it is."""

from typing import Any

from numba import njit

from mercer.backends.microkernels import I64, LANES, ROW, TILE, _primitive, address, whole

BLOCK = LANES
"""Tokens of a block: one for every lane."""

# What a block is made of: kinds of rows of channels, of `16 each` bytes a kind, and after them the rest.
DECAY, READ, PUSH, TAKE, SEEK, READ_FROM, SEEK_FROM, PUSH_TO, TAKE_TO, FADED, ASKED = range(11)
"""w, q', k, a, b; q' E, b E; k and a until the end; E; q with the scale."""
KINDS = 11
READ_PUSH, READ_TAKE, SEEK_PUSH, SEEK_TAKE = range(4)
"""Pairs, [j][t]: q' with k and a, and the own products on the diagonal; b with k and a."""


@_primitive(whole, address, whole, whole)
def kind(b: Any, block: Any, each: Any, which: Any) -> Any:
    """Where a block's rows of a kind are."""
    return b.add(block, b.mul(which, b.mul(each, I64(BLOCK))))


@_primitive(whole, address, whole)
def faded(b: Any, block: Any, each: Any) -> Any:
    """E after its last token."""
    return b.add(block, b.mul(each, I64(KINDS * BLOCK)))


@_primitive(whole, address, whole)
def ones(b: Any, block: Any, each: Any) -> Any:
    """As many ones as there are channels, and 16 more."""
    return b.add(block, b.mul(each, I64(KINDS * BLOCK + 1)))


@_primitive(whole, address, whole, whole)
def pairs_of(b: Any, block: Any, each: Any, which: Any) -> Any:
    """A matrix of pairs."""
    first = b.add(block, b.add(b.mul(each, I64(KINDS * BLOCK + 2)), I64(ROW)))
    return b.add(first, b.mul(which, I64(TILE)))


@njit
def block_room(each: int) -> int:
    """Bytes of a block: rows, E at the end, ones, pairs, products of tokens with themselves."""
    return (KINDS * BLOCK + 2) * each + 3 * ROW + 4 * TILE
