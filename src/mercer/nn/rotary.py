"""Rotary positions: pairs of channels turned by an angle that grows with the position (Su et al. 2021)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument
from mercer.nn.positions import angle_dtype
from mercer.nn.reach import refuse_longer
from mercer.nn.rope_scaling import RopeScaling, plain_rates

RUN = 128
"""Channels turned by one inner loop: rows shorter than this spend their time in loop overhead."""
KEPT = 64
"""Positions up to which their factors are kept for the next layer."""
FIX = "give the positions a scaling such as YaRN(factor=..., trained=...), or say allow_longer=True"


class Turns(NamedTuple):
    """What turning by given positions multiplies with; each tensor [B or 1, L, W], W channels of one or more heads.

    y[j] = x[j] cos[j] + x[j + step] ahead[j] + x[j - step] behind[j]

    where `ahead` is -sin at the first channel of each pair and 0 at the second, and `behind` is 0 and sin; where
    nothing turns cos is 1 and both are 0. All three terms are long shifted products, so no channel is gathered; a shift
    that leaves its head meets a factor of 0.
    """

    cos: Tensor
    ahead: Tensor
    behind: Tensor
    step: int


class Rotary(nn.Module):
    """Rotates queries and keys so that their product depends on the distance of their positions only.

    With w_i = base^(-2i/dim), i = 0..dim/2-1, pair i of the channels of a token at position p is turned by p w_i:

        (a, b) -> (a cos(p w_i) - b sin(p w_i),  b cos(p w_i) + a sin(p w_i))

    pairing="half" (default) pairs channels (i, i + dim/2), as checkpoints of the Hugging Face hub do;
    pairing="interleaved" pairs channels (2i, 2i + 1), as Meta's and GGUF's do. The two differ by a permutation of the
    channels of queries and keys (never of the values). Angles are computed in float64 where the device has it, and the
    rotation in float32 at least. The factors of positions 0..n-1 are kept once n is known.

    Args:
        dim: channels of a head.
        base: of the rates; default 10000.
        pairing: see above.
        turned: only the first `turned` channels of a head turn, as a head of that many would, and the others stay (as
            in GPT-NeoX, GPT-J and Phi); even; default all.
        scaling: other rates, for longer sequences than the model was trained on (:mod:`mercer.nn.rope_scaling`).
        max_length: the longest sequence that the model was trained on, or is meant for; None: not known.
        allow_longer: let sequences be longer than max_length, or than the scaling carries it, without complaint.
    """

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10000.0,
        pairing: str = "half",
        turned: int | None = None,
        scaling: RopeScaling | None = None,
        max_length: int | None = None,
        allow_longer: bool = False,
    ) -> None:
        super().__init__()
        turned = dim if turned is None else turned
        if dim < 2 or (turned == dim and dim % 2):
            raise InvalidArgument(f"rotary positions need an even head dimension of at least 2, got {dim}")
        if turned < 2 or turned > dim or turned % 2:
            raise InvalidArgument(
                f"rotary positions turn an even number of channels from 2 to those of a head, {dim}; got {turned}"
            )
        if not 0 < base < math.inf:
            raise InvalidArgument(f"the base of rotary positions must be positive, got {base}")
        if pairing not in ("half", "interleaved"):
            raise InvalidArgument(f'the pairing of rotary positions must be "half" or "interleaved", got {pairing!r}')
        if not isinstance(scaling, RopeScaling | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"scaling of rotary positions must be an object such as YaRN(factor=4, trained=2048), not {scaling!r}"
            )
        if max_length is not None and max_length < 1:
            raise InvalidArgument(f"max_length of rotary positions must be 1 or more, got {max_length}")
        if scaling is not None:
            scaling.check(turned)
        self.dim, self.base, self.pairing, self.turned, self.scaling = dim, base, pairing, turned, scaling
        self.max_length, self.allow_longer = max_length, allow_longer
        self._kept: tuple[object, Turns] | None = None
        self._kept_rates: Tensor | None = None
        self._last: tuple[Tensor, int, torch.dtype, Turns] | None = None

    @property
    def by_length(self) -> bool:
        """Whether the rates depend on the length of the sequence."""
        return self.scaling is not None and self.scaling.by_length

    @property
    def reach(self) -> int | None:
        """The longest sequence that is not refused; None: any."""
        if self.max_length is None or self.allow_longer:
            return None
        return self.max_length if self.scaling is None else self.scaling.reach(self.max_length)

    def check_length(self, length: int) -> None:
        """Raise :class:`InvalidArgument` if a sequence of so many tokens is longer than :attr:`reach`."""
        if self.reach is not None:
            whose = "rotary positions were trained for" if self.scaling is None else f"{self.scaling} carries them to"
            refuse_longer(whose, length, self.reach, FIX)

    def turns(
        self,
        positions: Tensor,
        *,
        heads: int = 1,
        dtype: torch.dtype = torch.float32,
        lengths: Tensor | None = None,
    ) -> Turns:
        """The factors for int positions [B or 1, L], repeated for `heads` heads side by side.

        Those of a few positions are kept until others are asked for: every layer of a model asks for the same ones.
        lengths: int [B or 1, L or 1], that of each token's sequence, for a scaling that depends on it; default the
        largest position of each row plus 1.
        """
        if self.by_length:
            if lengths is None:
                lengths = positions.amax(1, keepdim=True) + 1 if positions.numel() else positions[:, :1]
            return self._turns(positions, heads, dtype, lengths)
        plain = type(positions) is Tensor and positions.is_cpu and not torch.compiler.is_compiling()
        if not plain or positions.numel() > KEPT:
            return self._turns(positions, heads, dtype)
        last = self._last
        same = last is not None and last[1:3] == (heads, dtype) and last[0].dtype == positions.dtype
        if last is None or not same or not torch.equal(last[0], positions):
            with torch.inference_mode(False):  # for later calls, which may record gradients
                last = self._last = (positions.clone(), heads, dtype, self._turns(positions.clone(), heads, dtype))
        return last[3]

    def _turns(self, positions: Tensor, heads: int, dtype: torch.dtype, lengths: Tensor | None = None) -> Turns:
        wide = angle_dtype(positions.device)
        angles = positions[..., None].to(wide) * self._rates(positions.device, wide, lengths)
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None and self.scaling.temperature != 1:
            cos, sin = cos * self.scaling.temperature, sin * self.scaling.temperature
        cos, sin = cos.to(dtype), sin.to(dtype)
        zero = torch.zeros_like(sin)
        if self.pairing == "half":
            full = [torch.cat(pair, -1) for pair in ((cos, cos), (-sin, zero), (zero, sin))]
        else:
            full = [torch.stack(pair, -1).flatten(-2) for pair in ((cos, cos), (-sin, zero), (zero, sin))]
        if self.turned < self.dim:
            still = (0, self.dim - self.turned)
            full = [nn.functional.pad(t, still, value=rest) for t, rest in zip(full, (1.0, 0.0, 0.0), strict=True)]
        cos, ahead, behind = (t.repeat(*(1,) * (t.dim() - 1), heads) for t in full)
        return Turns(cos, ahead, behind, self.turned // 2 if self.pairing == "half" else 1)

    def _rates(self, device: torch.device, dtype: torch.dtype, lengths: Tensor | None) -> Tensor:
        """Radians a position for the pairs of channels, [turned / 2]; the last one asked for is kept. By length:
        [*lengths.shape, turned / 2].
        """
        if self.by_length:
            assert self.scaling is not None
            return self.scaling.rates(self.turned, self.base, lengths, device=device, dtype=dtype)
        kept = self._kept_rates
        if kept is None or kept.device != device or kept.dtype != dtype or torch.compiler.is_compiling():
            with torch.inference_mode(False), torch.no_grad():  # for later calls, which may record gradients
                if self.scaling is None:
                    kept = plain_rates(self.turned, self.base, device=device, dtype=dtype)
                else:
                    kept = self.scaling.rates(self.turned, self.base, None, device=device, dtype=dtype)
            if not torch.compiler.is_compiling():
                self._kept_rates = kept
        return kept

    def first_turns(self, length: int, *, heads: int, dtype: torch.dtype, device: torch.device) -> Turns:
        """The factors of positions 0..length-1, from a table that grows by doubling. Not for rates by length."""
        if self.by_length:
            raise InvalidArgument(f"{self.scaling} has no one table of turns: ask for turns(positions, lengths=...)")
        key = (heads, dtype, device)
        if self._kept is None or self._kept[0] != key or self._kept[1].cos.shape[1] < length:
            size = 1 << max(length - 1, 1).bit_length()
            with torch.inference_mode(False), torch.no_grad():  # for later calls, which may record gradients
                self._kept = (key, self.turns(torch.arange(size, device=device)[None], heads=heads, dtype=dtype))
        cos, ahead, behind, step = self._kept[1]
        return Turns(cos[:, :length], ahead[:, :length], behind[:, :length], step)

    def forward(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x: [B, L, H, dim]; positions: int64 [B, L] or [1, L]; lengths as of `turns`. Returns x turned, in its dtype.

        Raises:
            InvalidArgument: a position lies beyond `reach`, or shapes do not fit.
        """
        if x.dim() != 4 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"rotary positions expect [B, L, H, {self.dim}], got a tensor of {list(x.shape)}")
        if positions.shape not in (x.shape[:2], (1, x.shape[1])):
            allowed = " or ".join(dict.fromkeys(f"[{rows}, {x.shape[1]}]" for rows in (x.shape[0], 1)))
            raise InvalidArgument(
                f"rotary positions must be {allowed} for x [B, L, H, D] = {list(x.shape)}, got {list(positions.shape)}"
            )
        if self.reach is not None and positions.numel():
            self.check_length(int(positions.max()) + 1)
        return self.turn(x, positions, lengths)

    def turn(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """As `forward`, of arguments that were checked."""
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, ahead, behind, step = self.turns(positions, dtype=wide, lengths=lengths)
        y = x.to(wide)
        left, right = y.roll(-step, -1), y.roll(step, -1)
        return (y * cos[:, :, None] + left * ahead[:, :, None] + right * behind[:, :, None]).to(x.dtype)

    def extra_repr(self) -> str:
        some = "" if self.turned == self.dim else f", turned={self.turned}"
        scaled = "" if self.scaling is None else f", scaling={self.scaling}"
        known = "" if self.max_length is None else f", max_length={self.max_length}, allow_longer={self.allow_longer}"
        return f"dim={self.dim}, base={self.base}, pairing={self.pairing!r}{some}{scaled}{known}"


def heads_per_run(dim: int, *heads: int) -> int:
    """How many heads of `dim` channels to turn in one run: a divisor of all head counts, RUN channels at most."""
    common = math.gcd(*heads)
    return next(n for n in range(common, 0, -1) if common % n == 0 and (n == 1 or n * dim <= RUN))


def split_and_turn(qkv: Tensor, heads: int, kv_heads: int, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, L, H, D] of one fused projection, queries and keys turned.

    qkv: [B, L, heads + 2 kv_heads, D], in that order. turns: made for `heads_per_run(D, heads, kv_heads)` heads.
    Equals Rotary.forward on the split parts; the backward pass writes one gradient buffer.
    """
    batch, length, count, dim = qkv.shape
    width = heads_per_run(dim, heads, kv_heads) * dim
    sizes = [(rows, length, width) for rows in (1, batch)]
    fits = any(turns.cos.shape == size for size in sizes)  # torch.compile traces no `in` of symbols
    if count != heads + 2 * kv_heads or not fits:
        raise InvalidArgument(
            f"split_and_turn of {heads} heads and {kv_heads} of keys expects [B, L, {heads + 2 * kv_heads}, D] and "
            f"turns of [B or 1, L, {width}], got {list(qkv.shape)} and {list(turns.cos.shape)}"
        )
    q, k, v = _SplitAndTurn.apply(qkv, heads, kv_heads, turns)
    return q, k, v


def _turn_into(out: Tensor, x: Tensor, turns: Turns, back: bool) -> None:
    """Write x [B, L, H, D] turned, or turned back, into out of the same shape, in runs as wide as the table."""
    heads, dim = x.shape[2:]
    width = turns.cos.shape[-1]
    if x.dtype != turns.cos.dtype:
        wide = torch.empty(x.shape, dtype=turns.cos.dtype, device=x.device)
        _turn_into(wide, x.to(wide.dtype), turns, back)
        out.copy_(wide)
        return
    if all(t.stride(-1) == 1 and t.stride(-2) == dim for t in (x, out)):
        x, out = (t.unflatten(2, (heads * dim // width, width // dim)).flatten(3) for t in (x, out))
    else:
        width = dim
    cos, ahead, behind = (t[:, :, None, :width] for t in turns[:3])
    step, sign = turns.step, -1 if back else 1
    fits = all(few in (1, many) for few, many in zip(cos.shape, x.shape, strict=True))
    assert fits
    assert out.shape == x.shape  # or mul would resize out, a view
    if torch.compiler.is_compiling():  # which traces no writing of results into a view
        out.copy_(x * cos)
    else:
        torch.mul(x, cos, out=out)
    out[..., :-step].addcmul_(x[..., step:], ahead[..., :-step], value=sign)
    out[..., step:].addcmul_(x[..., :-step], behind[..., step:], value=sign)


class _SplitAndTurn(torch.autograd.Function):
    """A rotation's inverse is its transpose, so gradients are turned back; nothing but the table is kept."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int, turns: Turns) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(*turns[:3])
        ctx.step, ctx.shape, ctx.like = turns.step, qkv.shape, (heads, kv_heads)
        turned = torch.empty(*qkv.shape[:2], heads + kv_heads, qkv.shape[3], dtype=qkv.dtype, device=qkv.device)
        _turn_into(turned, qkv[:, :, : heads + kv_heads], turns, back=False)
        return turned[:, :, :heads], turned[:, :, heads:], qkv[:, :, heads + kv_heads :]

    @staticmethod
    @first_order(instead="Rotary's own call on queries and on keys")
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        turns = Turns(*ctx.saved_tensors, ctx.step)
        heads, kv_heads = ctx.like
        out = torch.empty(ctx.shape, dtype=grad_v.dtype, device=grad_v.device)
        _turn_into(out[:, :, :heads], grad_q, turns, back=True)
        _turn_into(out[:, :, heads : heads + kv_heads], grad_k, turns, back=True)
        out[:, :, heads + kv_heads :].copy_(grad_v)
        return out, None, None, None
