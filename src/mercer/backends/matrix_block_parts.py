"""A block of 16 tokens of the matrix recurrence: what both directions make of its rows before they touch a state.

With w = exp(g), E_t the product of w over the block's tokens before t, channel by channel, D_tj that over those
between j and t, and the reads x of q' (q w, or q where there is a bonus) and b,

    x_t^T S_{t-1} = (x_t E_t)^T S_0 + sum_{j<t} (x_t D_tj . k_j) v_j + (x_t D_tj . a_j) r_j,      r_t = b_t^T S_{t-1}

so that a block is a product of its reads with the state, a triangular system for what is removed and a product of its
pairs with values; and the state after it is diag(E_16) S_0 + sum_j (k_j D_16j) v_j^T + (a_j D_16j) r_j^T. Decays are
multiplied one by one, never divided by: every factor is at most 1, whatever fades, and nothing overflows.
"""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.matrix_block_vectors import (
    after,
    after_turned,
    pairs1,
    pairs1_removing,
    pairs2,
    pairs2_removing,
    pairs4,
    pairs4_removing,
    product1,
    product1_onto,
    product2,
    product2_onto,
    product4,
    product4_onto,
    rows_of,
    solve,
)
from mercer.backends.matrix_scan_parts import lanes_of, pack_some, unpack_some, widest
from mercer.backends.matrix_scan_table import ADDRESS, BONUS, CHANNELS, HALF, KEY, LOG, PART, QUERY, SLICE, TOKEN, A, B
from mercer.backends.matrix_scan_vectors import total
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    exp,
    fma,
    get,
    lane_sums,
    load,
    load_row,
    mul,
    prefetch,
    put,
    splat,
    store,
)
from mercer.backends.polynomial_blocks import locate, padded

F = np.float32
BLOCK = LANES
"""Tokens of a block: one for every lane."""
ROWS1, ROWS2, ROWS4 = rows_of(1), rows_of(2), rows_of(4)
PITCH = 4 * SLICE
"""Bytes of a row of a slice's columns."""

# What a block is made of: kinds of rows of channels, of `16 each` bytes a kind, and after them the rest.
DECAY, READ, PUSH, TAKE, SEEK, READ_FROM, SEEK_FROM, PUSH_TO, TAKE_TO, FADED, ASKED = range(11)
"""w, q', k, a, b; q' E, b E; k and a until the end; E; q with the scale."""
KINDS = 11
READ_PUSH, READ_TAKE, SEEK_PUSH, SEEK_TAKE = range(4)
"""Pairs, [j][t]: q' with k and a, and the own products on the diagonal; b with k and a."""


@njit
def block_room(each: int) -> int:
    """Bytes of a block: rows, E at the end and ones, pairs, own products."""
    return (KINDS * BLOCK + 2) * each + ROW + 4 * TILE + 2 * ROW


@njit
def kind(block: int, each: int, which: int) -> int:
    """Where its rows of a kind are."""
    return block + which * BLOCK * each


@njit
def faded(block: int, each: int) -> int:
    """E after its last token."""
    return block + KINDS * BLOCK * each


@njit
def ones(block: int, each: int) -> int:
    """As many ones as there are channels, and 32 at least."""
    return faded(block, each) + each


@njit
def pairs_of(block: int, each: int, which: int) -> int:
    """A matrix of pairs."""
    return faded(block, each) + 2 * each + ROW + which * TILE


# Products


@njit
def multiply(
    vectors: int, left: int, row: int, inner: int, rows: int, right: int, step: int, count: int, out: int, pitch: int
) -> None:
    """out[r] = sum_i left[r][i] right[i], i < count, for so many rows r of 1, 2 or 4 vectors."""
    if vectors == 4:
        for r in range(0, rows, ROWS4):
            product4(left + r * row, row, inner, right, step, count, out + r * pitch, pitch)
    elif vectors == 2:
        for r in range(0, rows, ROWS2):
            product2(left + r * row, row, inner, right, step, count, out + r * pitch, pitch)
    else:
        for r in range(0, rows, ROWS1):
            product1(left + r * row, row, inner, right, step, count, out + r * pitch, pitch)


@njit
def multiply_onto(
    vectors: int, left: int, row: int, inner: int, rows: int, right: int, step: int, count: int, out: int, pitch: int,
    source: int, scale: int,
) -> None:  # fmt: skip
    """out[r] = scale[r] source[r] + sum_i left[r][i] right[i]; source's rows are `pitch` apart as well."""
    if vectors == 4:
        for r in range(0, rows, ROWS4):
            x, s = r * pitch, scale + 4 * r
            product4_onto(left + r * row, row, inner, right, step, count, out + x, pitch, source + x, s)
    elif vectors == 2:
        for r in range(0, rows, ROWS2):
            x, s = r * pitch, scale + 4 * r
            product2_onto(left + r * row, row, inner, right, step, count, out + x, pitch, source + x, s)
    else:
        for r in range(0, rows, ROWS1):
            x, s = r * pitch, scale + 4 * r
            product1_onto(left + r * row, row, inner, right, step, count, out + x, pitch, source + x, s)


# Preparation


@njit
def fill(at: int, size: int, x: Any) -> None:
    """Vectors of x over some bytes."""
    for c in range(0, size, ROW):
        store(at + c, x)


@njit
def ask(at: int, size: int) -> None:
    """Ask memory for a row: a block is a page of a tensor often, and processors look no page ahead."""
    for c in range(0, size, ROW):
        prefetch(at + c)


@njit
def ask_rows(tensors: Any, which: int, b: int, h: int, t: int, dim: int) -> None:
    """Ask memory for a block's rows of a tensor, if it is there."""
    if tensors[which, ADDRESS] != 0:
        at, stride, size = locate(tensors, which, b, h, t), tensors[which, TOKEN], 2 if tensors[which, HALF] else 4
        for i in range(BLOCK):
            ask(at + i * stride, dim * size)


@njit
def prepare(
    tensors: Any, sizes: Any, scale: float, b: int, h: int, t: int, tokens: int, dim: int, deep: int, block: int,
    tiles: int, ahead: int,
) -> None:  # fmt: skip
    """All of a block that knows of no value and no state. Tokens that are not there decay, push and read nothing.

    tiles: scratch of 4 TILE; ahead: tokens from here to those that are read next, which memory is asked for now.
    """
    each = 4 * deep
    removes = tensors[A, ADDRESS] != 0
    fill(ones(block, each), each + ROW, splat(F(1)))
    pack_decays(locate(tensors, LOG, b, h, t), tensors[LOG, HALF], tensors[LOG, TOKEN], tokens, sizes[CHANNELS], dim,
                block, each)  # fmt: skip
    for which, to in ((QUERY, READ), (KEY, PUSH), (A, TAKE), (B, SEEK)):
        if tensors[which, ADDRESS] != 0:
            at, half, stride = locate(tensors, which, b, h, t), tensors[which, HALF], tensors[which, TOKEN]
            pack_rows(at, half, stride, tokens, dim, kind(block, each, to), each)
    own = pairs_of(block, each, 4)
    ask_rows(tensors, QUERY, b, h, t + ahead, dim)
    meet_themselves(removes, locate(tensors, BONUS, 0, h, 0), scale, dim, block, each, own)
    ask_rows(tensors, KEY, b, h, t + ahead, dim)
    ask_rows(tensors, A, b, h, t + ahead, dim)
    fade(removes, block, each)
    ask_rows(tensors, B, b, h, t + ahead, dim)
    ask_rows(tensors, LOG, b, h, t + ahead, dim if sizes[CHANNELS] else 1)
    meet(removes, block, deep, tiles)
    for i in range(BLOCK):
        put(pairs_of(block, each, READ_PUSH) + i * (ROW + 4), get(own + 4 * i))
        if removes:
            put(pairs_of(block, each, READ_TAKE) + i * (ROW + 4), get(own + ROW + 4 * i))


@njit
def pack_rows(at: int, half: int, stride: int, tokens: int, dim: int, to: int, each: int) -> None:
    """A block's rows of a tensor in float32; 0 for tokens that are not there."""
    size = 2 if half else 4
    for i in range(tokens):
        pack_some(at + i * stride, half, dim, to + i * each, size)
    fill(to + tokens * each, (BLOCK - tokens) * each, splat(F(0)))


@njit
def unpack_rows(
    tensors: Any, which: int, part: int, b: int, h: int, t: int, tokens: int, dim: int, source: int, each: int
) -> None:
    """The way back into a part's tensor, for the tokens that are there."""
    half, stride = tensors[which, HALF], tensors[which, TOKEN]
    size = 2 if half else 4
    target = locate(tensors, which, b, h, t) + part * tensors[which, PART]
    for i in range(tokens):
        ask(target + (i - BLOCK) * stride, dim * size)
        unpack_some(source + i * each, target + i * stride, half, dim, size)


@njit
def pack_decays(at: int, half: int, stride: int, tokens: int, channels: int, dim: int, to: int, each: int) -> None:
    """w = exp(g); 1 for tokens that are not there, or where nothing fades."""
    if at == 0:
        fill(to, BLOCK * each, splat(F(1)))
    elif channels:
        pack_rows(at, half, stride, tokens, dim, to, each)
        for c in range(0, BLOCK * each, ROW):
            store(to + c, exp(load(to + c)))
    else:
        for i in range(BLOCK):
            x = exp(splat(total(load_row(at + i * stride, half, 1)))) if i < tokens else splat(F(1))
            fill(to + i * each, each, x)


@njit
def meet_themselves(removes: bool, bonus: int, scale: float, dim: int, block: int, each: int, own: int) -> None:
    """q' and q with the scale, of q; and what every token's query gives its own k (u k), and its a, at `own`."""
    factor, second = splat(F(scale)), own + ROW
    for t in range(BLOCK):
        mine = taken = splat(F(0))
        for c in range(0, each, ROW):
            at = block + t * each + c
            q, k = mul(factor, load(kind(at, each, READ))), load(kind(at, each, PUSH))
            store(kind(at, each, ASKED), q)
            if bonus:
                k = mul(k, load_row(bonus + c, 0, dim - c // 4))
            mine = fma(q, k, mine)
            if not bonus:
                if removes:
                    taken = fma(q, load(kind(at, each, TAKE)), taken)
                q = mul(q, load(at))
            store(kind(at, each, READ), q)
        put(own + 4 * t, total(mine))
        put(second + 4 * t, total(taken))


@njit
def fade(removes: bool, block: int, each: int) -> None:
    """E, q' E, b E, and E at the end."""
    for c in range(0, each, ROW):
        e = splat(F(1))
        for t in range(c, c + BLOCK * each, each):
            store(kind(block, each, FADED) + t, e)
            store(kind(block, each, READ_FROM) + t, mul(e, load(kind(block, each, READ) + t)))
            if removes:
                store(kind(block, each, SEEK_FROM) + t, mul(e, load(kind(block, each, SEEK) + t)))
            e = mul(e, load(block + t))
        store(faded(block, each) + c, e)


@njit
def meet(removes: bool, block: int, deep: int, tiles: int) -> None:
    """The pairs of all tokens, and k and a until the end.

    Token j's pairs are with those after it, token 15 - j's with the others: both share a tile, the latter from its last
    row on backward.
    """
    each = 4 * deep
    first, matrices = pairs_of(block, each, 0), 4 if removes else 1
    for j in range(BLOCK // 2):
        meet_later(removes, block, deep, j, tiles + j * ROW, ROW)
        other = BLOCK - 1 - j
        meet_later(removes, block, deep, other, tiles + (j - 1) * ROW, -ROW)
        for n in range(matrices):
            to = first + (n % 2 * 2 + n // 2) * TILE  # tiles: k with q' and b, then a with both
            store(tiles + n * TILE + (BLOCK - 1) * ROW, splat(F(0)))
            s = lane_sums(tiles + n * TILE, splat(F(1)))
            after(to + j * ROW, s, j)
            after_turned(to + other * ROW, s, other)


@njit
def meet_later(removes: bool, block: int, deep: int, j: int, tile: int, step: int) -> None:
    """The pairs of token j with those after it, in lanes, `step` bytes from one to the next."""
    each, vectors = 4 * deep, deep // LANES
    apart, count = BLOCK * each, BLOCK - 1 - j
    c = 0
    while c < vectors:
        wide, x = widest(vectors - c), j * each + c * ROW
        own, end, at = kind(block, each, PUSH) + x, kind(block, each, PUSH_TO) + x, block + x + each
        if count == 0:
            for i in range(0, wide * ROW, ROW):
                store(end + i, load(own + i))
                if removes:
                    store(end + apart + i, load(own + apart + i))
        elif removes:
            if wide == 4:
                pairs4_removing(at, apart, each, count, own, end, tile, step, c)
            elif wide == 2:
                pairs2_removing(at, apart, each, count, own, end, tile, step, c)
            else:
                pairs1_removing(at, apart, each, count, own, end, tile, step, c)
        elif wide == 4:
            pairs4(at, apart, each, count, own, end, tile, step, c)
        elif wide == 2:
            pairs2(at, apart, each, count, own, end, tile, step, c)
        else:
            pairs1(at, apart, each, count, own, end, tile, step, c)
        c += wide


# Columns


@njit
def pack_columns(
    tensors: Any, which: int, b: int, h: int, t: int, tokens: int, first: int, columns: int, to: int,
    ahead: int,
) -> None:  # fmt: skip
    """Some columns of a block's rows of a tensor, PITCH apart; 0 for tokens and columns that are not there."""
    half, stride = tensors[which, HALF], tensors[which, TOKEN]
    size = 2 if half else 4
    source = locate(tensors, which, b, h, t) + first * size
    bytes_there, bytes_all = 4 * padded(columns), lanes_of(columns) * ROW
    for i in range(tokens):
        at = to + i * PITCH
        ask(source + (i + ahead) * stride, columns * size)
        pack_some(source + i * stride, half, columns, at, size)
        fill(at + bytes_there, bytes_all - bytes_there, splat(F(0)))
    for i in range(tokens, BLOCK):
        fill(to + i * PITCH, bytes_all, splat(F(0)))


@njit
def unpack_columns(
    tensors: Any, which: int, b: int, h: int, t: int, tokens: int, first: int, columns: int, source: int,
    ahead: int,
) -> None:  # fmt: skip
    """The way back, for the tokens that are there."""
    half, stride = tensors[which, HALF], tensors[which, TOKEN]
    size = 2 if half else 4
    target = locate(tensors, which, b, h, t) + first * size
    for i in range(tokens):
        ask(target + (i + ahead) * stride, columns * size)
        unpack_some(source + i * PITCH, target + i * stride, half, columns, size)


@njit
def remove(block: int, deep: int, vectors: int, state: int, values: int) -> None:
    """What a block's tokens remove, r, 16 rows behind the values."""
    each, removed = 4 * deep, values + BLOCK * PITCH
    multiply(vectors, kind(block, each, SEEK_FROM), each, 4, BLOCK, state, PITCH, deep, removed, PITCH)
    pairs, one = pairs_of(block, each, SEEK_PUSH), ones(block, each)
    multiply_onto(vectors, pairs, 4, ROW, BLOCK, values, PITCH, BLOCK, removed, PITCH, removed, one)
    for c in range(0, vectors * ROW, ROW):
        solve(removed + c, PITCH, pairs_of(block, each, SEEK_TAKE))


@njit
def advance(removes: bool, block: int, deep: int, vectors: int, state: int, after: int, values: int) -> None:
    """The state after a block of the one before it."""
    each, written = 4 * deep, 2 * BLOCK if removes else BLOCK
    pushed = kind(block, each, PUSH_TO)
    multiply_onto(vectors, pushed, 4, each, deep, values, PITCH, written, after, PITCH, state, faded(block, each))
