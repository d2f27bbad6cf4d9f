"""Weight matrices packed for products on the CPU (extra `cpu`).

Reading the weights is what a product with few inputs costs, so they stand in the order in which they are read, in the
dtype that was asked for: float32, bfloat16, int8 (a factor for each row and 32 columns, w = d q) or int4 (a factor and
a least value, w = d q + m). Inputs and sums are float32. Products with many inputs are arithmetic and not reading: they
take several tiles at a time (`packed_blocks`), in float32, or in bfloat16 with sums of float32 where the weights have
no more bits and the processor multiplies tiles of it. No plain matrix is ever made for a product.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from mercer.backends.sharing import share
from mercer.errors import InvalidArgument
from mercer.runtime.processor import multiplies_tiles

KINDS = ("float32", "bfloat16", "int8", "int4")
"""In the order of the kernel's numbers."""
COLUMNS, UNIT = (8, 16, 64, 64), (512, 512, 1088, 640)
"""Columns and bytes of a unit, as in `packed_vectors`."""
GROUP = 32
LANES = 16
FEW = 32
"""Inputs up to which they are float32 whatever the weights are."""
MANY = (8, 33, 16, 16)
"""Inputs from which several tiles at a time are quicker in float32, for each kind."""
AT_ONCE = 1 << 23
"""Numbers that are packed at a time."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix ``[rows, columns]`` in tiles of 16 rows.

    Attributes:
        kind: one of `KINDS`.
        data: the tiles, uint8.
        paired: whether the matrix is two of rows / 2 rows each, whose tiles alternate, each padded on its own.
    """

    kind: str
    rows: int
    columns: int
    data: Tensor
    paired: bool = False

    @cached_property
    def number(self) -> int:
        """The kind, for kernels."""
        return KINDS.index(self.kind)

    @cached_property
    def units(self) -> int:
        """Units of a tile."""
        return -(-self.columns // COLUMNS[self.number])

    @cached_property
    def width(self) -> int:
        """Columns with those that pad the last unit: inputs must have as many, 0 in what is more."""
        return self.units * COLUMNS[self.number]

    @cached_property
    def tiles(self) -> int:
        return _tiles(self.rows, self.paired)

    @property
    def tile_bytes(self) -> int:
        return self.units * UNIT[self.number]

    def plain(self) -> Tensor:
        """The matrix as float32 ``[rows, columns]``: what products with it multiply."""
        from mercer.backends import packed_kernels as kernels

        tiles = self.tiles // self._halves
        out, run = torch.empty(self._halves, self.width, LANES * tiles), kernels.columns(self.number)
        for half, to in enumerate(out):
            at, stride = self.data.data_ptr() + half * self.tile_bytes, 4 * LANES * tiles
            run(at, self._apart, self.units, to.data_ptr(), stride, tiles)
        return out[:, : self.columns, : self.rows // self._halves].mT.reshape(self.rows, self.columns)

    def rows_of(self, index: Tensor) -> Tensor:
        """Rows as float32, ``[*index.shape, columns]``; not of a paired matrix. They must be there."""
        from mercer.backends import packed_kernels as kernels

        flat = index.flatten().to(torch.int64).contiguous()
        panel, out = torch.empty(self.width, LANES), torch.empty(len(flat), self.width)
        kernels.lookup(self.number)(
            self.data.data_ptr(), self.units, flat.data_ptr(), len(flat), panel.data_ptr(), out.data_ptr(),
            4 * self.width,
        )  # fmt: skip
        return out[:, : self.columns].reshape(*index.shape, self.columns)

    def times(self, x: Tensor) -> Tensor:
        """x ``[n, columns]`` times the transposed matrix, ``[n, rows]`` in the order of the rows, in float32. Weights
        of fewer bits meet more than `FEW` inputs in bfloat16 where the processor multiplies tiles of it.
        """
        n = len(x)
        if 0 < n < min(MANY):
            return self._by_rows(x)
        from mercer.backends.packed_blocks import ACROSS, DEEP, PAIR

        tiles = self.tiles // self._halves
        if n > FEW and self.kind != "float32" and self.width % DEEP == 0 and tiles >= PAIR and _has_tiles():
            return self._in_tiles(x)
        if n >= MANY[self.number] and tiles >= ACROSS:
            return self._in_blocks(x)
        return self._by_rows(x) if n else torch.empty(0, self.rows)

    @property
    def _halves(self) -> int:
        return 2 if self.paired else 1

    @property
    def _apart(self) -> int:
        """Bytes from a tile to the next one of the same half."""
        return self._halves * self.tile_bytes

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Many inputs in float32."""
        from mercer.backends import packed_kernels as kernels
        from mercer.backends.packed_blocks import ABREAST, ACROSS

        n = len(x)
        count = -(-n // ABREAST) * ABREAST
        if count != n or self.width != self.columns or x.dtype != torch.float32 or not x.is_contiguous():
            given, x = x, torch.zeros(count, self.width)
            x[:n, : self.columns] = given
        run, room = kernels.blocks(self.number), 0 if self.kind == "float32" else 4 * ACROSS * LANES * self.width

        def part(first: int, out: int, out_pitch: int, start: int, stop: int) -> None:
            scratch = torch.empty(room + 64, dtype=torch.uint8)
            run(
                first, self._apart, self.units, self.tiles // self._halves, x.data_ptr(), 4 * self.width, out,
                out_pitch, count, start, stop, _aligned(scratch),
            )  # fmt: skip

        return self._many(n, count, ACROSS, part)

    def _in_tiles(self, x: Tensor) -> Tensor:
        """Many inputs in bfloat16 and sums in float32, in tile registers."""
        from mercer.backends import packed_kernels as kernels
        from mercer.backends.packed_blocks import DEEP, PAIR
        from mercer.backends.tile_vectors import SHAPES

        n = len(x)
        count = -(-n // DEEP) * DEEP
        if count != n or self.width != self.columns:
            given, x = x, torch.zeros(count, self.width, dtype=torch.bfloat16)
            x[:n, : self.columns] = given
        lefts = torch.empty(count // LANES, self.width // DEEP, LANES, DEEP, dtype=torch.bfloat16)
        lefts.copy_(x.reshape(-1, LANES, self.width // DEEP, DEEP).transpose(1, 2))
        run, room = kernels.tile_blocks(self.number), 0 if self.kind == "bfloat16" else 4 * LANES * self.width

        def part(first: int, out: int, out_pitch: int, start: int, stop: int) -> None:
            scratch = torch.empty(2 * SHAPES + room + 64, dtype=torch.uint8)
            kept = _aligned(scratch)
            run(
                first, self._apart, self.units, self.tiles // self._halves, lefts.data_ptr(), out, out_pitch, count,
                start, stop, kept, kept + 2 * SHAPES,
            )  # fmt: skip

        return self._many(n, count, PAIR, part)

    def _many(self, n: int, count: int, across: int, part: Callable[[int, int, int, int, int], None]) -> Tensor:
        """Products ``[n, rows]`` from part(first, out, out_pitch, start, stop), which takes runs of `across` tiles of
        the half whose first tile and outputs are at these addresses.
        """
        tiles = self.tiles // self._halves
        runs, out = -(-tiles // across), torch.empty(count, self._halves, LANES * tiles)

        def work(_thread: int, start: int, stop: int) -> None:
            for half in range(self._halves):
                begin, end = max(start - half * runs, 0), min(stop - half * runs, runs)
                if begin < end:
                    to = out.data_ptr() + 4 * LANES * tiles * half
                    first = self.data.data_ptr() + half * self.tile_bytes
                    part(first, to, 4 * LANES * self.tiles, begin, end)

        share(runs * self._halves, work)
        return out[:n, :, : self.rows // self._halves].flatten(1)

    def _by_rows(self, x: Tensor) -> Tensor:
        """Few inputs, up to four at a time."""
        from mercer.backends import packed_kernels as kernels

        n = len(x)
        together = n if n < 3 else 4
        count = -(-n // together) * together
        padded, width = x, self.width
        if count != n or width != self.columns or x.dtype != torch.float32 or not x.is_contiguous():
            padded = torch.zeros(count, width)
            padded[:n, : self.columns] = x
        groups = padded.view(count, -1, GROUP).sum(-1) if self.kind == "int4" else padded
        tiles, units, data, run = self.tiles, self.units, self.data.data_ptr(), kernels.products(self.number, together)
        out = torch.empty(count, LANES * tiles)

        def part(_thread: int, start: int, stop: int) -> None:
            run(
                data, units, padded.data_ptr(), 4 * width, groups.data_ptr(), 4 * groups.shape[1], out.data_ptr(),
                4 * LANES * tiles, count, start, stop,
            )  # fmt: skip

        share(tiles, part)
        return self._in_order(out if count == n else out[:n])

    def _in_order(self, out: Tensor) -> Tensor:
        """Products ``[n, 16 tiles]`` as ``[n, rows]``."""
        if not self.paired:
            return out if out.shape[1] == self.rows else out[:, : self.rows]
        halves = out.view(len(out), -1, 2, LANES)
        return torch.cat([halves[:, :, i].flatten(1)[:, : self.rows // 2] for i in range(2)], 1)


@lru_cache
def _has_tiles() -> bool:
    from mercer.backends.softmax_vectors import TILES

    return TILES and multiplies_tiles()


def _aligned(spare: Tensor) -> int:
    """The first address in some bytes that is a multiple of 64."""
    return spare.data_ptr() + -spare.data_ptr() % 64


def pack(weight: Tensor, kind: str, *, paired: bool = False) -> Packed:
    """Pack a matrix ``[rows, columns]`` of float32 or bfloat16.

    int8: for each row and 32 columns d = max |w| / 127 as float16 and q = round(w / d), so that an error is at most
    d / 2. int4: d = (max w - min w) / 15 and m = min w, both as float16, q = round((w - m) / d) from 0 to 15.

    Raises:
        InvalidArgument: an unknown kind, not a matrix, or numbers that the kind cannot hold.
    """
    if kind not in KINDS:
        raise InvalidArgument(f"weights can be packed as {', '.join(KINDS)}, not {kind!r}")
    if weight.ndim != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise InvalidArgument(f"only matrices are packed, not {weight.dtype} of shape {list(weight.shape)}")
    if paired and weight.shape[0] % 2:
        raise InvalidArgument(f"a pair of matrices has an even number of rows, not {weight.shape[0]}")
    weight = weight.detach()
    rows, columns = weight.shape
    tiles, number = _tiles(rows, paired), KINDS.index(kind)
    units = -(-columns // COLUMNS[number])
    width, size = units * COLUMNS[number], units * UNIT[number]
    data = _memory(tiles * size)
    out = Packed(kind, rows, columns, data, paired)
    step = max(AT_ONCE // (LANES * width) // 2 * 2, 2)
    for start in range(0, tiles, step):
        stop = min(start + step, tiles)
        part = torch.zeros(stop - start, LANES, width, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
        _fill(part, weight, start, paired)
        _write(data[start * size : stop * size], part, kind, units)
    return out


def _tiles(rows: int, paired: bool) -> int:
    return 2 * -(-rows // 2 // LANES) if paired else -(-rows // LANES)


def _fill(part: Tensor, weight: Tensor, start: int, paired: bool) -> None:
    """The rows of some tiles from the tile `start` on; of a pair, an even number of them."""
    count, columns = len(part), weight.shape[1]
    sources = [(part, weight, start)]
    if paired:
        half = weight.shape[0] // 2
        sources = [(part[i::2], weight[i * half : (i + 1) * half], start // 2) for i in range(2)]
    for target, source, first in sources:
        rows = source[first * LANES : (first + count) * LANES][: len(target) * LANES]
        full = len(rows) // LANES
        target[:full, :, :columns] = rows[: full * LANES].view(full, LANES, columns)
        if len(rows) % LANES:
            target[full, : len(rows) % LANES, :columns] = rows[full * LANES :]


def _write(data: Tensor, part: Tensor, kind: str, units: int) -> None:
    count = len(part)
    if kind == "float32":
        data.view(torch.float32).view(count, -1, LANES).copy_(part.transpose(1, 2))
        return
    if kind == "bfloat16":  # pairs move as one number
        data.view(torch.int32).view(count, -1, LANES).copy_(part.view(torch.int32).transpose(1, 2))
        return
    groups, to = part.view(count, LANES, 2 * units, GROUP), data.view(count, units, -1)
    if kind == "int8":
        factor = _half(groups.abs().amax(-1) / 127)
        q = (groups / _divisor(factor)).round_().clamp_(-127, 127).to(torch.int8)
        to[:, :, 64:] = q.view(count, LANES, units, 64).permute(0, 2, 3, 1).flatten(2).view(torch.uint8)
    else:
        low, high = groups.aminmax(dim=-1)
        factor, least = _half((high - low) / 15), _half(low)
        q = ((groups - least.float()[..., None]) / _divisor(factor)).round_().clamp_(0, 15).to(torch.int32)
        words = (q.view(count, LANES, units, 8, 8) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1)
        to[:, :, 128:] = words.to(torch.int32).permute(0, 2, 3, 1).flatten(2).view(torch.uint8)
        to[:, :, 64:128] = _per_unit(least, units)
    to[:, :, :64] = _per_unit(factor, units)


def _half(x: Tensor) -> Tensor:
    half = x.to(torch.float16)
    if not half.isfinite().all():
        raise InvalidArgument("weights that are not finite, or too large for factors of float16, cannot be packed")
    return half


def _divisor(factor: Tensor) -> Tensor:
    wide = factor.float()[..., None]
    return wide.masked_fill(wide == 0, torch.inf)  # a group without a factor is all zeros


def _per_unit(x: Tensor, units: int) -> Tensor:
    """[tiles, 16, 2 units] float16 as the bytes at the head of each unit."""
    return x.view(len(x), LANES, units, 2).permute(0, 2, 3, 1).flatten(2).contiguous().view(torch.uint8)


def _memory(size: int) -> Tensor:
    """Bytes, in large pages where the system has them: a stream stops at the end of a page."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or size < 1 << 21:
        spare = torch.empty(size + 64, dtype=torch.uint8)
        shift = -spare.data_ptr() % 64
        return spare[shift : shift + size]
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
