"""The decoding step of a decoder as a list of operations, and the memory that they work in.

What is written here in modules and places is what `mercer.backends.program_kernels` walks through. `unfit` says which
models have such a list; the others are computed module by module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mercer.core.kernels import Exp
from mercer.core.merged import merge
from mercer.core.normalizers import Sum
from mercer.core.soft_cap import SoftCap
from mercer.inference.packed_model import PackedFeedForward, PackedLinear
from mercer.mixers.block import MixerBlock
from mercer.models.shared_hybrid import HybridBlock
from mercer.nn.activations import GATED
from mercer.nn.attention import Attention
from mercer.nn.block import Block
from mercer.nn.experts import Experts
from mercer.nn.feedforward import FeedForward
from mercer.nn.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from mercer.models.decoder import DecoderLM

ITEMS = 24
"""Ranges of keys over all heads, where there are keys enough."""
SHORTEST = 128
"""Keys of a range at least."""


def unfit(model: DecoderLM) -> str | None:
    """Why the model's step is not one call; None if it is."""
    if model.relative is not None:
        return 'position "t5" adds a learned bias to every pair'
    for i, block in enumerate(model.blocks):
        if isinstance(block, MixerBlock):
            return f"layer {i} is {block.mixer.kind}; its modules run one by one, with packed weights"
        if isinstance(block, HybridBlock):
            return f"layer {i} reads a shared block; its modules run one by one, with packed weights"
        if type(block) is not Block:
            return f"layer {i} is a {type(block).__name__}"
        if type(block.attention) is not Attention:
            return f"layer {i} is a {type(block).__name__} of a {type(block.attention).__name__}"
        reason = _unfit_attention(block.attention)
        if reason is None and not isinstance(block.feedforward, FeedForward):
            kind = type(block.feedforward)
            what = "experts" if issubclass(kind, Experts) else f"a {kind.__name__}"
            reason = f"it has {what} in the place of a feed-forward; its modules run one by one, with packed weights"
        if reason is not None:
            return f"layer {i}: {reason}"
    shapes = {(b.attention.kv_heads, b.attention.heads, b.attention.head_dim) for b in model.blocks}
    if len(shapes) > 1:
        return "its layers have heads of several shapes"
    return None


def _unfit_attention(attention: Attention) -> str | None:
    kernel, rotary = attention.kernel, attention.rotary
    if type(kernel) not in (Exp, SoftCap) or type(attention.normalizer) is not Sum:
        return f"{kernel} under {attention.normalizer} is neither softmax nor capped softmax"
    merged = merge(attention.structure)
    parts = (merged.padding, merged.documents, merged.alibi, merged.decay, merged.relative, *merged.pairwise)
    if merged.right != 0 or merged.patterns or any(part is not None for part in parts):
        return f"its structure {attention.structure} is neither causal nor a window"
    if attention.recency is not None or attention.gate is not None:
        return "it has gates"
    if attention.gain is not None or attention.shift is not None:
        return "it has a gain"
    if rotary is not None and rotary.by_length:
        return "its rotary positions depend on the length of the sequence"
    return None


def widest(model: DecoderLM) -> int | None:
    """How many tokens the layer that sees the most of them sees; None: all."""
    lefts = [merge(block.attention.structure).left for block in model.blocks]
    return None if None in lefts else max(left for left in lefts if left is not None) + 1


@dataclass
class Program:
    """Operations for some rows and threads, with the tensors whose addresses they hold.

    Attributes:
        operations, numbers, step: the tables of `program_kernels`.
        run: compiled for the model's kinds.
        first: what the first block reads, ``[rows, width]``, to be filled before a step.
        counters: of pieces taken and done, to be 0 before a step.
        out_width: numbers of a row of the result, whose address and pitch are those of the last operation's output.
        kept: what holds the memory that the tables point to.
    """

    operations: np.ndarray
    numbers: np.ndarray
    step: np.ndarray
    run: Any
    first: Tensor
    counters: Tensor
    out_width: int
    kept: list[Any]


def _width(channels: int) -> int:
    """Numbers of a row of a buffer: what any unit of weights pads it to."""
    return -(-channels // 64) * 64


class Builder:
    """Lays out memory and writes operations for `batch` rows and `threads` threads."""

    def __init__(self, model: DecoderLM, batch: int, threads: int, dtype: torch.dtype) -> None:
        from mercer.backends import program_kernels as kernels

        self.k, self.model, self.batch, self.threads = kernels, model, batch, threads
        attention = model.blocks[0].attention
        self.together = batch if batch < 3 else 4
        self.rows = -(-batch // self.together) * self.together
        self.cached = int(dtype == torch.bfloat16)
        group = attention.heads // attention.kv_heads
        self.taken = group if group < 3 else 4
        self.queries = -(-group // self.taken) * self.taken
        self.operations: list[list[int]] = []
        self.numbers: list[list[float]] = []
        self.open: list[int] = []  # operations whose pieces nobody has waited for
        self.kept: list[Any] = [model]
        self.own = 0  # bytes of a thread's memory laid out so far

    # Memory

    def shared(self, channels: int) -> tuple[int, int]:
        """An address and a pitch of rows of numbers, 0 at first, with as much room before and behind them."""
        width = _width(channels)
        memory = torch.zeros((self.rows + 2) * width)
        self.kept.append(memory)
        return memory.data_ptr() + 4 * width, 4 * width

    def private(self, channels: int) -> tuple[int, int]:
        """The same in each thread's own memory."""
        at, width = self.own, _width(channels)
        self.own += 4 * self.rows * width
        return at, 4 * width

    def held(self, vector: Tensor, width: int | None = None) -> int:
        """The address of a vector as float32, padded with zeros."""
        count = vector.numel()
        padded = torch.zeros(_width(count) if width is None else width)
        padded[:count] = vector.detach().float()
        self.kept.append(padded)
        return padded.data_ptr()

    # Operations

    def add(
        self, code: int, src: tuple[int, int] = (0, 0), out: tuple[int, int] = (0, 0), size: int = 0,
        more: dict[int, int] | None = None, numbers: dict[int, float] | None = None,
    ) -> None:  # fmt: skip
        row = [0] * self.k.FIELDS
        row[: self.k.SIZE_OF + 1] = [code, *src, *out, size]
        for field, value in (more or {}).items():
            row[field] = value
        values = [0.0] * self.k.NUMBERS
        for field, number in (numbers or {}).items():
            values[field] = number
        if code in (self.k.PRODUCT, self.k.GATED, self.k.SCORE, self.k.ATTEND):
            self.open.append(len(self.operations))
        self.operations.append(row)
        self.numbers.append(values)

    def wait(self) -> None:
        """Until all pieces of what was shared out since the last call are done."""
        for number in self.open:
            self.add(self.k.WAIT, (number, 0))
        self.open.clear()

    def norm(self, module: nn.Module, src: tuple[int, int], out: tuple[int, int]) -> None:
        assert isinstance(module, LayerNorm | RMSNorm)
        weight, bias = module.weight, None
        if isinstance(module, RMSNorm):
            weight = weight.detach().float() + module.offset
        else:
            bias = module.bias
        more = {
            self.k.WEIGHT: self.held(weight),
            self.k.BIAS: 0 if bias is None else self.held(bias),
            self.k.CENTRED: int(isinstance(module, LayerNorm)),
        }
        self.add(self.k.NORM, src, out, weight.numel(), more, {self.k.EPS: module.eps})

    def product(
        self, module: PackedLinear, src: tuple[int, int], out: tuple[int, int], function: str | None = None,
        cap: float | None = None, scores: bool = False,
    ) -> None:  # fmt: skip
        from mercer.backends.program_vectors import ACTIVATIONS, NONE

        weight, paired = module.weight, module.weight.paired
        bias = 0
        if module.bias is not None:
            bias = self.held(_alternating(module.bias) if paired else module.bias)
        more = {
            self.k.WEIGHT: weight.data.data_ptr(),
            self.k.BIAS: bias,
            self.k.UNITS: weight.units,
            self.k.TILES: weight.tiles // 2 if paired else weight.tiles,
            self.k.FUNCTION: NONE if function is None else ACTIVATIONS[function],
        }
        code = self.k.SCORE if scores else self.k.GATED if paired else self.k.PRODUCT
        self.add(code, src, out, 0, more, {self.k.CAP: cap or 0.0})

    def attention(self, layer: int, module: Attention, qkv: tuple[int, int]) -> dict[int, int]:
        """Attention over the cache; returns what COMBINE needs to know."""
        kernel, left = module.kernel, merge(module.structure).left
        rotary = module.rotary
        scale = kernel.default_scale(module.head_dim) if module.scale is None else module.scale
        most = self.batch * module.kv_heads * ranges(self.batch * module.kv_heads, 1 << 30)
        left_behind = torch.zeros(most * self.queries * self.k.pitch(module.head_dim, self.cached) + 16)
        self.kept.append(left_behind)
        step = 0
        if rotary is not None:
            step = rotary.turned // 2 if rotary.pairing == "half" else 1
        more = {
            self.k.LAYER: layer,
            self.k.KEY_HEADS: module.kv_heads,
            self.k.QUERIES: module.heads // module.kv_heads,
            self.k.DIM: module.head_dim,
            self.k.WINDOW: 0 if left is None else left + 1,
            self.k.SLOPES: 0 if module.slopes is None else self.held(module.slopes),
            self.k.STEP: step,
            self.k.LEFT: left_behind.data_ptr(),
        }
        cap = kernel.cap if isinstance(kernel, SoftCap) else 0.0
        self.add(self.k.ATTEND, qkv, (0, 0), 0, more, {self.k.SCALE: scale, self.k.CAP: cap})
        return more

    # The model

    def build(self, head: bool) -> Program:
        k, model = self.k, self.model
        dim = model.config.dim
        sample = model.blocks[0].attention
        wide = sample.heads * sample.head_dim
        first = torch.zeros(self.rows, _width(dim))
        x, read = self.private(dim), self.private(max(dim, wide))
        self.add(k.LOAD, (first.data_ptr(), 4 * first.shape[1]), x, dim)
        for layer, block in enumerate(model.blocks):
            self.block(layer, block, x, read)
        last = x
        if not isinstance(model.norm, nn.Identity):
            self.norm(model.norm, x, read)
            last = read
        scores = model.head
        assert isinstance(scores, PackedLinear)
        if head:
            self.product(scores, last, (0, 0), cap=model.config.logit_cap, scores=True)
            width = 16 * scores.weight.tiles
        else:  # written by each thread, all the same
            self.add(k.LOAD, last, (0, 0), dim)
            width = _width(dim)
        return self.finish(first, width)

    def block(self, layer: int, block: Block, x: tuple[int, int], read: tuple[int, int]) -> None:
        k, attention, feedforward = self.k, block.attention, block.feedforward
        dim = attention.dim
        # Buffers of its own: what a thread that lags behind still reads is not written again.
        qkv = self.shared((attention.heads + 2 * attention.kv_heads) * attention.head_dim)
        mixed, fed, inner = (self.shared(n) for n in (dim, dim, feedforward.output.weight.columns))
        post, parallel = block.norm_position == "post", block.parallel != "none"
        source = x
        if not post:
            self.norm(block.attention_norm, x, read)
            source = read
        self.product(attention.qkv, source, qkv)
        if parallel:
            if block.feedforward_norm is not None:
                self.norm(block.feedforward_norm, x, read)
            self.first(feedforward, read, inner)
        self.wait()
        known = self.attention(layer, attention, qkv)
        if parallel:
            self.product(feedforward.output, inner, fed)
        self.wait()
        self.add(k.COMBINE, (0, 0), read, 0, known)
        self.product(attention.output, read, mixed)
        self.wait()
        self.join(mixed, block.attention_norm_after, x, read, dim)
        if parallel:
            self.join(fed, None, x, read, dim)
            return
        if post:
            self.norm(block.attention_norm, x, x)
        else:
            self.norm(block.feedforward_norm, x, read)
        self.first(feedforward, x if post else read, inner)
        self.wait()
        self.product(feedforward.output, inner, fed)
        self.wait()
        self.join(fed, block.feedforward_norm_after, x, read, dim)
        if post:
            self.norm(block.feedforward_norm, x, x)

    def first(self, module: PackedFeedForward, src: tuple[int, int], out: tuple[int, int]) -> None:
        self.product(module.input, src, out, GATED.get(module.kind, module.kind))

    def join(
        self, part: tuple[int, int], after: nn.Module | None, x: tuple[int, int], read: tuple[int, int], dim: int
    ) -> None:
        """x += part, or its norm."""
        if after is not None:
            self.norm(after, part, read)
            part = read
        self.add(self.k.ADD, part, x, dim)

    def finish(self, first: Tensor, out_width: int) -> Program:
        k, sample = self.k, self.model.blocks[0].attention
        step = np.zeros(k.STEP_FIELDS, np.int64)
        counters = torch.zeros(len(self.operations) + 1, k.COUNTER // 8, dtype=torch.int64)
        columns = max(_width(m.weight.columns) for m in self.model.modules() if isinstance(m, PackedLinear))
        step[k.GROUPS], groups = self.own, 4 * (columns // 32)
        step[k.GROUPS_PITCH] = groups
        self.own += -(-groups * self.rows // 64) * 64
        step[k.SCRATCH] = self.own
        room = max(k.room(self.queries, sample.head_dim, self.cached), 32 * self.together)
        self.own += -(-4 * room // 4096) * 4096 + 4096  # pages apart, so that no two threads share a line
        own = torch.zeros(self.threads * self.own // 4 + 16)
        step[k.BATCH], step[k.ROWS] = self.batch, self.rows
        step[k.COUNTERS] = -(-counters.data_ptr() // k.COUNTER) * k.COUNTER
        step[k.OWN], step[k.OWN_SIZE] = -(-own.data_ptr() // 64) * 64, self.own
        self.kept.append(own)
        inner, scores = sample.qkv.weight, self.model.head.weight
        run = k.compiled(inner.number, scores.number, self.together, self.cached, self.taken)
        operations, numbers = np.array(self.operations, np.int64), np.array(self.numbers, np.float64)
        return Program(operations, numbers, step, run, first, counters, out_width, self.kept)


def ranges(heads: int, keys: int) -> int:
    """Ranges of a head, by sizes alone."""
    return max(min(-(-ITEMS // heads), keys // SHORTEST), 1)


def _alternating(bias: Tensor) -> Tensor:
    """The biases of a pair of matrices in the order of their tiles."""
    halves = []
    for half in bias.chunk(2):
        padded = half.new_zeros(-(-len(half) // 16) * 16)
        padded[: len(half)] = half
        halves.append(padded.view(-1, 16))
    return torch.stack(halves, 1).flatten()
