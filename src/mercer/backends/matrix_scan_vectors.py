"""The inner loops of a token of the matrix recurrence as LLVM IR: one pass over a state.

A row of the state is a channel of the key and values lie in the lanes, so that reading it sums over rows and no lanes
have to be added up. Passes come for 1, 2 and 4 vectors side by side.
"""

from collections.abc import Callable
from typing import Any

from numba import types

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
