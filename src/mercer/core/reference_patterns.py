"""What patterns show, pair by pair and from their definitions alone: the specification of mercer.core.patterns."""

from __future__ import annotations

import math

import torch

from mercer.core.bigbird import BigBird, EndBlocks, RandomBlocks
from mercer.core.patterns import Blocks, Columns, Fixed, Global, Longformer, Prefix, PrefixLM, Strided, Visible
from mercer.core.structures import Both, Causal, Either, Full, Structure, Window
from mercer.errors import Unsupported


def literally_shown(
    part: Structure, query: int, key: int, total: int, row: int, head: int, tokens: tuple[int, int]
) -> bool:
    """Whether a pattern shows the key at one position to the query at another.

    Args:
        part: the pattern.
        query, key: positions.
        total: real tokens in all of the sequence.
        row, head: batch row and query head.
        tokens: the places of query and key among the keys' tokens, padding counted, for patterns that mark tokens.
    """
    back = query - key
    match part:
        case Full():
            return True
        case Causal():
            return back >= 0
        case Window(left, right, dilation):
            near = (left is None or back <= left * dilation) and (right is None or -back <= right * dilation)
            return near and back % dilation == 0
        case Blocks(size, before, after):
            return -before <= key // size - query // size <= after
        case Columns(size, columns):
            return key % size in range(size - columns, size)
        case Strided(stride):
            return back >= 0 and (back < stride or back % stride == 0)
        case Fixed(size, columns):
            return back >= 0 and (query // size == key // size or key % size >= size - columns)
        case Prefix(length) | PrefixLM(length):
            limit = int(length[row]) if isinstance(length, torch.Tensor) else length
            return key < limit or (isinstance(part, PrefixLM) and back >= 0)
        case Longformer():
            near = abs(back) <= part.window // 2
            marked = part.mask is not None or len(part.positions) > 0
            return near or (
                marked and literally_shown(Global(part.positions, part.mask), query, key, total, row, head, tokens)
            )
        case Global():
            if part.mask is None:
                return (part.seen and key in part.positions) or (part.see and query in part.positions)
            of_query, of_key = (t >= 0 and bool(part.mask[row, t]) for t in tokens)
            return (part.seen and of_key) or (part.see and of_query)
        case RandomBlocks(size):
            if query < 0:
                return False
            length = query + 1 if part.causal else total
            drawn = part.table(length)[head if part.heads is not None else 0, query // size]
            return key // size in drawn and (back >= 0 or not part.causal)
        case EndBlocks(size, keys):
            return (key if keys else query) // size in (0, (total - 1) // size)
        case BigBird(size):
            blocks = (query // size, key // size)
            if part.causal and back < 0:
                return False
            ends = {0} if part.causal else {0, (total - 1) // size}
            if abs(blocks[0] - blocks[1]) <= 1 or ends & set(blocks):
                return True
            drawn = RandomBlocks(size, max(part.random, 1), part.seed, part.heads, apart=True, causal=part.causal)
            return (
                bool(part.random)
                and not part.hf_compat
                and literally_shown(drawn, query, key, total, row, head, tokens)
            )
        case Visible(function):
            at = [torch.tensor(x).view(1, 1, 1, 1) for x in (row, head, query, key)]
            return bool(function(*at))
        case Either(members):
            return any(literally_shown(m, query, key, total, row, head, tokens) for m in members)
        case Both(members):
            return all(literally_shown(m, query, key, total, row, head, tokens) for m in members)
        case _:
            raise Unsupported(f"The reference does not know {type(part).__name__}.")


def literal_weight(part: BigBird, query: int, key: int, total: int) -> float:
    """The logarithm of how often a pair counts: the hub's evaluation draws block 0 for every random block."""
    inner = 0 < query // part.size < (total - 1) // part.size
    return math.log(1 + part.random) if inner and key // part.size == 0 else 0.0
