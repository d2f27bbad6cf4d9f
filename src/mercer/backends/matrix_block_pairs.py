"""The way back through the pairs of a block of the matrix recurrence: gradients of reads, writes and decays.

From products over the value's columns come U_t = S_0 do_t (and S_0 dr_t) for the reads, the gradients of the writes
until the end, k_j D_16j and a_j D_16j, that of E_16, and those of the pairs. A channel's writes are carried forward
through the decays once more, since reads want them, and their gradients backward.
"""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.calls import by_call
from mercer.backends.matrix_block_layout import BLOCK, DECAY, FADED, PUSH, READ, SEEK, TAKE, kind
from mercer.backends.microkernels import ROW, TILE, add, broadcast, fma, load, mul, splat, store

F = np.float32
OF_READ, OF_SEEK, OF_PUSH, OF_TAKE, OF_DECAY = range(5)
"""Kinds of rows of gradients, of `16 each` bytes a kind: of q', b, k, a and w."""
GRADS = 5
CARRIED = 2 * (BLOCK + 1) * TILE + 2 * TILE
"""Bytes of scratch: writes before every token, and gradients of writes."""


@by_call
def pairs_back(
    seeks: bool, takes: bool, block: int, each: int, grads: int, end: int, pairs: int, line: int, work: int
) -> None:
    """Turns U and the gradients of writes until the end, in grads, into those of q', k (and b, a), and makes that of w.

    end: the gradient of E_16, a row; pairs: the gradients of pairs, of which those of q' with k begin a line j and
    those of b with k follow after 64 bytes; those of a after 16 lines; lines are `line` bytes apart.
    """
    for c in range(0, each, ROW):
        at = block + c
        grad = grads + c
        _forth(seeks, takes, at, each, grad, pairs, line, work)
        _back(seeks, takes, at, each, grad, load(end + c), pairs, line, work)


@njit
def _forth(seeks: bool, takes: bool, at: int, each: int, grad: int, pairs: int, line: int, work: int) -> None:
    """Gradients of the reads; the writes before every token go to `work`, and gradients of E to where those of w will
    stand."""
    taking = work + (BLOCK + 1) * TILE
    for t in range(BLOCK):
        x = t * each
        e, w = load(kind(at, each, FADED) + x), load(kind(at, each, DECAY) + x)
        read, here, column = kind(grad, each, OF_READ) + x, work + t * TILE, pairs + 4 * t
        u = load(read)
        dq, de = mul(e, u), mul(load(kind(at, each, READ) + x), u)
        if seeks:
            seek, there = kind(grad, each, OF_SEEK) + x, taking + t * TILE
            u = load(seek)
            db, de = mul(e, u), fma(load(kind(at, each, SEEK) + x), u, de)
        if takes:
            other, more = splat(F(0)), splat(F(0))
            for j in range(t):
                k, a, y = load(here + j * ROW), load(there + j * ROW), column + j * line
                dq = fma(broadcast(y), k, dq)
                db = fma(broadcast(y + ROW), k, db)
                other = fma(broadcast(y + BLOCK * line), a, other)
                more = fma(broadcast(y + BLOCK * line + ROW), a, more)
                store(here + TILE + j * ROW, mul(w, k))
                store(there + TILE + j * ROW, mul(w, a))
            dq = add(dq, other)
            store(seek, add(db, more))
            store(there + TILE + t * ROW, load(kind(at, each, TAKE) + x))
        elif seeks:
            for j in range(t):
                k, y = load(here + j * ROW), column + j * line
                dq = fma(broadcast(y), k, dq)
                db = fma(broadcast(y + ROW), k, db)
                store(here + TILE + j * ROW, mul(w, k))
            store(seek, db)
        else:
            for j in range(t):
                k = load(here + j * ROW)
                dq = fma(broadcast(column + j * line), k, dq)
                store(here + TILE + j * ROW, mul(w, k))
        store(here + TILE + t * ROW, load(kind(at, each, PUSH) + x))
        store(read, dq)
        store(kind(grad, each, OF_DECAY) + x, de)


@njit
def _back(seeks: bool, takes: bool, at: int, each: int, grad: int, de: Any, pairs: int, line: int, work: int) -> None:
    """Gradients of the writes and decays."""
    taking = work + (BLOCK + 1) * TILE
    pushed = taking + (BLOCK + 1) * TILE
    taken = pushed + TILE
    for j in range(BLOCK):
        store(pushed + j * ROW, load(kind(grad, each, OF_PUSH) + j * each))
        if takes:
            store(taken + j * ROW, load(kind(grad, each, OF_TAKE) + j * each))
    for t in range(BLOCK - 1, -1, -1):
        x = t * each
        w, q = load(kind(at, each, DECAY) + x), load(kind(at, each, READ) + x)
        here, column = work + t * TILE, pairs + 4 * t
        dw = mul(de, load(kind(at, each, FADED) + x))
        if takes:
            b, there, other = load(kind(at, each, SEEK) + x), taking + t * TILE, splat(F(0))
            for j in range(t):
                r, y = j * ROW, column + j * line
                g = load(pushed + r)
                dw = fma(g, load(here + r), dw)
                g = fma(broadcast(y), q, mul(g, w))
                store(pushed + r, fma(broadcast(y + ROW), b, g))
                g = load(taken + r)
                other = fma(g, load(there + r), other)
                g = fma(broadcast(y + BLOCK * line), q, mul(g, w))
                store(taken + r, fma(broadcast(y + BLOCK * line + ROW), b, g))
            dw = add(dw, other)
        elif seeks:
            b = load(kind(at, each, SEEK) + x)
            for j in range(t):
                y, g = column + j * line, load(pushed + j * ROW)
                dw = fma(g, load(here + j * ROW), dw)
                g = fma(broadcast(y), q, mul(g, w))
                store(pushed + j * ROW, fma(broadcast(y + ROW), b, g))
        else:
            for j in range(t):
                g = load(pushed + j * ROW)
                dw = fma(g, load(here + j * ROW), dw)
                store(pushed + j * ROW, fma(broadcast(column + j * line), q, mul(g, w)))
        of_decay = kind(grad, each, OF_DECAY) + x
        de = fma(de, w, load(of_decay))
        store(of_decay, dw)
    for j in range(BLOCK):
        store(kind(grad, each, OF_PUSH) + j * each, load(pushed + j * ROW))
        if takes:
            store(kind(grad, each, OF_TAKE) + j * each, load(taken + j * ROW))
