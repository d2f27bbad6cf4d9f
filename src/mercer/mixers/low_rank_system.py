"""State spaces whose A is a diagonal matrix minus one of rank one, on conjugate pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mercer.mixers.kept import Kept
from mercer.mixers.state_space import BLOCK, COMPLEX, System

HELD = 1 << 22
"""Numbers of a Cauchy matrix beyond which its gradients make it again, for some channels at a time."""


class LowRankSystem(System):
    """x' = A x + B u, y = 2 Re(C x), A = diag(rates) - p p*, by the bilinear rule.

    Of conjugate pairs of numbers one is kept, so that p* x over all of them is 2 Re(sum conj(p) x) over those kept.

    rates, low (p), write (B), read (C): ``[H, M]`` complex128. step: the time between tokens, ``[H]`` float64.
    """

    def __init__(
        self, rates: Tensor, low: Tensor, write: Tensor, read: Tensor, step: Tensor, dtype: torch.dtype
    ) -> None:
        self.dtype, self.size = dtype, 2 * rates.shape[1]
        self.rates, self.low, self.write, self.read = rates, low, write, read
        self.pace = (2 / step).unsqueeze(1)
        self.inverse = 1 / (self.pace - rates)

    def step(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """By Woodbury's identity, in O(N): (2/dt - A) x_t = (2/dt + A) x_{t-1} + 2 B u_t."""
        kind = COMPLEX[self.dtype]
        after = self._step(torch.view_as_complex(state.unflatten(-1, (-1, 2))), u.unsqueeze(-1), kind)
        return 2 * (self.read.to(kind) * after).real.sum(-1), torch.view_as_real(after).flatten(-2)

    def _step(self, x: Tensor, u: Tensor, kind: torch.dtype) -> Tensor:
        low, inverse = self.low.to(kind), self.inverse.to(kind)
        forth = (self.pace + self.rates).to(kind) * x - low * _inner(low, x) + 2 * self.write.to(kind) * u
        back = inverse * forth
        turned = inverse * low
        return back - turned * (_inner(low, back) / (1 + _inner(low, turned)))

    def kernel(self, count: int) -> Tensor:
        """From the generating function at the roots of unity of some order T, truncated to T numbers,

            sum_{l<T} K_l z^l = (C - C A^T) (1 - A z)^-1 B    where z^T = 1,

        which by Woodbury's identity needs no more than sums over n of x_n y_n / (2 (1 - z) / dt - (1 + z) rate_n).
        """
        order = 1 << (max(count, 1) - 1).bit_length()
        truncated = self.read - self._row(self._read_row() @ self._moved(order))
        parts = (self.rates, self.low, self.write, truncated, self.pace)
        roots = order // 2 + 1
        some = max(HELD // (roots * self.rates.shape[1]), 1)
        if some >= len(self.rates):
            spectrum = _generating(*parts, order)
        else:
            spectrum = torch.cat(
                [
                    checkpoint(_generating, *each, order, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportArgumentType]
                    for each in zip(*(part.split(some) for part in parts), strict=True)
                ]
            )
        return torch.fft.irfft(spectrum, n=order)[:, :count].to(self.dtype)

    @Kept
    def reads(self) -> Tensor:
        columns = self._squares[0] @ self._read_row().transpose(1, 2)
        for square in self._squares[:-1]:
            columns = torch.cat((columns, square @ columns), 2)
        return columns.to(self.dtype)

    @Kept
    def writes(self) -> Tensor:
        nothing, one = torch.zeros_like(self.rates), self.pace.new_ones(1)
        rows = torch.view_as_real(self._step(nothing, one, torch.complex128)).flatten(1).unsqueeze(1)
        for square in self._squares[:-1]:
            rows = torch.cat((rows @ square, rows), 1)
        return rows.to(self.dtype)

    def move(self, state: Tensor, doublings: int) -> Tensor:
        return state @ self._moves[doublings]

    @Kept
    def _moves(self) -> list[Tensor]:
        """The squares in the precision of the states."""
        return [square.to(self.dtype) for square in self._squares]

    @Kept
    def _squares(self) -> list[Tensor]:
        """Transposes of A^1, A^2, A^4, ..., A^BLOCK on real and imaginary parts, ``[H, N, N]``, from unit vectors."""
        eye = torch.eye(self.size, dtype=torch.float64, device=self.rates.device)
        units = torch.view_as_complex(eye.unflatten(1, (-1, 2)))
        moved = self._step(units.unsqueeze(1), self.pace.new_zeros(1), torch.complex128)
        out = [torch.view_as_real(moved).flatten(2).transpose(0, 1)]
        while 1 << (len(out) - 1) < BLOCK:
            out.append(out[-1] @ out[-1])
        return out

    def _moved(self, order: int) -> Tensor:
        """The transpose of A^order, for a power of two."""
        doublings = order.bit_length() - 1
        found = self._squares[min(doublings, len(self._squares) - 1)]
        for _ in range(doublings - len(self._squares) + 1):
            found = found @ found
        return found.transpose(1, 2)

    def _read_row(self) -> Tensor:
        """C on real and imaginary parts, ``[H, 1, N]``."""
        return torch.stack((2 * self.read.real, -2 * self.read.imag), -1).flatten(1).unsqueeze(1)

    def _row(self, row: Tensor) -> Tensor:
        """C from what it is on real and imaginary parts."""
        pairs = row.squeeze(1).unflatten(1, (-1, 2)) / 2
        return torch.complex(pairs[..., 0], -pairs[..., 1])


def _inner(p: Tensor, x: Tensor) -> Tensor:
    """p* x over all conjugate pairs, a last dimension of one."""
    return 2 * (p.conj() * x).real.sum(-1, keepdim=True)


def _generating(rates: Tensor, low: Tensor, write: Tensor, read: Tensor, pace: Tensor, order: int) -> Tensor:
    """C (1 - A z)^-1 B at the roots of unity z = e^(-i turn) from 1 to -1, ``[H, order // 2 + 1]``.

    A pair of conjugate numbers with the product q = x y adds q / d + conj(q) / conj(d at conj(z)), d = pace (1 - z) -
    rate (1 + z), of which the common denominator over z is, with s and c the sine and cosine of turn / 2,
    4 |rate|^2 c^2 - 4 pace^2 s^2 - 8 i Re(rate) pace s c: all of it real arithmetic.
    """
    half = torch.arange(order // 2 + 1, dtype=torch.float64, device=rates.device) * (torch.pi / order)
    sine, cosine = half.sin(), half.cos()
    size = rates.abs().square().unsqueeze(1)
    real = 4 * (size * cosine.square().unsqueeze(1) - (pace.square() * sine.square()).unsqueeze(-1))
    imaginary = -8 * (pace * sine * cosine).unsqueeze(-1) * rates.real.unsqueeze(1)
    norm = 1 / (real.square() + imaginary.square())
    products = torch.stack((read * write, read * low, low.conj() * write, low.conj() * low), -1)  # [H, M, 4]
    # Numerators: 2 Re(q) pace (1 - z) - 2 Re(q conj(rate)) (1 + z).
    factors = 2 * torch.cat((products.real, (products * rates.conj().unsqueeze(-1)).real), -1)
    inverse = torch.complex((real * norm) @ factors, -((imaginary * norm) @ factors))
    z = torch.polar(torch.ones_like(half), -2 * half)
    ahead, behind = (pace * (1 - z) / z).unsqueeze(-1), ((1 + z) / z).unsqueeze(-1)
    both, first, second, middle = (ahead * inverse[..., :4] - behind * inverse[..., 4:]).unbind(-1)
    return 2 * (both - (1 + z) * first * second / (1 + (1 + z) * middle))
