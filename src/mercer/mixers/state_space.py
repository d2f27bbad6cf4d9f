"""Linear state spaces, one for each channel: every form of the same recurrence.

    x_t = A x_{t-1} + B u_t,     y_t = C x_t + D u_t

A, B and C are discretised, and the same for all tokens, so y is also the convolution of u with K_l = C A^l B. States
are kept in real numbers, N of them for each channel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.mixers.base import Mixer
from mercer.mixers.kept import Kept

FORMS = ("auto", "recurrent", "chunked", "convolution")
BLOCK = 64
"""Tokens between two states that are kept; a power of two."""
LONGEST = 2048
"""Tokens of one convolution; longer inputs go in pieces, with a state from one to the next."""
FEW = 8
"""Tokens up to which steps are quicker than tables of powers."""
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
"""The numbers that pairs of a state's are; a table, since compilers do not trace `to_complex`."""


class System(ABC):
    """A, B and C of H channels after discretisation.

    size: N. dtype: of states and of what is read, float32 or float64; tables are made in float64.
    """

    size: int
    dtype: torch.dtype

    @abstractmethod
    def step(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """One token u ``[B, H]``: y ``[B, H]`` without D, and the state after ``[B, H, N]``, from the one before."""

    @abstractmethod
    def kernel(self, count: int) -> Tensor:
        """K_0 to K_{count-1}, ``[H, count]``."""

    @Kept
    @abstractmethod
    def reads(self) -> Tensor:
        """``[H, N, BLOCK]``: column j is C A^(j+1), what token j of a block sees of the state before the block."""

    @Kept
    @abstractmethod
    def writes(self) -> Tensor:
        """``[H, BLOCK, N]``: row j is A^(BLOCK-1-j) B, what token j of a block leaves in the state after the block."""

    @abstractmethod
    def move(self, state: Tensor, doublings: int) -> Tensor:
        """A^(2^doublings) x of states ``[H, B, N]``, for 2^doublings of at most BLOCK."""


class StateSpace(Mixer):
    """y = glu(W gelu(SSM(x)) + b), for an SSM with a skip D x that a subclass describes by `system`.

    Every form takes time and memory in proportion to the length.
    """

    undecayed = ("log_rate", "frequency")

    def __init__(self, dim: int, *, shape: tuple[int, int], form: str, glu: bool) -> None:
        super().__init__()
        if form not in FORMS:
            raise InvalidArgument(f"form must be one of {', '.join(FORMS)}, not {form!r}")
        self.dim, self.shape, self.form, self.glu = dim, shape, form, glu
        self.log_step = nn.Parameter(torch.empty(dim))
        self.skip = nn.Parameter(torch.empty(dim))
        self.output = nn.Linear(dim, 2 * dim if glu else dim)
        self._made: tuple[torch.dtype, list[Tensor], System] | None = None

    def _start_common(self, least: float, most: float, generator: torch.Generator | None) -> None:
        """Steps log-uniform between the two, D from N(0, 1)."""
        drawn = torch.rand(self.dim, generator=generator)
        self.log_step.copy_(math.log(least) + (math.log(most) - math.log(least)) * drawn)
        self.skip.normal_(generator=generator)

    @abstractmethod
    def system(self, dtype: torch.dtype) -> System:
        """A, B and C of the parameters as they are, with states in `dtype`."""

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            u = x.to(wide)
            state = None if past is None else past["state"].to(wide).flatten(2)
            y, after = run(self._system(wide, x.shape[1]), u, state=state, lengths=lengths, form=self.form)
            y = nn.functional.gelu(y + self.skip.to(wide) * u).to(x.dtype)
        out = self.output(y)
        return nn.functional.glu(out, -1) if self.glu else out, {"state": after.unflatten(2, self.shape)}

    def _system(self, dtype: torch.dtype, length: int) -> System:
        """The same. For steps without a gradient it is kept for the next call, while the parameters have its values;
        the tables of longer calls are not, since they are larger than the parameters.
        """
        if torch.is_grad_enabled() or length > FEW or torch.compiler.is_compiling():  # which compares no values
            return self.system(dtype)
        now = [p for name, p in self.named_parameters(recurse=False) if name != "skip"]
        if self._made is not None:
            kind, values, system = self._made
            if kind == dtype and all(
                p.device == v.device and p.dtype == v.dtype and torch.equal(p, v)
                for p, v in zip(now, values, strict=True)
            ):
                return system
        system = self.system(dtype)
        self._made = dtype, [p.detach().clone() for p in now], system
        return system


def run(
    system: System, u: Tensor, *, state: Tensor | None = None, lengths: Tensor | None = None, form: str = "auto"
) -> tuple[Tensor, Tensor]:
    """y of u ``[B, L, H]`` without D, and the state after the real tokens, which are the first lengths[b] of row b and
    have zeros behind them. state: before, ``[B, H, N]``; None: 0. form: ``recurrent`` takes token by token; ``chunked``
    blocks of 64 tokens by matrix products; ``convolution`` up to 2,048 tokens by the fast Fourier transform, a state
    carried on; ``auto`` steps for few tokens and blocks for more.
    """
    batch, length, channels = u.shape
    if form == "auto":
        form = "recurrent" if length <= FEW else "chunked"
    begin = u.new_zeros(batch, channels, system.size) if state is None else state
    if form == "recurrent":
        return _recurrent(system, u, begin, lengths)
    outs: list[Tensor] = []
    now, begun, transform = begin.transpose(0, 1), state is not None, form == "convolution"
    kernel = system.kernel(min(length, LONGEST)) if transform else _triangle(system.kernel(BLOCK))
    for start in range(0, length, LONGEST):
        piece = u[:, start : start + LONGEST]
        counts = None if lengths is None else (lengths - start).clamp(0, piece.shape[1])
        out, now = _piece(system, kernel, piece, now, counts, begun=begun or start > 0, transform=transform)
        outs.append(out)
    return torch.cat(outs, 1), now.transpose(0, 1)


def _recurrent(system: System, u: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    rows: list[Tensor] = []
    for t, token in enumerate(u.unbind(1)):
        y, moved = system.step(state, token)
        state = moved if lengths is None else torch.where((t < lengths)[:, None, None], moved, state)
        rows.append(y)
    return torch.stack(rows, 1), state


def _piece(
    system: System, kernel: Tensor, u: Tensor, state: Tensor, counts: Tensor | None, *, begun: bool, transform: bool
) -> tuple[Tensor, Tensor]:
    """y of some tokens and the state after them, from ``[H, B, N]``. kernel: as many numbers as there are tokens, or
    the triangle of a block. begun: whether the state may be other than 0.
    """
    batch, length, channels = u.shape
    blocks = -(-length // BLOCK)
    padded = nn.functional.pad(u, (0, 0, 0, blocks * BLOCK - length)).view(batch, blocks, BLOCK, channels)
    rows: Tensor = _Turned.apply(padded, (3, 1, 0, 2)).view(channels, blocks * batch, BLOCK)
    left = (rows @ system.writes).view(channels, blocks, batch, system.size).unbind(1)
    befores = [state]
    for each in left[: length // BLOCK]:
        befores.append(system.move(befores[-1], _DOUBLINGS) + each)
    after = _after(system, u, befores, counts)
    if transform:
        y = _convolved(_Turned.apply(u, (0, 2, 1)), kernel[:, :length]).transpose(0, 1)
        if begun:  # what is left of the state alone
            free = [state]
            for _ in range(blocks - 1):
                free.append(system.move(free[-1], _DOUBLINGS))
            y = y + (torch.stack(free, 2) @ system.reads.unsqueeze(1)).flatten(2)[..., :length]
        return y.permute(1, 2, 0), after
    seen = torch.stack(befores[:blocks], 1).flatten(1, 2)
    y = torch.baddbmm(rows @ kernel, seen, system.reads)
    y = _Turned.apply(y.view(channels, blocks, batch, BLOCK), (2, 1, 3, 0))
    return y.flatten(1, 2)[:, :length], after


def _after(system: System, u: Tensor, befores: list[Tensor], counts: Tensor | None) -> Tensor:
    """The state after all tokens, or after counts[b] of row b: from the last one kept before it, and what follows."""
    length = u.shape[1]
    if counts is None:
        state, rest = befores[length // BLOCK], length % BLOCK
        if not rest:
            return state
        for k in range(_DOUBLINGS):
            if rest >> k & 1:
                state = system.move(state, k)
        return state + u[:, length - rest :].permute(2, 0, 1) @ system.writes[:, BLOCK - rest :]
    whole, rest = counts // BLOCK, counts % BLOCK
    state = torch.stack(befores)[whole, :, torch.arange(len(counts), device=u.device)].transpose(0, 1)
    for k in range(_DOUBLINGS):
        state = torch.where((rest >> k & 1 > 0)[:, None], system.move(state, k), state)
    places = counts.unsqueeze(1) - BLOCK + torch.arange(BLOCK, device=u.device)  # the last tokens, at a block's end
    there = places >= (whole * BLOCK).unsqueeze(1)
    last = u.gather(1, places.clamp_min(0).unsqueeze(-1).expand(-1, -1, u.shape[2]))
    last = last.masked_fill(~there.unsqueeze(-1), 0)
    return torch.where((counts > 0)[:, None], state + last.permute(2, 0, 1) @ system.writes, befores[0])


_DOUBLINGS = BLOCK.bit_length() - 1


class _Turned(torch.autograd.Function):
    """x.permute(dims) laid out anew, and its gradient too: matrix products of many items are slow on rows in pieces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.back = tuple(dims.index(i) for i in range(len(dims)))
        return x.permute(dims).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Turned.apply(grads[0], ctx.back), None


def _convolved(u: Tensor, kernel: Tensor) -> Tensor:
    """sum_l K_l u_{t-l} for u ``[B, H, L]`` and K ``[H, L]``, by a transform of at least twice the length."""
    if not u.shape[0]:  # transforms refuse to be of nothing
        return u
    length = u.shape[-1]
    size = 1 << (2 * length - 1).bit_length()
    if 3 * size // 4 >= 2 * length - 1:
        size = 3 * size // 4
    spectrum = torch.fft.rfft(u, n=size) * torch.fft.rfft(kernel, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., :length]


def _triangle(kernel: Tensor) -> Tensor:
    """``[H, BLOCK, BLOCK]`` with K_{k-j} in row j and column k."""
    return nn.functional.pad(kernel, (BLOCK - 1, 0)).unfold(1, BLOCK, 1).flip(1)
