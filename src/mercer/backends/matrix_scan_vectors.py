"""The inner loops of the matrix recurrence as LLVM IR: passes over a state with everything a row needs in registers.

Forward, a row of the state is a channel of the key and values lie in the lanes, so that reading it sums over rows and
no lanes have to be added up. Backward it is the other way round: a row is a column of the value and channels lie in
the lanes, so that the gradients of queries, keys, decays and removals, five numbers a channel, sum over rows, and only
the value's has to be summed over lanes. Passes come for 1, 2 and 4 vectors side by side.
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


def _replay(wide: int, removes: bool) -> Callable[..., None]:
    def emit(b: Any, old: Any, new: Any, stride: Any, rows: Any, per: Any, each: Any, v: Any, r: Any) -> None:
        """new_j = w old_j + v_j k + r_j a over rows j: channels in lanes. per: w, q, k, a, `each` bytes apart."""
        w, _, k, a = ([_load(b, b.add(per, b.mul(each, I64(n))), i * ROW) for i in range(wide)] for n in range(4))

        def body(j: Any, _none: list[Any]) -> list[Any]:
            source, target = b.add(old, b.mul(j, stride)), b.add(new, b.mul(j, stride))
            x = _numbers(b, v, j, 0)
            s = [_fma(b, x, k[i], b.fmul(w[i], _load(b, source, i * ROW))) for i in range(wide)]
            if removes:
                y = _numbers(b, r, j, 0)
                s = [_fma(b, y, a[i], s[i]) for i in range(wide)]
            for i in range(wide):
                _store(b, s[i], target, i * ROW)
            return []

        _loop(b, rows, [], body)

    emit.__name__ = f"replay{wide}{'_removing' * removes}"
    return emit


def _sent(b: Any, grads: list[Any], by: list[Any], place: Any, add: Any) -> None:
    """place (+)= the products of a row, not yet summed over lanes; it adds if `add` is not 0."""
    x = b.select(b.icmp_signed("!=", add, I64(0)), _load(b, place), _constant(0.0))
    for g, y in zip(grads, by, strict=True):
        x = _fma(b, g, y, x)
    _store(b, x, place)


def _project(wide: int) -> Callable[..., None]:
    def emit(b: Any, grad: Any, stride: Any, rows: Any, per: Any, each: Any, keys: Any, removed: Any, add: Any) -> None:
        """In lanes, keys[j] (+)= grad_j k and removed[j] (+)= grad_j a over rows j: their sums are D^T k and D^T a."""
        k, a = ([_load(b, b.add(per, b.mul(each, I64(n))), i * ROW) for i in range(wide)] for n in (2, 3))

        def body(j: Any, _none: list[Any]) -> list[Any]:
            at, place = b.add(grad, b.mul(j, stride)), b.mul(j, I64(ROW))
            d = [_load(b, at, i * ROW) for i in range(wide)]
            _sent(b, d, k, b.add(keys, place), add)
            _sent(b, d, a, b.add(removed, place), add)
            return []

        _loop(b, rows, [], body)

    emit.__name__ = f"project{wide}"
    return emit


def _back(wide: int, removes: bool) -> Callable[..., None]:
    def emit(
        b: Any, state: Any, grad: Any, stride: Any, rows: Any, per: Any, each: Any, columns: Any, apart: Any, out: Any,
        keys: Any, add: Any, more: Any,
    ) -> None:  # fmt: skip
        """One token back: over rows j of the state S before it and of the gradient D after it,

            out = sum_j do_j S_j, sum_j D_j S_j, sum_j v_j D_j  and, removing,  sum_j r_j D_j, sum_j dr_j S_j
            D_j = w D_j + do_j q + dr_j b

        per: w, q, k, a, b, `each` bytes apart; columns: v, do, r, dr, `apart` bytes apart, a float a row; out: as per.
        Without removal also, in lanes, keys[j] (+)= D_j k. The sums are added to what stands in out if `more`.
        """
        w, q, k = ([_load(b, b.add(per, b.mul(each, I64(n))), i * ROW) for i in range(wide)] for n in range(3))
        v, do, r, dr = (b.add(columns, b.mul(apart, I64(n))) for n in range(4))
        kept = [_load(b, b.add(per, b.mul(each, I64(4))), i * ROW) for i in range(wide)] if removes else []
        kinds = 5 if removes else 3

        def body(j: Any, sums: list[Any]) -> list[Any]:
            sums = [list(sums[n * wide : (n + 1) * wide]) for n in range(kinds)]
            here, there = b.add(state, b.mul(j, stride)), b.add(grad, b.mul(j, stride))
            s, d = ([_load(b, x, i * ROW) for i in range(wide)] for x in (here, there))
            vj, dj = _numbers(b, v, j, 0), _numbers(b, do, j, 0)
            if not removes:
                _sent(b, d, k, b.add(keys, b.mul(j, I64(ROW))), add)
            pairs = [(dj, s), (d, s), (vj, d)]
            if removes:
                rj, gj = _numbers(b, r, j, 0), _numbers(b, dr, j, 0)
                pairs += [(rj, d), (gj, s)]
            for n, (x, y) in enumerate(pairs):
                for i in range(wide):
                    sums[n][i] = _fma(b, x[i] if isinstance(x, list) else x, y[i], sums[n][i])
            new = [_fma(b, dj, q[i], b.fmul(w[i], d[i])) for i in range(wide)]
            if removes:
                new = [_fma(b, gj, kept[i], new[i]) for i in range(wide)]
            for i in range(wide):
                _store(b, new[i], there, i * ROW)
            return [x for part in sums for x in part]

        going = b.icmp_signed("!=", more, I64(0))
        before = [
            b.select(going, _load(b, b.add(out, b.mul(each, I64(n))), i * ROW), _constant(0.0))
            for n in range(kinds)
            for i in range(wide)
        ]
        sums = _loop(b, rows, before, body)
        for n in range(kinds):
            for i in range(wide):
                _store(b, sums[n * wide + i], b.add(out, b.mul(each, I64(n))), i * ROW)

    emit.__name__ = f"back{wide}{'_removing' * removes}"
    return emit


_STEP = (address, whole, address, whole, whole, address, whole, address)
step1, step2, step4 = (_primitive(types.void, *_STEP)(_step(n, False)) for n in WIDTHS)
step1_removing, step2_removing, step4_removing = (_primitive(types.void, *_STEP)(_step(n, True)) for n in WIDTHS)
_READ = (address, whole, whole, address, address)
read1, read2, read4 = (_primitive(types.void, *_READ)(_read(n)) for n in WIDTHS)
_REPLAY = (address, address, whole, whole, address, whole, address, address)
replay1, replay2, replay4 = (_primitive(types.void, *_REPLAY)(_replay(n, False)) for n in WIDTHS)
replay1_removing, replay2_removing, replay4_removing = (
    _primitive(types.void, *_REPLAY)(_replay(n, True)) for n in WIDTHS
)
_PROJECT = (address, whole, whole, address, whole, address, address, whole)
project1, project2, project4 = (_primitive(types.void, *_PROJECT)(_project(n)) for n in WIDTHS)
_BACK = (address, address, whole, whole, address, whole, address, whole, address, address, whole, whole)
back1, back2, back4 = (_primitive(types.void, *_BACK)(_back(n, False)) for n in WIDTHS)
back1_removing, back2_removing, back4_removing = (_primitive(types.void, *_BACK)(_back(n, True)) for n in WIDTHS)
