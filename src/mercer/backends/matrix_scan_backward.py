"""The matrix recurrence backward, in Numba: last blocks of 16 tokens first, from states that are made again.

With the reads, writes and pairs P [t][j] of a block (see `matrix_block_parts`), a token's products with itself
included, S the state before it and D the gradient of the state after it,

    dR = P_qa^T dO + (a until the end) D + P_ba^T dR        a triangular system, from the last token on
    dV = P_qk^T dO + (k until the end) D + P_bk^T dR
    gradients of the pairs: dO V^T, dO R^T, dR V^T, dR R^T
    of q' E and b E: dO S^T, dR S^T;    of k and a until the end: V D^T, R D^T;    of E_16: <D, S> by rows
    D <- diag(E_16) D + (q' E)^T dO + (b E)^T dR

and `matrix_block_pairs` makes of these the gradients of every token's channels. The forward pass kept a state every 64
tokens, and what was removed; the states between come from these.
"""

import numpy as np
from numba import njit

from mercer.backends.calls import by_call
from mercer.backends.matrix_block_layout import (
    ASKED,
    BLOCK,
    PUSH,
    PUSH_TO,
    READ_FROM,
    READ_PUSH,
    READ_TAKE,
    SEEK_PUSH,
    SEEK_TAKE,
    TAKE,
    TAKE_TO,
    block_room,
    faded,
    kind,
    ones,
    pairs_of,
)
from mercer.backends.matrix_block_pairs import (
    CARRIED,
    GRADS,
    OF_DECAY,
    OF_PUSH,
    OF_READ,
    OF_SEEK,
    OF_TAKE,
    pairs_back,
)
from mercer.backends.matrix_block_parts import (
    PITCH,
    advance,
    fill,
    multiply,
    multiply_onto,
    pack_columns,
    prepare,
    seek_and_take,
    unpack_columns,
    unpack_rows,
)
from mercer.backends.matrix_block_vectors import solve_back, turn_tile
from mercer.backends.matrix_scan_parts import columns_of, copy_rows, lanes_of, pieces_of, write_rows
from mercer.backends.matrix_scan_table import (
    ADDRESS,
    BETA,
    BONUS,
    CHANNELS,
    DIM,
    GRAD_A,
    GRAD_B,
    GRAD_BETA,
    GRAD_BONUS,
    GRAD_FINAL,
    GRAD_KEY,
    GRAD_LOG,
    GRAD_QUERY,
    GRAD_STATE,
    GRAD_VALUE,
    HALF,
    KEPT,
    OUTER,
    PART,
    REMOVED,
    SLICE,
    TOKEN,
    UPSTREAM,
    VALUE,
    VALUE_DIM,
)
from mercer.backends.matrix_scan_vectors import column, locate, number, total
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    add,
    broadcast,
    fma,
    lane_sums,
    load,
    load_row,
    mul,
    splat,
    store,
    store_row,
)
from mercer.backends.polynomial_blocks import padded

F = np.float32
BLOCKS = OUTER // BLOCK
"""Blocks from one state that was kept to the next."""


WAYS = 2 * ROW
"""Bytes of a line of two tiles side by side: of k and a, of q' and b."""


def room(dim: int, slices: int) -> int:
    """Bytes of scratch of a thread that has so many slices of the value's columns."""
    each = 4 * (-(-dim // LANES) * LANES)
    return places.py_func(0, each, slices, block_room.py_func(each))[-1]


@njit
def places(work: int, each: int, slices: int, block: int) -> tuple[int, ...]:
    """Where in scratch things are: blocks; D; states before blocks; V, R, dO, dR and dV; columns turned; gradients of
    rows; the like of writes and reads, turned; that of E_16; of pairs; what `pairs_back` takes; of the bonus; the end.
    """
    state = slices * PITCH * each // 4
    grad = work + BLOCKS * block
    states = grad + state
    values = states + BLOCKS * state
    turned = values + 5 * BLOCK * PITCH
    rows = turned + 2 * SLICE * WAYS
    mixed = rows + GRADS * BLOCK * each
    end = mixed + 2 * WAYS * each // 4
    pairs = end + each
    carried = pairs + 4 * TILE
    bonus = carried + CARRIED
    return work, grad, states, values, turned, rows, mixed, end, pairs, carried, bonus, bonus + each + ROW


@by_call
def backward_item(tensors: int, sizes: int, lengths: int, scale: float, work: int, b: int, h: int, part: int) -> None:
    """All tokens of a part of a head's slices."""
    dim, width, count = number(sizes, DIM), number(sizes, VALUE_DIM), number(lengths, b)
    begin, stop = pieces_of(sizes, part)
    deep = padded(dim)
    each, size, one = 4 * deep, deep * PITCH, block_room(4 * deep)
    at = places(work, each, stop - begin, one)
    _, grad, states, values, turned, rows, mixed, end, pairs, carried, bonus_sum, _ = at
    seeks, takes = seek_and_take(tensors)
    line = WAYS if seeks else ROW
    fill(bonus_sum, each, splat(F(0)))
    source = locate(tensors, GRAD_FINAL, b, h, 0)
    for piece in range(begin, stop):
        first, columns = piece * SLICE, columns_of(width, piece)
        at, to = source + 4 * first if source else 0, grad + (piece - begin) * size
        copy_rows(at, column(tensors, GRAD_FINAL, TOKEN), dim, columns, to, PITCH, deep, lanes_of(columns))
    for start in range((count - 1) // OUTER * OUTER, -1, -OUTER):
        blocks = (min(OUTER, count - start) + BLOCK - 1) // BLOCK
        for i in range(blocks):
            t = start + i * BLOCK
            ahead = BLOCK if i < blocks - 1 else start - OUTER - t
            block = work + i * one
            prepare(tensors, sizes, scale, b, h, t, min(BLOCK, count - t), dim, deep, block, carried, ahead)
            for piece in range(begin, stop):
                state = states + ((piece - begin) * BLOCKS + i) * size
                if i == 0:
                    recall(tensors, b, h, t, dim, width, piece, state)
                if i + 1 < blocks:
                    go_on(tensors, b, h, t, dim, width, piece, block, state, values)
        for i in range(blocks - 1, -1, -1):
            t, block = start + i * BLOCK, work + i * one
            tokens = min(BLOCK, count - t)
            for piece in range(begin, stop):
                first, columns, nth = piece * SLICE, columns_of(width, piece), piece - begin
                state, after = states + (nth * BLOCKS + i) * size, grad + nth * size
                read_columns(tensors, b, h, t, tokens, first, columns, values)
                of_value = values + (4 if takes or not seeks else 3) * BLOCK * PITCH
                send(seeks, takes, block, deep, lanes_of(columns), after, values, of_value)
                unpack_columns(tensors, GRAD_VALUE, b, h, t, tokens, first, columns, of_value, -BLOCK)
                turn(seeks, takes, lanes_of(columns), values, turned)
                mix(seeks, takes, deep, padded(columns), state, after, values, turned, mixed, pairs, nth > 0,
                    ones(block, each))  # fmt: skip
                meet_states(deep, lanes_of(columns), state, after, carried, end, nth > 0)
                pull(seeks, block, deep, lanes_of(columns), after, values)
            turn_rows(seeks, takes, deep, mixed, rows)
            pairs_back(seeks, takes, block, each, rows, end, pairs, line, carried)
            finish(takes, locate(tensors, BONUS, 0, h, 0), scale, dim, block, each, rows, pairs, line, bonus_sum)
            if seeks and not takes:
                finish_delta(tensors, b, h, t, tokens, block, each, rows)
            give(tensors, number(sizes, CHANNELS), part, b, h, t, tokens, dim, rows, each)
    target = locate(tensors, GRAD_STATE, b, h, 0)
    if target:
        for piece in range(begin, stop):
            first, at = piece * SLICE, grad + (piece - begin) * size
            write_rows(at, PITCH, dim, columns_of(width, piece), target + 4 * first, column(tensors, GRAD_STATE, TOKEN))
    target = locate(tensors, GRAD_BONUS, b, h, 0)
    if target:
        for c in range(0, dim, LANES):
            at = target + part * column(tensors, GRAD_BONUS, PART) + 4 * c
            store_row(at, 0, dim - c, load(bonus_sum + 4 * c))


@by_call
def recall(tensors: int, b: int, h: int, t: int, dim: int, width: int, piece: int, state: int) -> None:
    """The state of a slice that was kept before a token."""
    vectors = lanes_of(columns_of(width, piece))
    kept = locate(tensors, KEPT, b, h, t // OUTER) + 4 * piece * SLICE * ((dim + 3) // 4 * 4)
    copy_rows(kept, vectors * ROW, dim, vectors * LANES, state, PITCH, padded(dim), vectors)


@by_call
def go_on(
    tensors: int, b: int, h: int, t: int, dim: int, width: int, piece: int, block: int, state: int, values: int
) -> None:
    """The state of a slice after a whole block, behind that before it."""
    first, columns, deep = piece * SLICE, columns_of(width, piece), padded(dim)
    seeks, takes = seek_and_take(tensors)
    written = REMOVED if seeks and not takes else VALUE
    pack_columns(tensors, written, b, h, t, BLOCK, first, columns, values, BLOCK)
    if takes:
        pack_columns(tensors, REMOVED, b, h, t, BLOCK, first, columns, values + BLOCK * PITCH, BLOCK)
    advance(takes, block, deep, lanes_of(columns), state, state + deep * PITCH, values)


@by_call
def read_columns(tensors: int, b: int, h: int, t: int, tokens: int, first: int, columns: int, values: int) -> None:
    """V, R and dO of a block, with the delta rule what was written and dO."""
    seeks, takes = seek_and_take(tensors)
    written = REMOVED if seeks and not takes else VALUE
    pack_columns(tensors, written, b, h, t, tokens, first, columns, values, -BLOCK)
    if takes:
        pack_columns(tensors, REMOVED, b, h, t, tokens, first, columns, values + BLOCK * PITCH, -BLOCK)
    pack_columns(tensors, UPSTREAM, b, h, t, tokens, first, columns, values + 2 * BLOCK * PITCH, -BLOCK)


@by_call
def send(seeks: bool, takes: bool, block: int, deep: int, vectors: int, after: int, values: int, of_value: int) -> None:
    """dR, behind dO, and dV, which are the same with the delta rule."""
    each, one = 4 * deep, ones(block, 4 * deep)
    up = values + 2 * BLOCK * PITCH
    of_removed = up + BLOCK * PITCH
    if takes:
        pairs, until = pairs_of(block, each, READ_TAKE), kind(block, each, TAKE_TO)
        multiply(vectors, pairs, ROW, 4, BLOCK, up, PITCH, BLOCK, of_removed, PITCH)
        multiply_onto(vectors, until, each, 4, BLOCK, after, PITCH, deep, of_removed, PITCH, of_removed, one)
        for c in range(0, vectors * ROW, ROW):
            solve_back(of_removed + c, PITCH, pairs_of(block, each, SEEK_TAKE))
    multiply(vectors, pairs_of(block, each, READ_PUSH), ROW, 4, BLOCK, up, PITCH, BLOCK, of_value, PITCH)
    pushes = kind(block, each, PUSH_TO)
    multiply_onto(vectors, pushes, each, 4, BLOCK, after, PITCH, deep, of_value, PITCH, of_value, one)
    if takes:
        pairs = pairs_of(block, each, SEEK_PUSH)
        multiply_onto(vectors, pairs, ROW, 4, BLOCK, of_removed, PITCH, BLOCK, of_value, PITCH, of_value, one)
    elif seeks:
        for c in range(0, vectors * ROW, ROW):
            solve_back(of_value + c, PITCH, pairs_of(block, each, SEEK_PUSH))


@by_call
def turn(seeks: bool, takes: bool, vectors: int, values: int, turned: int) -> None:
    """Columns by tokens of V and R, then of dO and dR: two tiles side by side, or one."""
    for n in range(4):
        both = takes if n < 2 else seeks
        if both or n % 2 == 0:
            line = WAYS if both else ROW
            source, target = values + n * BLOCK * PITCH, turned + n // 2 * SLICE * WAYS + n % 2 * ROW
            for c in range(vectors):
                turn_tile(source + c * ROW, PITCH, target + c * LANES * line, line)


@by_call
def mix(
    seeks: bool, takes: bool, deep: int, columns: int, state: int, after: int, values: int, turned: int, mixed: int,
    pairs: int, more: bool, one: int,
) -> None:  # fmt: skip
    """D V^T and D R^T, S dO^T and S dR^T, and the gradients of the pairs; added to those of other slices if `more`."""
    writes, reads = 2 if takes else 1, 2 if seeks else 1
    line, wide = writes * ROW, reads * ROW
    up, read = turned + SLICE * WAYS, mixed + deep * WAYS
    if more:
        multiply_onto(writes, after, PITCH, 4, deep, turned, line, columns, mixed, line, mixed, one)
        multiply_onto(reads, state, PITCH, 4, deep, up, wide, columns, read, wide, read, one)
        multiply_onto(reads, values, PITCH, 4, writes * BLOCK, up, wide, columns, pairs, wide, pairs, one)
    else:
        multiply(writes, after, PITCH, 4, deep, turned, line, columns, mixed, line)
        multiply(reads, state, PITCH, 4, deep, up, wide, columns, read, wide)
        multiply(reads, values, PITCH, 4, writes * BLOCK, up, wide, columns, pairs, wide)


@by_call
def meet_states(deep: int, vectors: int, state: int, after: int, tile: int, end: int, more: bool) -> None:
    """<D, S> by rows: the gradient of E_16."""
    for x in range(0, deep, LANES):
        for i in range(LANES):
            at, there, s = state + (x + i) * PITCH, after + (x + i) * PITCH, splat(F(0))
            for c in range(0, vectors * ROW, ROW):
                s = fma(load(at + c), load(there + c), s)
            store(tile + i * ROW, s)
        s = lane_sums(tile, splat(F(1)))
        store(end + 4 * x, add(s, load(end + 4 * x)) if more else s)


@by_call
def pull(seeks: bool, block: int, deep: int, vectors: int, after: int, values: int) -> None:
    """The gradient of the state before a block of that after it."""
    each, written = 4 * deep, 2 * BLOCK if seeks else BLOCK
    reads, up = kind(block, each, READ_FROM), values + 2 * BLOCK * PITCH
    multiply_onto(vectors, reads, 4, each, deep, up, PITCH, written, after, PITCH, after, faded(block, each))


@by_call
def turn_rows(seeks: bool, takes: bool, deep: int, mixed: int, rows: int) -> None:
    """What `mix` made of writes and reads, by tokens again."""
    each, line, wide = 4 * deep, WAYS if takes else ROW, WAYS if seeks else ROW
    for x in range(0, deep, LANES):
        to, read = rows + 4 * x, mixed + deep * WAYS + x * wide
        turn_tile(mixed + x * line, line, kind(to, each, OF_PUSH), each)
        turn_tile(read, wide, kind(to, each, OF_READ), each)
        if takes:
            turn_tile(mixed + x * line + ROW, line, kind(to, each, OF_TAKE), each)
        if seeks:
            turn_tile(read + ROW, wide, kind(to, each, OF_SEEK), each)


@by_call
def finish(
    takes: bool, bonus: int, scale: float, dim: int, block: int, each: int, rows: int, pairs: int, line: int,
    bonus_sum: int,
) -> None:  # fmt: skip
    """Gradients of q, k, a, b and g in the place of those of q', k, a, b and w, and more of that of the bonus: what a
    token's products with itself have a share in, whose gradients are on the diagonals of the pairs'.
    """
    factor = splat(F(scale))
    for t in range(BLOCK):
        own = pairs + t * (line + 4)
        mine, taken = broadcast(own), splat(F(0))
        if takes:
            taken = broadcast(own + BLOCK * line)
        for c in range(0, each, ROW):
            at, to = block + t * each + c, rows + t * each + c
            w, k, q = load(at), load(kind(at, each, PUSH)), load(kind(at, each, ASKED))
            dq, dw, dk = load(kind(to, each, OF_READ)), load(kind(to, each, OF_DECAY)), load(kind(to, each, OF_PUSH))
            if bonus:
                u = load_row(bonus + c, 0, dim - c // 4)
                store(bonus_sum + c, fma(mine, mul(q, k), load(bonus_sum + c)))
                dq = fma(mine, mul(u, k), dq)
                dk = fma(mine, mul(u, q), dk)
            else:
                dw = fma(q, dq, dw)
                dq = fma(mine, k, mul(w, dq))
                dk = fma(mine, q, dk)
                if takes:
                    dq = fma(taken, load(kind(at, each, TAKE)), dq)
                    of_take = kind(to, each, OF_TAKE)
                    store(of_take, fma(taken, q, load(of_take)))
            store(kind(to, each, OF_READ), mul(factor, dq))
            store(kind(to, each, OF_PUSH), dk)
            store(kind(to, each, OF_DECAY), mul(w, dw))


@by_call
def finish_delta(tensors: int, b: int, h: int, t: int, tokens: int, block: int, each: int, rows: int) -> None:
    """Of those of beta k and -w k the gradients of k and beta, which goes where that of a would, and more of g's."""
    for i in range(tokens):
        beta = splat(total(load_row(locate(tensors, BETA, b, h, t + i), column(tensors, BETA, HALF), 1)))
        of_beta = splat(F(0))
        for c in range(i * each, (i + 1) * each, ROW):
            at, to = block + c, rows + c
            k, of_decay = load(kind(at, each, TAKE)), kind(to, each, OF_DECAY)
            dk, fading = load(kind(to, each, OF_PUSH)), mul(load(at), load(kind(to, each, OF_SEEK)))
            of_beta = fma(k, dk, of_beta)
            lost = mul(splat(F(-1)), fading)
            store(kind(to, each, OF_PUSH), fma(beta, dk, lost))
            store(of_decay, fma(k, lost, load(of_decay)))
        store(kind(rows + i * each, each, OF_TAKE), splat(total(of_beta)))


@by_call
def give(
    tensors: int, channels: int, part: int, b: int, h: int, t: int, tokens: int, dim: int, rows: int, each: int
) -> None:
    """A block's gradients of rows to where they are wanted."""
    unpack_rows(tensors, GRAD_QUERY, part, b, h, t, tokens, dim, kind(rows, each, OF_READ), each)
    unpack_rows(tensors, GRAD_KEY, part, b, h, t, tokens, dim, kind(rows, each, OF_PUSH), each)
    if column(tensors, GRAD_A, ADDRESS) != 0:
        unpack_rows(tensors, GRAD_A, part, b, h, t, tokens, dim, kind(rows, each, OF_TAKE), each)
        unpack_rows(tensors, GRAD_B, part, b, h, t, tokens, dim, kind(rows, each, OF_SEEK), each)
    if column(tensors, GRAD_BETA, ADDRESS) != 0:
        unpack_rows(tensors, GRAD_BETA, part, b, h, t, tokens, 1, kind(rows, each, OF_TAKE), each)
    if column(tensors, GRAD_LOG, ADDRESS) != 0:
        decays = kind(rows, each, OF_DECAY)
        if not channels:
            for x in range(decays, decays + tokens * each, each):
                decay = splat(F(0))
                for c in range(0, each, ROW):
                    decay = add(decay, load(x + c))
                store(x, splat(total(decay)))
        unpack_rows(tensors, GRAD_LOG, part, b, h, t, tokens, dim if channels else 1, decays, each)
