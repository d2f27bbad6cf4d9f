"""Absolute positions: counting real tokens, sinusoids, a learned table, and the slopes of ALiBi.

A position is the number of *real* tokens before a token in its own sequence. Padding has no position of its own, so a
batch with left padding, right padding or holes sees exactly the positions of the unpadded sequences, and a sequence
that continues from a state goes on counting where the state stopped. Packed documents are sequences of their own.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.nn.reach import refuse_longer


def token_positions(
    batch: int,
    length: int,
    *,
    padding: Tensor | None = None,
    bounds: Sequence[int] | None = None,
    offset: Tensor | None = None,
    device: torch.device,
) -> Tensor:
    """Positions of `length` tokens for each row of a batch.

    padding: bool [batch, length], True for real tokens. bounds: N + 1 numbers that rise from 0 to length, where N
    packed documents begin and end (without padding); each counts from its own start. offset: int64, real tokens
    already seen, [batch], or with bounds [batch N], entry b N + d for document d of row b, as a state's `length`.
    Returns int64 [batch, length], or [1, length] where all rows are equal (no padding, no offset).
    A masked token gets the position of the last real token before it (0 if there is none).
    """
    each = batch if bounds is None else batch * (len(bounds) - 1)
    if offset is not None and offset.shape != (each,):
        what = "row" if bounds is None else "document of each row"
        raise InvalidArgument(
            f"offsets of positions (the lengths of a state) must be one for each {what}, [{each}], "
            f"got {list(offset.shape)}"
        )
    if bounds is not None:
        if padding is not None:
            raise InvalidArgument("positions take padding or the bounds of packed documents, not both")
        edges = torch.tensor(bounds, device=device)
        sizes = edges.diff()
        positions = torch.arange(length, device=device)[None] - edges[:-1].repeat_interleave(sizes)
        if offset is not None:
            positions = positions + offset.to(device).view(batch, -1).repeat_interleave(sizes, 1)
        return positions
    if padding is None:
        positions = torch.arange(length, device=device)[None]
    else:
        if padding.shape != (batch, length) or padding.dtype != torch.bool:
            raise InvalidArgument(
                f"padding must be a bool tensor of shape [{batch}, {length}], "
                f"got {padding.dtype} of shape {list(padding.shape)}"
            )
        positions = (padding.to(torch.int64).cumsum(1) - 1).clamp_min(0)
    if offset is not None:
        positions = positions + offset.to(device)[:, None]
    return positions


def angle_dtype(device: torch.device) -> torch.dtype:
    """float64 wherever the device has it: float32 angles lose a digit for every factor ten of the position."""
    return torch.float32 if device.type == "mps" else torch.float64


class Sinusoidal(nn.Module):
    """Fixed sinusoids of geometrically spaced wavelengths (Vaswani et al. 2017).

    With w_i = base^(-2i/dim), i = 0..dim/2-1, the encoding of position p has the pair (sin(p w_i), cos(p w_i)) at
    channels (2i, 2i+1) for layout="interleaved" (the original), and at channels (i, i + dim/2) for layout="split"
    (sines first, as Marian stores them). Angles are computed in float64 where the device has it.

    max_length: the longest sequence that the model was trained on; positions beyond it are refused. Default None, any.
    """

    def __init__(
        self, dim: int, *, base: float = 10000.0, layout: str = "interleaved", max_length: int | None = None
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise InvalidArgument(f"sinusoidal positions need an even dim of at least 2, got {dim}")
        if layout not in ("interleaved", "split"):
            raise InvalidArgument(
                f'the layout of sinusoidal positions must be "interleaved" or "split", got {layout!r}'
            )
        if max_length is not None and max_length < 1:
            raise InvalidArgument(f"max_length of sinusoidal positions must be 1 or more, got {max_length}")
        self.dim, self.base, self.layout, self.max_length = dim, base, layout, max_length

    def forward(self, positions: Tensor) -> Tensor:
        """positions: any integer tensor [...]; returns float32 [..., dim]."""
        _refuse_other_than_integers(self, positions)
        if self.max_length is not None and positions.numel():
            refuse_longer(
                "sinusoidal positions were trained for",
                int(positions.max()) + 1,
                self.max_length,
                "give max_length=None to let them run on",
            )
        wide = angle_dtype(positions.device)
        exponent = torch.arange(0, self.dim, 2, device=positions.device, dtype=wide) / self.dim
        angles = positions[..., None].to(wide) * self.base**-exponent
        if self.layout == "split":
            return torch.cat((angles.sin(), angles.cos()), -1).float()
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).float()

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}, layout={self.layout!r}"


class LearnedPositions(nn.Module):
    """One learned vector a position, for positions 0..max_length-1. Longer sequences are refused, never wrapped."""

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        if max_length < 1 or dim < 1:
            raise InvalidArgument(
                f"learned positions need max_length and dim of at least 1, got {max_length} and {dim}"
            )
        self.weight = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """positions: int64 [...]; returns [..., dim] in the weight's dtype."""
        _refuse_other_than_integers(self, positions)
        limit = self.weight.shape[0]
        if positions.numel() and int(positions.max()) >= limit:
            raise InvalidArgument(
                f"position {int(positions.max())} was asked of a learned table of {limit} positions; "
                "use shorter sequences or a larger max_length"
            )
        return nn.functional.embedding(positions, self.weight)


def _refuse_other_than_integers(module: nn.Module, positions: Tensor) -> None:
    """The input in place of its positions would be taken for far too many of them."""
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise InvalidArgument(
            f"{type(module).__name__} takes positions, integers such as torch.arange(length), not {positions.dtype} "
            f"{list(positions.shape)}; add what it returns to the input"
        )


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slope for each head, float32 [heads] (Press et al. 2022).

    For heads = n a power of two the slopes are 2^(-8i/n), i = 1..n. For other n they are those of the largest power
    of two m below n, followed by every other slope (the first, third, ...) of 2m heads.
    """
    if heads < 1:
        raise InvalidArgument(f"ALiBi needs at least one head, got {heads}")
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes)
