"""State spaces whose A is diagonal: powers of single numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.mixers.kept import Kept
from mercer.mixers.state_space import BLOCK, COMPLEX, System


class DiagonalSystem(System):
    """x' = A x + u with A diagonal, read by C: y = C x for real numbers, y = 2 Re(C x) for complex ones, of which each
    stands for itself and its conjugate.

    rates: A, ``[H, M]`` float64 or complex128. read: C, the same. step: the time between tokens, ``[H]`` float64.
    rule: ``zoh`` (u stays as it is between tokens) or ``bilinear``.
    """

    def __init__(self, rates: Tensor, read: Tensor, step: Tensor, rule: str, dtype: torch.dtype) -> None:
        self.dtype, self.read = dtype, read
        self.size = rates.shape[1] * (2 if rates.is_complex() else 1)
        turned = rates * step.unsqueeze(1)
        if rule == "zoh":
            self.keep = turned.exp()
            self.write = (self.keep - 1) / rates
        else:
            half = 1 - turned / 2
            self.keep = (1 + turned / 2) / half
            self.write = step.unsqueeze(1) / half

    def step(self, state: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        keep, write, read = (self._numbers(x) for x in (self.keep, self.write, self.read))
        after = keep * self._pairs(state) + write * u.unsqueeze(-1)
        if not after.is_complex():
            return (read * after).sum(-1), after
        return 2 * (read * after).real.sum(-1), torch.view_as_real(after).flatten(-2)

    def kernel(self, count: int) -> Tensor:
        """The product of two Vandermonde matrices, of powers of A^BLOCK and of A: l = i BLOCK + j."""
        blocks = -(-count // BLOCK)
        outer = self._table(powers(self._doubled[-1], blocks, self._kind).transpose(1, 2))
        inner = self._readers(self._numbers(self.read * self.write).unsqueeze(-1) * self._powers)
        return (outer @ inner).flatten(1)[:, :count]

    @Kept
    def reads(self) -> Tensor:
        return self._readers(self._numbers(self.read * self.keep).unsqueeze(-1) * self._powers)

    @Kept
    def writes(self) -> Tensor:
        return self._table((self._numbers(self.write).unsqueeze(-1) * self._powers.flip(-1)).transpose(1, 2))

    def move(self, state: Tensor, doublings: int) -> Tensor:
        moved = self._numbers(self._doubled[doublings]).unsqueeze(1) * self._pairs(state)
        return torch.view_as_real(moved).flatten(-2) if moved.is_complex() else moved

    @Kept
    def _powers(self) -> Tensor:
        """A^0 to A^(BLOCK-1), ``[H, M, BLOCK]``, in the precision of the states."""
        return powers(self.keep, BLOCK, self._kind)

    @Kept
    def _doubled(self) -> list[Tensor]:
        """A^1, A^2, A^4, ..., A^BLOCK."""
        out = [self.keep]
        while 1 << (len(out) - 1) < BLOCK:
            out.append(out[-1] * out[-1])
        return out

    @property
    def _kind(self) -> torch.dtype:
        return COMPLEX[self.dtype] if self.keep.is_complex() else self.dtype

    def _numbers(self, x: Tensor) -> Tensor:
        """In the precision of the states."""
        return x.to(self._kind)

    def _pairs(self, state: Tensor) -> Tensor:
        """States as the numbers they are."""
        return torch.view_as_complex(state.unflatten(-1, (-1, 2))) if self.keep.is_complex() else state

    def _table(self, x: Tensor) -> Tensor:
        """``[..., M]`` as ``[..., N]``."""
        return torch.view_as_real(x).flatten(-2) if x.is_complex() else x

    def _readers(self, x: Tensor) -> Tensor:
        """``[H, N, count]`` whose product with real states is y, for factors ``[H, M, count]``."""
        return torch.stack((2 * x.real, -2 * x.imag), 2).flatten(1, 2) if x.is_complex() else x


def powers(x: Tensor, count: int, kind: torch.dtype | None = None) -> Tensor:
    """x^0 to x^(count-1), in a new last dimension, by doubling: each is a product of some of x, x^2, x^4, ..., which
    have the precision of x and are multiplied in that of `kind`, x's own by default.
    """
    factor = x.unsqueeze(-1)
    out = torch.ones_like(factor, dtype=kind)
    while out.shape[-1] < count:
        out = torch.cat((out, out * factor.to(out.dtype)), -1)
        factor = factor * factor
    return out[..., :count]
