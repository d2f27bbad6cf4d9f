"""Weight matrices packed for products with few inputs, on the CPU (extra `cpu`).

Reading the weights is what such a product costs, so they stand in the order in which they are read, in the dtype that
was asked for: float32, bfloat16, int8 (a factor for each row and 32 columns, w = d q) or int4 (a factor and a least
value, w = d q + m). Inputs and sums are float32. Products with many inputs are arithmetic and not reading: they take
plain weights, which are made from the packed ones on the way, and torch multiplies them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.backends.sharing import share
from mercer.errors import InvalidArgument

KINDS = ("float32", "bfloat16", "int8", "int4")
"""In the order of the kernel's numbers."""
COLUMNS, UNIT = (8, 16, 64, 64), (512, 512, 1088, 640)
"""Columns and bytes of a unit, as in `packed_vectors`."""
GROUP = 32
LANES = 16
FEW = 32
"""Inputs up to which the packed weights are multiplied as they are."""
PANEL = 1 << 25
"""Bytes of plain weights that are made at a time: matrices of layers are mostly whole, and those of scores are cut."""
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

    @property
    def number(self) -> int:
        """The kind, for kernels."""
        return KINDS.index(self.kind)

    @property
    def units(self) -> int:
        """Units of a tile."""
        return -(-self.columns // COLUMNS[self.number])

    @property
    def width(self) -> int:
        """Columns with those that pad the last unit: inputs must have as many, 0 in what is more."""
        return self.units * COLUMNS[self.number]

    @property
    def tiles(self) -> int:
        return _tiles(self.rows, self.paired)

    @property
    def tile_bytes(self) -> int:
        return self.units * UNIT[self.number]

    def plain(self) -> Tensor:
        """The matrix as float32 ``[rows, columns]``: what products with it multiply."""
        return torch.cat([panel.t() for panel in self.panels(torch.float32)])

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

    def multiplied(self, dtype: torch.dtype) -> torch.dtype:
        """What many inputs of a dtype are multiplied in: bfloat16 if they or the weights are of fewer bits than
        float32 (sums are float32), as products of such tensors are everywhere.
        """
        return torch.float32 if self.kind == "float32" and dtype == torch.float32 else torch.bfloat16

    def times(self, x: Tensor) -> Tensor:
        """x ``[n, columns]`` times the transposed matrix, ``[n, rows]`` (in the order of the rows): float32 for up to
        `FEW` inputs, and for more of them as they are `multiplied`.
        """
        n = len(x)
        if n > FEW:
            x = x.to(self.multiplied(x.dtype))
            parts = [torch.mm(x, panel) for panel in self.panels(x.dtype)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        from mercer.backends import packed_kernels as kernels

        if n == 0:
            return torch.empty(0, self.rows)
        together = n if n < 3 else 4
        count = -(-n // together) * together
        padded = torch.zeros(count, self.width)
        padded[:n, : self.columns] = x
        groups = padded.view(count, -1, GROUP).sum(-1) if self.kind == "int4" else padded
        out = torch.empty(count, LANES * self.tiles)
        run = kernels.products(self.number, together)

        def part(_thread: int, start: int, stop: int) -> None:
            run(
                self.data.data_ptr(), self.units, padded.data_ptr(), 4 * self.width, groups.data_ptr(),
                4 * groups.shape[1], out.data_ptr(), 4 * out.shape[1], count, start, stop,
            )  # fmt: skip

        share(self.tiles, part)
        return self._in_order(out[:n])

    def panels(self, dtype: torch.dtype, size: int = PANEL) -> Iterator[Tensor]:
        """The transposed matrix as float32 or bfloat16 in runs of rows, ``[columns, n]`` of about `size` bytes each, or
        in as few as there can be for 0; none has rows of both halves of a pair.
        """
        halves = 2 if self.paired else 1
        tiles, rows = self.tiles // halves, self.rows // halves
        step = max(size // (dtype.itemsize * LANES * self.width), 1) if size else tiles
        for half in range(halves):
            for start in range(0, tiles, step):
                stop = min(start + step, tiles)
                panel = self._panel(half + start * halves, halves, stop - start, dtype)
                yield panel[: self.columns, : rows - LANES * start]

    def _panel(self, first: int, step: int, count: int, dtype: torch.dtype) -> Tensor:
        """Tiles first, first + step, ... as a plain transposed matrix ``[width, 16 count]``."""
        from mercer.backends import packed_kernels as kernels

        out = torch.empty(self.width, LANES * count, dtype=dtype)
        run, size = kernels.columns(self.number, int(dtype == torch.bfloat16)), out.element_size()

        def part(_thread: int, start: int, stop: int) -> None:
            at = self.data.data_ptr() + (first + start * step) * self.tile_bytes
            to = out.data_ptr() + start * LANES * size
            run(at, step * self.tile_bytes, self.units, to, out.shape[1] * size, stop - start)

        share(count, part)
        return out

    def _in_order(self, out: Tensor) -> Tensor:
        """Products ``[n, 16 tiles]`` as ``[n, rows]``."""
        if not self.paired:
            return out[:, : self.rows]
        halves = out.view(len(out), -1, 2, LANES)
        return torch.cat([halves[:, :, i].flatten(1)[:, : self.rows // 2] for i in range(2)], 1)


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
