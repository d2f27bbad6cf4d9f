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

from mercer.backends.calls import by_call
from mercer.backends.matrix_block_layout import (
    ASKED,
    BLOCK,
    FADED,
    PUSH,
    PUSH_TO,
    READ,
    READ_FROM,
    READ_PUSH,
    READ_TAKE,
    SEEK,
    SEEK_FROM,
    SEEK_PUSH,
    SEEK_TAKE,
    TAKE,
    faded,
    kind,
    ones,
    pairs_of,
)
from mercer.backends.matrix_block_vectors import (
    after,
    after_turned,
    pairs1,
    pairs1_seeking,
    pairs1_taking,
    pairs2,
    pairs2_seeking,
    pairs2_taking,
    pairs4,
    pairs4_seeking,
    pairs4_taking,
    product1,
    product1_onto,
    product2,
    product2_onto,
    product4,
    product4_onto,
    rows_of,
    solve,
)
from mercer.backends.matrix_scan_parts import (
    column,
    lanes_of,
    locate,
    note_growth,
    number,
    pack_some,
    unpack_some,
    widest,
)
from mercer.backends.matrix_scan_table import (
    ADDRESS,
    BETA,
    BONUS,
    CHANNELS,
    HALF,
    KEY,
    LOG,
    PART,
    QUERY,
    SLICE,
    TOKEN,
    A,
    B,
)
from mercer.backends.matrix_scan_vectors import total
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    above_zero,
    add,
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
from mercer.backends.polynomial_blocks import padded

F = np.float32
ROWS1, ROWS2, ROWS4 = rows_of(1), rows_of(2), rows_of(4)
PITCH = 4 * SLICE
"""Bytes of a row of a slice's columns."""

# Products


@by_call
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


@by_call
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


@by_call
def copy_lines(source: int, stride: int, rows: int, size: int, target: int, pitch: int) -> None:
    """Rows of whole vectors."""
    for i in range(rows):
        for c in range(0, size, ROW):
            store(target + i * pitch + c, load(source + i * stride + c))


@njit
def ask(at: int, size: int) -> None:
    """Ask memory for a row: a block is a page of a tensor often, and processors look no page ahead."""
    for c in range(0, size, ROW):
        prefetch(at + c)


@by_call
def ask_rows(tensors: int, which: int, b: int, h: int, t: int, dim: int) -> None:
    """Ask memory for a block's rows of a tensor, if it is there."""
    if column(tensors, which, ADDRESS) != 0:
        at, stride = locate(tensors, which, b, h, t), column(tensors, which, TOKEN)
        size = 2 if column(tensors, which, HALF) else 4
        for i in range(BLOCK):
            ask(at + i * stride, dim * size)


@by_call
def prepare(
    tensors: int, sizes: int, scale: float, b: int, h: int, t: int, tokens: int, dim: int, deep: int, block: int,
    tiles: int, ahead: int,
) -> None:  # fmt: skip
    """All of a block that knows of no value and no state. Tokens that are not there decay, push and read nothing.

    tiles: scratch of 4 TILE; ahead: tokens from here to those that are read next, which memory is asked for now.
    """
    each = 4 * deep
    seeks, takes = seek_and_take(tensors)
    fill(ones(block, each), each + ROW, splat(F(1)))
    pack_decays(tensors, sizes, b, h, t, tokens, dim, block, each)
    for which, to in ((QUERY, READ), (KEY, PUSH), (A, TAKE), (B, SEEK)):
        if column(tensors, which, ADDRESS) != 0:
            pack_rows(tensors, which, b, h, t, tokens, dim, kind(block, each, to), each)
    if seeks and not takes:
        pack_delta(tensors, b, h, t, tokens, block, each)
    own = pairs_of(block, each, 4)
    ask_rows(tensors, QUERY, b, h, t + ahead, dim)
    meet_themselves(takes, locate(tensors, BONUS, 0, h, 0), scale, dim, block, each, own)
    ask_rows(tensors, KEY, b, h, t + ahead, dim)
    ask_rows(tensors, A, b, h, t + ahead, dim)
    fade(seeks, block, each)
    ask_rows(tensors, B, b, h, t + ahead, dim)
    ask_rows(tensors, LOG, b, h, t + ahead, dim if number(sizes, CHANNELS) else 1)
    meet(seeks, takes, block, deep, tiles)
    for i in range(BLOCK):
        put(pairs_of(block, each, READ_PUSH) + i * (ROW + 4), get(own + 4 * i))
        if takes:
            put(pairs_of(block, each, READ_TAKE) + i * (ROW + 4), get(own + ROW + 4 * i))


@by_call
def pack_rows(tensors: int, which: int, b: int, h: int, t: int, tokens: int, dim: int, to: int, each: int) -> None:
    """A block's rows of a tensor in float32; 0 for tokens that are not there."""
    at, half, stride = locate(tensors, which, b, h, t), column(tensors, which, HALF), column(tensors, which, TOKEN)
    size = 2 if half else 4
    if half or dim % LANES:
        for i in range(tokens):
            pack_some(at + i * stride, half, dim, to + i * each, size)
    else:
        copy_lines(at, stride, tokens, 4 * dim, to, each)
    fill(to + tokens * each, (BLOCK - tokens) * each, splat(F(0)))


@by_call
def unpack_rows(
    tensors: int, which: int, part: int, b: int, h: int, t: int, tokens: int, dim: int, source: int, each: int
) -> None:
    """The way back into a part's tensor, for the tokens that are there."""
    half, stride = column(tensors, which, HALF), column(tensors, which, TOKEN)
    size = 2 if half else 4
    target = locate(tensors, which, b, h, t) + part * column(tensors, which, PART)
    if half or dim % LANES:
        for i in range(tokens):
            unpack_some(source + i * each, target + i * stride, half, dim, size)
    else:
        copy_lines(source, each, tokens, 4 * dim, target, stride)
    for i in range(-BLOCK, 0):
        ask(target + i * stride, dim * size)


@by_call
def pack_decays(tensors: int, sizes: int, b: int, h: int, t: int, tokens: int, dim: int, to: int, each: int) -> None:
    """w = exp(g); 1 for tokens that are not there, or where nothing fades."""
    if column(tensors, LOG, ADDRESS) == 0:
        fill(to, BLOCK * each, splat(F(1)))
    elif number(sizes, CHANNELS):
        pack_rows(tensors, LOG, b, h, t, tokens, dim, to, each)
        above = splat(F(0))
        for c in range(0, BLOCK * each, ROW):
            x = load(to + c)
            above = add(above, above_zero(x))
            store(to + c, exp(x))
        note_growth(sizes, above)
    else:
        for i in range(BLOCK):
            x = splat(F(0))
            if i < tokens:
                x = splat(total(load_row(locate(tensors, LOG, b, h, t + i), column(tensors, LOG, HALF), 1)))
            note_growth(sizes, above_zero(x))
            fill(to + i * each, each, exp(x))


@njit
def seek_and_take(tensors: int) -> tuple[bool, bool]:
    """Whether tokens seek in the state, and whether they take from it along a direction of their own: those of the
    delta rule write what they find, less the value, where they push.
    """
    takes = column(tensors, A, ADDRESS) != 0
    return takes or column(tensors, BETA, ADDRESS) != 0, takes


@by_call
def pack_delta(tensors: int, b: int, h: int, t: int, tokens: int, block: int, each: int) -> None:
    """For the delta rule b = -w k and beta k of every k, which goes where a would be."""
    for i in range(BLOCK):
        beta = splat(F(0))
        if i < tokens:
            beta = splat(total(load_row(locate(tensors, BETA, b, h, t + i), column(tensors, BETA, HALF), 1)))
        for at in range(block + i * each, block + (i + 1) * each, ROW):
            k = load(kind(at, each, PUSH))
            store(kind(at, each, TAKE), k)
            store(kind(at, each, SEEK), mul(load(at), mul(splat(F(-1)), k)))
            store(kind(at, each, PUSH), mul(beta, k))


@by_call
def meet_themselves(takes: bool, bonus: int, scale: float, dim: int, block: int, each: int, own: int) -> None:
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
                if takes:
                    taken = fma(q, load(kind(at, each, TAKE)), taken)
                q = mul(q, load(at))
            store(kind(at, each, READ), q)
        put(own + 4 * t, total(mine))
        put(second + 4 * t, total(taken))


@by_call
def fade(seeks: bool, block: int, each: int) -> None:
    """E, q' E, b E, and E at the end."""
    for c in range(0, each, ROW):
        e = splat(F(1))
        for t in range(c, c + BLOCK * each, each):
            store(kind(block, each, FADED) + t, e)
            store(kind(block, each, READ_FROM) + t, mul(e, load(kind(block, each, READ) + t)))
            if seeks:
                store(kind(block, each, SEEK_FROM) + t, mul(e, load(kind(block, each, SEEK) + t)))
            e = mul(e, load(block + t))
        store(faded(block, each) + c, e)


@by_call
def meet(seeks: bool, takes: bool, block: int, deep: int, tiles: int) -> None:
    """The pairs of all tokens, and k and a until the end.

    Token j's pairs are with those after it, token 15 - j's with the others: both share a tile, the latter from its last
    row on backward.
    """
    each = 4 * deep
    first, reads = pairs_of(block, each, 0), 2 if seeks else 1
    for j in range(BLOCK // 2):
        meet_later(seeks, takes, block, deep, j, tiles + j * ROW, ROW)
        other = BLOCK - 1 - j
        meet_later(seeks, takes, block, deep, other, tiles + (j - 1) * ROW, -ROW)
        for n in range(2 * reads if takes else reads):
            to = first + (n % reads * 2 + n // reads) * TILE  # tiles: k with q' and b, then a with both
            store(tiles + n * TILE + (BLOCK - 1) * ROW, splat(F(0)))
            s = lane_sums(tiles + n * TILE, splat(F(1)))
            after(to + j * ROW, s, j)
            after_turned(to + other * ROW, s, other)


@by_call
def meet_later(seeks: bool, takes: bool, block: int, deep: int, j: int, tile: int, step: int) -> None:
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
                if takes:
                    store(end + apart + i, load(own + apart + i))
        elif takes:
            if wide == 4:
                pairs4_taking(at, apart, each, count, own, end, tile, step, c)
            elif wide == 2:
                pairs2_taking(at, apart, each, count, own, end, tile, step, c)
            else:
                pairs1_taking(at, apart, each, count, own, end, tile, step, c)
        elif seeks:
            if wide == 4:
                pairs4_seeking(at, apart, each, count, own, end, tile, step, c)
            elif wide == 2:
                pairs2_seeking(at, apart, each, count, own, end, tile, step, c)
            else:
                pairs1_seeking(at, apart, each, count, own, end, tile, step, c)
        elif wide == 4:
            pairs4(at, apart, each, count, own, end, tile, step, c)
        elif wide == 2:
            pairs2(at, apart, each, count, own, end, tile, step, c)
        else:
            pairs1(at, apart, each, count, own, end, tile, step, c)
        c += wide


# Columns


@by_call
def pack_columns(
    tensors: int, which: int, b: int, h: int, t: int, tokens: int, first: int, columns: int, to: int,
    ahead: int,
) -> None:  # fmt: skip
    """Some columns of a block's rows of a tensor, PITCH apart; 0 for tokens and columns that are not there."""
    half, stride = column(tensors, which, HALF), column(tensors, which, TOKEN)
    size = 2 if half else 4
    source = locate(tensors, which, b, h, t) + first * size
    bytes_there, bytes_all = 4 * padded(columns), lanes_of(columns) * ROW
    if half or columns % LANES or bytes_there < bytes_all:
        for i in range(tokens):
            at = to + i * PITCH
            pack_some(source + i * stride, half, columns, at, size)
            fill(at + bytes_there, bytes_all - bytes_there, splat(F(0)))
    else:
        copy_lines(source, stride, tokens, bytes_all, to, PITCH)
    for i in range(tokens, BLOCK):
        fill(to + i * PITCH, bytes_all, splat(F(0)))
    for i in range(BLOCK):
        ask(source + (i + ahead) * stride, columns * size)


@by_call
def unpack_columns(
    tensors: int, which: int, b: int, h: int, t: int, tokens: int, first: int, columns: int, source: int,
    ahead: int,
) -> None:  # fmt: skip
    """The way back, for the tokens that are there."""
    half, stride = column(tensors, which, HALF), column(tensors, which, TOKEN)
    size = 2 if half else 4
    target = locate(tensors, which, b, h, t) + first * size
    if half or columns % LANES:
        for i in range(tokens):
            unpack_some(source + i * PITCH, target + i * stride, half, columns, size)
    else:
        copy_lines(source, PITCH, tokens, 4 * columns, target, stride)
    for i in range(BLOCK):
        ask(target + (i + ahead) * stride, columns * size)


@by_call
def remove(block: int, deep: int, vectors: int, state: int, values: int) -> None:
    """What a block's tokens remove, r, 16 rows behind the values."""
    each, removed = 4 * deep, values + BLOCK * PITCH
    multiply(vectors, kind(block, each, SEEK_FROM), each, 4, BLOCK, state, PITCH, deep, removed, PITCH)
    pairs, one = pairs_of(block, each, SEEK_PUSH), ones(block, each)
    multiply_onto(vectors, pairs, 4, ROW, BLOCK, values, PITCH, BLOCK, removed, PITCH, removed, one)
    for c in range(0, vectors * ROW, ROW):
        solve(removed + c, PITCH, pairs_of(block, each, SEEK_TAKE))


@by_call
def replace(block: int, deep: int, vectors: int, state: int, values: int) -> None:
    """With the delta rule what a block's tokens write, v + b^T S, in the place of the values."""
    each, seek, one = 4 * deep, kind(block, 4 * deep, SEEK_FROM), ones(block, 4 * deep)
    multiply_onto(vectors, seek, each, 4, BLOCK, state, PITCH, deep, values, PITCH, values, one)
    for c in range(0, vectors * ROW, ROW):
        solve(values + c, PITCH, pairs_of(block, each, SEEK_PUSH))


@by_call
def advance(takes: bool, block: int, deep: int, vectors: int, state: int, after: int, values: int) -> None:
    """The state after a block of the one before it."""
    each, written = 4 * deep, 2 * BLOCK if takes else BLOCK
    pushed = kind(block, each, PUSH_TO)
    multiply_onto(vectors, pushed, 4, each, deep, values, PITCH, written, after, PITCH, state, faded(block, each))
