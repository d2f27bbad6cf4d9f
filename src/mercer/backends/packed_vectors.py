"""Products of packed weights with a few inputs, as LLVM IR: 16 outputs in the lanes of a vector, column after column.

A tile is 16 rows of a weight matrix. It is stored by columns, in units that follow each other in memory, so that a
product reads one stream from its first byte to its last; nothing has to be summed across lanes. A unit is

    float32   8 columns of 16 numbers
    bfloat16  16 columns: 8 vectors of words, a pair of columns in the halves of a word
    int8      64 columns: 2 x 16 factors (float16), one a row and group of 32 columns, then 64 x 16 bytes
    int4      64 columns: 2 x 16 factors and 2 x 16 least values (float16), then 8 vectors of words, 8 columns in the
              halves of a word's bytes, the first in the lowest

Inputs and sums are float32 whatever the weights are. Nothing here checks bounds.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from mercer.backends.decode_vectors import _chunk, _literal, _repeat
from mercer.backends.microkernels import (
    HALVES,
    I8,
    I16,
    I32,
    I64,
    LANES,
    ROW,
    VECTOR,
    WORDS,
    _broadcast,
    _constant,
    _fma,
    _load,
    _pointer,
    _prefetch,
    _primitive,
    _store,
    _words,
    address,
    vector,
    whole,
)
from mercer.backends.softmax_vectors import _pair

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
COLUMNS = {FLOAT32: 8, BFLOAT16: 16, INT8: 64, INT4: 64}
"""Columns of a unit."""
UNIT = {FLOAT32: 512, BFLOAT16: 512, INT8: 1088, INT4: 640}
"""Bytes of a unit."""
GROUP = 32
"""Columns that share a factor."""
CENTRE = 8
"""What four bits of 0 stand below: they are read as -8..7."""
AHEAD = 6144
"""Bytes ahead of what is being read that are asked for."""

_LOOKUP = bool(llvm.get_host_cpu_features().get("avx512f", False))
_BYTES = ir.VectorType(I8, LANES)


def _factors(b: Any, at: Any, offset: int) -> Any:
    """16 numbers of float16 as float32."""
    halves = _load(b, at, offset, HALVES, 2)
    return b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), VECTOR)


def _nibble(b: Any, words: Any, which: int) -> Any:
    """Bits 4 which .. 4 which + 3 of each word, less the centre, as float32."""
    moved = b.lshr(words, _words(4 * which)) if which else words
    if _LOOKUP:  # reads the lowest four bits of each index alone
        table = ir.Constant(VECTOR, [float(i - CENTRE) for i in range(LANES)])
        kind = ir.FunctionType(VECTOR, [VECTOR, WORDS])
        return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.permvar.sf.512"), [table, moved])
    return b.sitofp(b.sub(b.and_(moved, _words(15)), _words(CENTRE)), VECTOR)


def _byte(b: Any, at: Any, offset: int) -> Any:
    """16 signed bytes as float32."""
    return b.sitofp(b.sext(_load(b, at, offset, _BYTES, 16), WORDS), VECTOR)


def _columns(b: Any, kind: int, at: Any, group: int = 0) -> list[tuple[int, Any]]:
    """The columns of a unit, or those of one of its groups without their factors, as vectors of their 16 rows."""
    if kind == FLOAT32:
        return [(k, _load(b, at, k * ROW, align=64)) for k in range(8)]
    if kind == BFLOAT16:
        pairs = [_chunk(b, 1, b.add(at, I64(v * ROW))) for v in range(8)]
        return [(2 * v + i, x) for v, pair in enumerate(pairs) for i, x in enumerate(pair)]
    first = group * GROUP
    if kind == INT8:
        return [(first + k, _byte(b, at, 64 + LANES * (first + k))) for k in range(GROUP)]
    out = []
    for v in range(first // 8, first // 8 + GROUP // 8):
        words = _load(b, at, 128 + v * ROW, WORDS, 64)
        out += [(8 * v + j, _nibble(b, words, j)) for j in range(8)]
    return out


@_literal(address, address, whole, whole, address, whole, address, whole)
def tile_product(
    b: Any, kind: int, rows: int, weights: Any, x: Any, pitch: Any, units: Any, groups: Any, group_pitch: Any,
    out: Any, out_pitch: Any,
) -> None:  # fmt: skip
    """out[r] = 16 sums over all columns of weights x[r], for `rows` rows x, `pitch` bytes apart.

    groups: for int4 the sums of each 32 inputs, `group_pitch` bytes a row.
    """
    chains = max(1, 8 // rows) if rows < 4 else 4
    inputs = [b.add(x, b.mul(pitch, I64(r))) for r in range(rows)]
    sums_of = [b.add(groups, b.mul(group_pitch, I64(r))) for r in range(rows)]
    grouped = kind in (INT8, INT4)

    def body(i: Any, sums: list[Any]) -> list[Any]:
        sums, at = list(sums), b.add(weights, b.mul(i, I64(UNIT[kind])))
        here = [b.add(y, b.mul(i, I64(4 * COLUMNS[kind]))) for y in inputs]
        for line in range(0, UNIT[kind], 64):
            _prefetch(b, b.add(at, I64(AHEAD + line)))
        if not grouped:
            for k, w in _columns(b, kind, at):
                for r in range(rows):
                    s = r * chains + k % chains
                    sums[s] = _fma(b, w, _broadcast(b, here[r], 4 * k), sums[s])
            return sums
        for group in range(COLUMNS[kind] // GROUP):
            factor = _factors(b, at, group * 32)
            inner = [_constant(0.0)] * (rows * chains)
            for k, w in _columns(b, kind, at, group):
                for r in range(rows):
                    s = r * chains + k % chains
                    inner[s] = _fma(b, w, _broadcast(b, here[r], 4 * k), inner[s])
            for r in range(rows):
                whole_sum = _tree(b, inner[r * chains : (r + 1) * chains])
                sums[r] = _fma(b, whole_sum, factor, sums[r])
            if kind == INT4:
                low = _fma(b, factor, _constant(CENTRE), _factors(b, at, 64 + group * 32))
                for r in range(rows):
                    place = b.add(sums_of[r], b.mul(i, I64(8)))
                    sums[r] = _fma(b, low, _broadcast(b, place, 4 * group), sums[r])
        return sums

    count = rows if grouped else rows * chains
    sums = _repeat(b, units, [_constant(0.0)] * count, body)
    for r in range(rows):
        each = [sums[r]] if grouped else sums[r * chains : (r + 1) * chains]
        _store(b, _tree(b, each), b.add(out, b.mul(out_pitch, I64(r))))


def _tree(b: Any, terms: list[Any]) -> Any:
    while len(terms) > 1:
        terms = [b.fadd(x, y) for x, y in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


@_literal(address, whole, address, whole)
def tile_columns(b: Any, kind: int, pairs: int, weights: Any, units: Any, out: Any, stride: Any) -> None:
    """out[k] = column k of a tile, its 16 numbers as float32, or, if `pairs`, columns 2 k and 2 k + 1 as bfloat16 in
    the halves of 16 words (which takes AVX512-BF16); they are `stride` bytes apart.
    """

    def body(i: Any, _none: list[Any]) -> list[Any]:
        at = b.add(weights, b.mul(i, I64(UNIT[kind])))
        to = b.add(out, b.mul(stride, b.mul(i, I64(COLUMNS[kind] >> pairs))))
        for group in range(COLUMNS[kind] // GROUP or 1):
            factor = low = None
            if kind in (INT8, INT4):
                factor = _factors(b, at, group * 32)
            if kind == INT4:
                low = _fma(b, factor, _constant(CENTRE), _factors(b, at, 64 + group * 32))
            numbers = _columns(b, kind, at, group)
            if factor is not None:
                numbers = [(k, b.fmul(w, factor) if low is None else _fma(b, w, factor, low)) for k, w in numbers]
            if pairs:
                numbers = [(k // 2, _pair(b, w, x)) for (k, w), (_, x) in zip(numbers[::2], numbers[1::2], strict=True)]
            for k, w in numbers:
                _store(b, w, b.add(to, b.mul(stride, I64(k))))
        return []

    _repeat(b, units, [], body)


def _rounded(b: Any, x: Any) -> Any:
    """To the nearest bfloat16, ties to even; NaN stays."""
    bits = b.bitcast(x, WORDS)
    odd = b.and_(b.lshr(bits, _words(16)), _words(1))
    nearest = b.lshr(b.add(bits, b.add(odd, _words(0x7FFF))), _words(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), _words(0x7FC0), nearest), HALVES)


@_primitive(types.void, address, vector)
def store_halves(b: Any, at: Any, x: Any) -> None:
    """16 numbers as bfloat16."""
    _store(b, _rounded(b, x), at, 0, 2)


@_primitive(types.void, address, types.float32)
def put_half(b: Any, at: Any, x: Any) -> None:
    """One number as bfloat16."""
    bits = b.bitcast(x, I32)
    nearest = b.lshr(b.add(bits, b.add(b.and_(b.lshr(bits, I32(16)), I32(1)), I32(0x7FFF))), I32(16))
    both = b.select(b.fcmp_unordered("uno", x, x), I32(0x7FC0), nearest)
    b.store(b.trunc(both, I16), _pointer(b, at, I16), align=2)


@_primitive(whole, address)
def get_long(b: Any, at: Any) -> Any:
    """A 64-bit integer."""
    return b.load(_pointer(b, at, I64), align=8)
