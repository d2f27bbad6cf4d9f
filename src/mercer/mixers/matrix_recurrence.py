"""The recurrence of a state that is a matrix: gated linear attention, delta rules and RWKV are cases of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mercer.backends.matrix_scan import matrix_scan, refuse_growth, serves
from mercer.errors import InvalidArgument
from mercer.mixers.matrix_chunks import chunked

FORMS = ("auto", "recurrent", "chunked", "numba")
LEAST_ENTRIES = 1 << 13
"""Entries of the states of a call with one token below which `auto` takes torch's operators: nobody waits for a
compiler because of a small state."""
LEAST_WORK = 1 << 19
"""The same for several tokens: entries times tokens."""


def matrix_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    remove: tuple[Tensor, Tensor] | None = None,
    delta: Tensor | None = None,
    bonus: Tensor | None = None,
    scale: float = 1.0,
    state: Tensor | None = None,
    lengths: Tensor | None = None,
    form: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Outputs and the final state of

        S_t = diag(exp(g_t)) S_{t-1} + a_t (b_t^T S_{t-1}) + k_t v_t^T,        o_t = scale q_t^T S_t

    or, with a bonus u, read before the update and with the own token weighed apart,

        o_t = scale q_t^T (S_{t-1} + diag(u) k_t v_t^T)

    or, by the delta rule with rates beta, which replaces what a state that has faded answers to k by the value,

        S_t = (1 - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T

    Sums and the state are float32, or float64 if query, key or value is; first derivatives of every tensor.

    Args:
        query: q, ``[B, H, L, K]``, of any float dtype and strides, as all that follow.
        key: k, ``[B, H, L, K]``.
        value: v, ``[B, H, L, V]``.
        log_decay: g, 0 or less: ``[B, H, L, K]`` for every channel, ``[B, H, L]`` for all channels of a token,
            ``[H, K]`` or ``[H]`` for all tokens; default 0. -inf forgets everything.
        remove: (a, b), each ``[B, H, L, K]``; default nothing is removed.
        delta: beta, ``[B, H, L]``, usually with keys of length 1; in the place of `remove` (of which it is the case
            a = -beta k, b = exp(g) k with the keys beta k, in about two thirds of its time) and without a bonus.
        bonus: u, ``[H, K]``; default None, a token reads the state that it is already part of.
        scale: put on the queries.
        state: S_0, ``[B, H, K, V]`` in the dtype of the sums; default 0.
        lengths: ``[B]`` integers from 0 to L, how many tokens of each row are there, the first ones; default all. What
            stands behind them is not looked at, has outputs of 0 and leaves the state as it is, to the bit.
        form: ``recurrent``, token by token; ``chunked``, matrix products over 64 tokens at a time; ``numba``, fused
            kernels for float32 sums on the CPU (extra ``cpu``). ``auto`` takes these where they serve and the call is
            no small one, else the first for single tokens and the second for more. A NaN or an infinity among the
            inputs of a token spoils earlier outputs of its chunk too, with ``numba`` of its block of 16 tokens.

    Returns:
        ``out [B, H, L, V]`` in the dtype of ``value``, and the state after the last token, ``[B, H, K, V]``.

    Raises:
        InvalidArgument: shapes, dtypes or names that do not fit, or a log-decay above 0.
        Unsupported: ``form="numba"`` where the kernels do not serve.

    Source: Yang et al. 2023 (gated linear attention), arXiv 2312.06635; Schlag et al. 2021 (delta rule), arXiv
    2102.11174; Yang et al. 2024 (gated delta rule), arXiv 2412.06464; Peng et al. 2024 (RWKV-5 and 6), arXiv
    2404.05892, and 2025 (RWKV-7), arXiv 2503.14456.
    """
    call = _read(query, key, value, log_decay, remove, delta, bonus, scale, state, lengths, form)
    if form == "auto":
        form = call.quickest()
    if form == "numba":
        return matrix_scan(**vars(call))  # which looks at the decays as it reads them
    if call.log_decay is not None and not torch.compiler.is_compiling() and call.log_decay.numel():
        refuse_growth(float(call.log_decay.detach().max()) > 0)
    call = call.spelled_out()
    with torch.autocast(value.device.type, enabled=False):  # sums are float32 or float64, whatever surrounds the call
        if form == "recurrent":
            return recurrent(call)
        out, final = chunked(*call.wide(), call.begin(), lengths)
        return out.to(value.dtype), final


@dataclass(frozen=True)
class Call:
    """A checked call. log_decay is ``[B, H, L, K or 1]``, often expanded, or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor | None
    remove: tuple[Tensor, Tensor] | None
    delta: Tensor | None
    bonus: Tensor | None
    scale: float
    state: Tensor | None
    lengths: Tensor | None

    def spelled_out(self) -> Call:
        """With the delta rule as a removal."""
        if self.delta is None:
            return self
        key = self.there(self.key)
        pushed = self.there(self.delta.unsqueeze(-1)) * key
        sought = key if self.log_decay is None else self.there(self.log_decay).exp() * key
        return replace(self, key=pushed, remove=(-pushed, sought), delta=None)

    def quickest(self) -> str:
        """The form that ``auto`` takes."""
        batch, heads, length, dim = self.key.shape
        entries = batch * heads * dim * self.value.shape[-1]
        large = entries >= LEAST_ENTRIES if length == 1 else entries * length >= LEAST_WORK
        if large and self.fusible():
            return "numba"
        return "recurrent" if length <= 1 else "chunked"

    def fusible(self) -> bool:
        """Whether the fused kernels compute it."""
        others = (self.log_decay, *(self.remove or ()), self.delta, self.bonus, self.state, self.lengths)
        return serves(self.query, self.key, self.value, *others)

    @property
    def sums(self) -> torch.dtype:
        """The dtype of the state."""
        double = torch.float64 in (self.query.dtype, self.key.dtype, self.value.dtype)
        return torch.float64 if double else torch.float32

    def begin(self) -> Tensor:
        """The state before the first token."""
        if self.state is not None:
            return self.state
        batch, heads, _, dim = self.key.shape
        return self.key.new_zeros(batch, heads, dim, self.value.shape[-1], dtype=self.sums)

    def real(self) -> Tensor | None:
        """bool ``[B, L]``, whether a token is there; None if all are."""
        if self.lengths is None:
            return None
        return torch.arange(self.query.shape[2], device=self.lengths.device) < self.lengths.unsqueeze(1)

    def there(self, x: Tensor) -> Tensor:
        """``[B, H, L, *]`` in the dtype of the sums, 0 for absent tokens."""
        real, x = self.real(), x.to(self.sums)
        return x if real is None else x.masked_fill(~real[:, None, :, None], 0)

    def wide(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Scaled queries, keys, values, log-decay, remove and bonus in the dtype of the sums, 0 for absent tokens."""
        log = None if self.log_decay is None else self.there(self.log_decay)
        remove = None if self.remove is None else (self.there(self.remove[0]), self.there(self.remove[1]))
        bonus = None if self.bonus is None else self.bonus.to(self.sums)
        return self.there(self.query) * self.scale, self.there(self.key), self.there(self.value), log, remove, bonus


def recurrent(call: Call) -> tuple[Tensor, Tensor]:
    """Token by token: the definition."""
    q, k, v, log, remove, bonus = call.wide()
    decay = None if log is None else log.exp().unsqueeze(-1)
    real, state, rows = call.real(), call.begin(), []
    for t in range(q.shape[2]):
        before = state
        new = k[:, :, t, :, None] * v[:, :, t, None, :]
        state = before if decay is None else decay[:, :, t] * before
        if remove is not None:
            read = remove[1][:, :, t, None, :] @ before
            state = state + remove[0][:, :, t, :, None] * read
        state = state + new
        if real is not None:
            state = torch.where(real[:, t, None, None, None], state, before)
        seen = state if bonus is None else before + bonus.unsqueeze(-1) * new
        rows.append((q[:, :, t, None, :] @ seen).squeeze(-2))
    out = torch.stack(rows, 2) if rows else torch.zeros_like(v)
    return out.to(call.value.dtype), state if rows else state.clone()


def _read(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor | None,
    remove: tuple[Tensor, Tensor] | None,
    delta: Tensor | None,
    bonus: Tensor | None,
    scale: float,
    state: Tensor | None,
    lengths: Tensor | None,
    form: str,
) -> Call:
    if form not in FORMS:
        raise InvalidArgument(f"matrix_recurrence: form must be one of {', '.join(FORMS)}, not {form!r}.")
    if (
        not query.ndim == key.ndim == value.ndim == 4
        or query.shape != key.shape
        or value.shape[:3] != key.shape[:3]
        or not min(key.shape[1], key.shape[3], value.shape[3])
    ):
        raise InvalidArgument(
            "matrix_recurrence: query, key and value must be [B, H, L, K], [B, H, L, K] and [B, H, L, V] with H, K and "
            f"V of 1 or more; they are {list(query.shape)}, {list(key.shape)} and {list(value.shape)}."
        )
    batch, heads, length, dim = key.shape
    named: dict[str, tuple[Tensor, tuple[tuple[int, ...], ...]]] = {}
    if log_decay is not None:
        shapes = ((batch, heads, length, dim), (batch, heads, length), (heads, dim), (heads,))
        named["log_decay"] = (log_decay, shapes)
    if remove is not None:
        if not isinstance(remove, tuple) or len(remove) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument("matrix_recurrence: remove must be the two tensors (a, b).")
        named |= {"a of remove": (remove[0], (key.shape,)), "b of remove": (remove[1], (key.shape,))}
    if delta is not None:
        if remove is not None or bonus is not None:
            raise InvalidArgument("matrix_recurrence: delta takes neither remove nor a bonus beside it.")
        named["delta"] = (delta, ((batch, heads, length),))
    if bonus is not None:
        named["bonus"] = (bonus, ((heads, dim),))
    for name, (x, shapes) in named.items():
        if tuple(x.shape) not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise InvalidArgument(f"matrix_recurrence: {name} must be {allowed}, not {list(x.shape)}.")
    for name, x in ({"query": query, "key": key, "value": value} | {n: x for n, (x, _) in named.items()}).items():
        if not x.is_floating_point():
            raise InvalidArgument(f"matrix_recurrence: {name} must be floating point, not {x.dtype}.")
    compiling = torch.compiler.is_compiling()  # values are not looked at there
    if lengths is not None:
        if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise InvalidArgument(
                f"matrix_recurrence: lengths must be [{batch}] integers, not {lengths.dtype} {list(lengths.shape)}."
            )
        if not compiling and batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= length:
            raise InvalidArgument(f"matrix_recurrence: lengths must be from 0 to {length}, not {lengths.tolist()}.")
    if log_decay is not None:
        log_decay = _spread(log_decay, batch, heads, length)
    call = Call(query, key, value, log_decay, remove, delta, bonus, float(scale), state, lengths)
    whole = (batch, heads, dim, value.shape[3])
    if state is not None and (state.shape != whole or state.dtype != call.sums):
        raise InvalidArgument(
            f"matrix_recurrence: state must be {call.sums} {list(whole)}, not {state.dtype} {list(state.shape)}."
        )
    return call


def _spread(log: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """A log-decay as ``[B, H, L, K or 1]``."""
    if log.ndim == 4:
        return log
    if log.ndim == 3:
        return log.unsqueeze(-1)
    return log.view(1, heads, 1, -1).expand(batch, heads, length, -1)
