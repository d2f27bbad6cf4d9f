"""The inner loops of a token of the matrix recurrence as LLVM IR: one pass over a state.

A row of the state is a channel of the key and values lie in the lanes, so that reading it sums over rows and no lanes
have to be added up. Passes come for 1, 2 and 4 vectors side by side.
"""

from collections.abc import Callable
from typing import Any

from numba import types

from mercer.backends.matrix_scan_table import ADDRESS, BATCH, COLUMNS, HEAD, TOKEN
from mercer.backends.microkernels import (
    I32,
    I64,
    LANES,
    ROW,
    _broadcast,
    _constant,
    _fma,
    _load,
    _loop,
    _primitive,
    _shuffle,
    _store,
    address,
    number,
    vector,
    whole,
)

WIDTHS = (1, 2, 4)
ABREAST = 4
"""Vectors of a state that a pass works on at a time: the widest has them side by side, others take more rows."""


@_primitive(number, vector)
def total(b: Any, x: Any) -> Any:
    """The sum over lanes."""
    for s in (8, 4, 2, 1):
        x = b.fadd(x, _shuffle(b, x, x, [(lane + s) % LANES for lane in range(LANES)]))
    return b.extract_element(x, I32(0))


# Tables of integers by address: an array is counted wherever it is handed on, and Numba compiles a function anew for
# every constant that it is called with


@_primitive(whole, address, whole)
def number(b: Any, numbers: Any, which: Any) -> Any:
    """One of some 64-bit integers."""
    return _load(b, b.add(numbers, b.mul(which, I64(8))), 0, I64, 8)


def _column(b: Any, tensors: Any, which: Any, of: int) -> Any:
    return _load(b, b.add(tensors, b.mul(which, I64(8 * COLUMNS))), 8 * of, I64, 8)


@_primitive(whole, address, whole, whole)
def column(b: Any, tensors: Any, which: Any, of: Any) -> Any:
    """What the table of tensors says of one."""
    return _load(b, b.add(b.add(tensors, b.mul(which, I64(8 * COLUMNS))), b.mul(of, I64(8))), 0, I64, 8)


@_primitive(whole, address, whole, whole, whole, whole)
def locate(b: Any, tensors: Any, which: Any, batch: Any, head: Any, token: Any) -> Any:
    """Where a token's row stands; 0 if the tensor is not there."""
    at = place = _column(b, tensors, which, ADDRESS)
    for index, stride in ((batch, BATCH), (head, HEAD), (token, TOKEN)):
        place = b.add(place, b.mul(index, _column(b, tensors, which, stride)))
    return b.select(b.icmp_signed("==", at, I64(0)), at, place)


def _numbers(b: Any, at: Any, row: Any, offset: int) -> Any:
    return _broadcast(b, b.add(at, b.mul(row, I64(4))), 4 * offset)


def _step(wide: int, removes: bool) -> Callable[..., None]:
    def emit(b: Any, old: Any, before: Any, new: Any, after: Any, rows: Any, per: Any, each: Any, out: Any) -> None:
        """One token: out = sum_c q_c old_c, new_c = w_c old_c + k_c v + a_c r, next = sum_c b_c new_c, over rows c.

        Rows are `before` and `after` bytes apart, and a multiple of 4. per: w, q, k, a, and b of the following token,
        `each` bytes from one to the next, a float a row. out: out, next, v and r, a WIDE of 256 bytes each.
        """
        deep = ABREAST // wide
        ways = [(b.add(out, I64(4 * ROW * i))) for i in range(4)]
        names = ["w", "q", "k", "a", "b"] if removes else ["w", "q", "k"]
        at = {name: b.add(per, b.mul(each, I64(i))) for i, name in enumerate(names)}
        v = [_load(b, ways[2], i * ROW) for i in range(wide)]
        r = [_load(b, ways[3], i * ROW) for i in range(wide)] if removes else []
        count = deep * wide

        def body(i: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            for d in range(deep):
                row = b.add(b.mul(i, I64(deep)), I64(d))
                source, target = b.add(old, b.mul(row, before)), b.add(new, b.mul(row, after))
                x = {name: _numbers(b, place, row, 0) for name, place in at.items()}
                s = [_load(b, source, j * ROW) for j in range(wide)]
                for j in range(wide):
                    sums[d * wide + j] = _fma(b, x["q"], s[j], sums[d * wide + j])
                s = [_fma(b, x["k"], v[j], b.fmul(x["w"], s[j])) for j in range(wide)]
                if removes:
                    s = [_fma(b, x["a"], r[j], s[j]) for j in range(wide)]
                    for j in range(wide):
                        sums[count + d * wide + j] = _fma(b, x["b"], s[j], sums[count + d * wide + j])
                for j in range(wide):
                    _store(b, s[j], target, j * ROW)
            return sums

        sums = _loop(b, b.sdiv(rows, I64(deep)), [_constant(0.0)] * (count * (1 + removes)), body)
        for which in range(1 + removes):
            for j in range(wide):
                parts = [sums[which * count + d * wide + j] for d in range(deep)]
                while len(parts) > 1:
                    parts = [b.fadd(*parts[n : n + 2]) for n in range(0, len(parts), 2)]
                _store(b, parts[0], ways[which], j * ROW)

    emit.__name__ = f"step{wide}{'_removing' * removes}"
    return emit


def _read(wide: int) -> Callable[..., None]:
    def emit(b: Any, state: Any, stride: Any, rows: Any, per: Any, out: Any) -> None:
        """out = sum_c b_c state_c over rows c; a float of b a row."""
        deep = ABREAST // wide

        def body(i: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            for d in range(deep):
                row = b.add(b.mul(i, I64(deep)), I64(d))
                at, x = b.add(state, b.mul(row, stride)), _numbers(b, per, row, 0)
                for j in range(wide):
                    sums[d * wide + j] = _fma(b, x, _load(b, at, j * ROW), sums[d * wide + j])
            return sums

        sums = _loop(b, b.sdiv(rows, I64(deep)), [_constant(0.0)] * ABREAST, body)
        for j in range(wide):
            parts = [sums[d * wide + j] for d in range(deep)]
            while len(parts) > 1:
                parts = [b.fadd(*parts[n : n + 2]) for n in range(0, len(parts), 2)]
            _store(b, parts[0], out, j * ROW)

    emit.__name__ = f"read{wide}"
    return emit


_STEP = (address, whole, address, whole, whole, address, whole, address)
step1, step2, step4 = (_primitive(types.void, *_STEP)(_step(n, False)) for n in WIDTHS)
step1_removing, step2_removing, step4_removing = (_primitive(types.void, *_STEP)(_step(n, True)) for n in WIDTHS)
_READ = (address, whole, whole, address, address)
read1, read2, read4 = (_primitive(types.void, *_READ)(_read(n)) for n in WIDTHS)
