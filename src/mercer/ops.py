"""The public operators: :func:`attention` and :func:`plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.core.constant_result import constant_result
from mercer.core.kernels import Exp, Kernel
from mercer.core.merged import Merged, merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.state import CacheState, FeatureState, MixedState, State
from mercer.core.structures import Causal, Full, Pattern, Structure, Window
from mercer.core.support import Sizes, sums_weights
from mercer.errors import InvalidArgument, Unsupported
from mercer.forms import packed
from mercer.forms.call import Call
from mercer.forms.run import run
from mercer.planning import Plan, choose, decide

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    state: State | None = None,
    return_state: Literal[False] = False,
    return_lse: Literal[False] = False,
    form: str = "auto",
    path: str = "auto",
    backend: str = "auto",
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    state: State | None = None,
    return_state: Literal[True],
    return_lse: Literal[False] = False,
    form: str = "auto",
    path: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, State]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    state: State | None = None,
    return_state: Literal[False] = False,
    return_lse: Literal[True],
    form: str = "auto",
    path: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    state: State | None = None,
    return_state: Literal[True],
    return_lse: Literal[True],
    form: str = "auto",
    path: str = "auto",
    backend: str = "auto",
) -> tuple[Tensor, State, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    state: State | None = None,
    return_state: bool = False,
    return_lse: bool = False,
    form: str = "auto",
    path: str = "auto",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, Tensor] | tuple[Tensor, State, Tensor]:
    """Attention: a kernel, a normaliser and a structure,

        o_i = N( sum_j  w_ij  K(q_i, k_j)  v_j ),

    in any form; all forms agree with the double loop of ``mercer.core.reference``.

    Args:
        query: ``[B, Hq, Lq, D]``; float64, float32, bfloat16 or float16.
        key: ``[B, Hk, Lk, D]``; Hk divides Hq (grouped- and multi-query attention: query head h reads key head h //
            (Hq / Hk)).
        value: ``[B, Hk, Lk, Dv]``.
        kernel: K. Default ``Exp()``.
        normalizer: N. Default ``Sum()``; with ``Exp`` that is softmax.
        structure: w. Default ``Full()``; compose with ``&``. Unequal lengths are aligned bottom-right.
        scale: factor on the inner product; default the kernel's own (``kernel.default_scale(D)``).
        state: what an earlier call returned; its tokens come before this call's.
        return_state: also return the state after this call's tokens.
        return_lse: also return, last, the log-sum-exp of each row: log sum_j w_ij K(q_i, k_j), ``[B, Hq, Lq]`` in the
            dtype of the sums, minus infinity where nothing is seen. Differentiable. Needs a kernel that is positive.
        form: ``"auto"``, ``"dense"``, ``"chunked"`` or ``"recurrent"``.
        path: ``"auto"``, ``"pairs"`` or ``"features"``.
        backend: ``"auto"``, ``"torch"``, ``"sdpa"``, ``"flex"`` or ``"numba"``; the last three serve ``Exp`` in the
            chunked form by pairs, ``"numba"`` also finite kernels by features: chunked, and recurrent where no gradient
            is wanted.

    Returns:
        ``[B, Hq, Lq, Dv]`` in the dtype of ``query``; with ``return_state`` or ``return_lse`` a tuple of it, the
        :class:`~mercer.State` and the log-sum-exp, whichever are asked for. Sums are accumulated in float32 (float64
        for float64 inputs). A row that sees nothing is zero.

    Raises:
        InvalidArgument: shapes, dtypes or options that are wrong in themselves.
        Unsupported: parts that cannot be combined; the message says what would work.
        NonFinite: a row left the range of the accumulator: ``Identity`` with an exponential kernel, or features that
            are exponentials of numbers too far apart. Looked for on the CPU.
    """
    if torch.compiler.is_compiling() and _has_schedule(structure):
        _make_outside()
        assert _outside is not None
        return _outside(
            query, key, value, kernel=kernel, normalizer=normalizer, structure=structure, scale=scale, state=state,
            return_state=return_state, return_lse=return_lse, form=form, path=path, backend=backend,
        )  # fmt: skip
    asked = _resolve(
        query, key, value, kernel, normalizer, structure, scale, state, return_state, return_lse, form, path, backend
    )
    chosen = decide(*asked)
    kernel, normalizer, merged = asked.kernel, asked.normalizer, asked.merged
    normalizer.check(query.shape[0], query.shape[1], query.shape[2], value.shape[-1])
    call = Call(
        query,
        key,
        value,
        kernel,
        normalizer,
        merged,
        None if scale is None else float(scale),
        state,
        return_state,
        chosen.form,
        chosen.path,
        chosen.backend,
        return_lse or sums_weights(kernel, normalizer),
        log_sums=return_lse,
    )
    packs = merged.documents is not None and (chosen.form != "dense" or state is not None or return_state)
    out, after, log_sum = packed.run_documents(call) if packs else run(call)
    if not return_state:
        return out if log_sum is None else (out, log_sum)
    assert after is not None
    return (out, after) if log_sum is None else (out, after, log_sum)


_outside: Callable[..., Any] | None = None
"""The call itself between two graphs: a compiler would trace how a schedule is made, each time anew, and keep none."""


@constant_result
def _make_outside() -> bool:
    """Make it when a compiler traces, since making it imports the compiler."""
    global _outside
    if _outside is None:
        _outside = torch.compiler.disable(attention)
    return True


def _has_schedule(structure: object) -> bool:
    """Whether a structure has patterns other than bands."""
    if not isinstance(structure, Structure):
        return False
    found = [part for part in structure.parts if isinstance(part, Pattern) and not isinstance(part, Full | Causal)]
    return not all(isinstance(part, Window) and part.dilation == 1 for part in found)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    scale: float | None = None,
    state: State | None = None,
    return_state: bool = False,
    return_lse: bool = False,
    form: str = "auto",
    path: str = "auto",
    backend: str = "auto",
) -> Plan:
    """How :func:`attention` would compute the same arguments: form, path, operations, bytes, and the reason. Runs
    nothing.

    Only shapes, dtypes and devices of the tensors are read, so tensors on the ``meta`` device will do: they are
    planned as on the CPU.
    """
    return choose(
        *_resolve(
            query, key, value, kernel, normalizer, structure, scale, state, return_state, return_lse, form, path,
            backend,
        )
    )  # fmt: skip


class _Request(NamedTuple):
    kernel: Kernel
    normalizer: Normalizer
    merged: Merged
    sizes: Sizes
    form: str
    path: str
    stateful: bool
    state_path: str | None
    backend: str


def _resolve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel | None,
    normalizer: Normalizer | None,
    structure: Structure | None,
    scale: float | None,
    state: State | None,
    return_state: bool,
    return_lse: bool,
    form: str,
    path: str,
    backend: str,
) -> _Request:
    """The checked call as what :func:`choose` and :func:`decide` are asked."""
    kernel = Exp() if kernel is None else kernel
    normalizer = Sum() if normalizer is None else normalizer
    structure = Full() if structure is None else structure
    if not (
        isinstance(kernel, Kernel)  # pyright: ignore[reportUnnecessaryIsInstance]
        and isinstance(normalizer, Normalizer)  # pyright: ignore[reportUnnecessaryIsInstance]
        and isinstance(structure, Structure)  # pyright: ignore[reportUnnecessaryIsInstance]
        and (state is None or isinstance(state, State))  # pyright: ignore[reportUnnecessaryIsInstance]
    ):
        _refuse_parts(kernel, normalizer, structure, state)
    if normalizer.needs_count and normalizer.needs_denominator:
        raise InvalidArgument(f"{normalizer} asks for the count and for the denominator; a normaliser is given one.")
    merged = merge(structure)
    sizes = _sizes(query, key, value, state, merged, kernel)
    kernel.check(sizes.dim, sizes.query_heads, sizes.key_heads)
    if return_lse:
        if not kernel.positive:
            raise Unsupported(
                f"return_lse: {kernel} takes negative values, and a sum of such weights may have no logarithm: use a "
                "positive kernel, such as Exp() or Taylor(2)."
            )
        sizes = replace(sizes, log_sums=True)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, Real) or not isfinite(scale)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"scale must be a finite number or None, not {scale!r}.")
    state_path = None if state is None else "pairs"
    if state is not None and not isinstance(state, CacheState):
        fits = MixedState if isinstance(kernel, Mixed) else FeatureState
        if not isinstance(state, fits):
            raise InvalidArgument(
                f"{kernel} continues a {fits.__name__} or, by pairs, a CacheState, not a {type(state).__name__}."
            )
        state_path = "features"
    stateful = state is not None or return_state
    return _Request(kernel, normalizer, merged, sizes, form, path, stateful, state_path, backend)


def _refuse_parts(*given: object) -> NoReturn:
    """Raise for the first part that is none of its kind."""
    names, kinds = ("kernel", "normalizer", "structure", "state"), (Kernel, Normalizer, Structure, State)
    name, part = next((n, x) for n, x, k in zip(names, given, kinds, strict=True) if not isinstance(x, k))
    hint = f", for example {name}={part.__name__}(...)" if isinstance(part, type) else ""
    if isinstance(part, str) and name in ("kernel", "normalizer"):
        hint = "; mercer.parse_attention makes both from a name such as 'taylor4-l2'"
    pair = isinstance(part, tuple) and any(isinstance(x, State) for x in part)
    what = "the pair that return_state=True gives: pass its second half" if pair else _brief(part)
    raise InvalidArgument(f"{name} must be a {name} object, not {what}{hint}.")


def _brief(part: object) -> str:
    """A short word for a wrong argument; tensors and what holds them would fill pages."""
    text = repr(part)
    return text if len(text) <= 80 and "tensor(" not in text else f"a {type(part).__name__}"


def _sizes(query: Tensor, key: Tensor, value: Tensor, state: State | None, merged: Merged, kernel: Kernel) -> Sizes:
    for name, x, letters in (
        ("query", query, "B, Hq, Lq, D"),
        ("key", key, "B, Hk, Lk, D"),
        ("value", value, "B, Hk, Lk, Dv"),
    ):
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"{name} must be a torch tensor, not {type(x).__name__}.")
        if x.dim() != 4:
            raise InvalidArgument(f"{name} must be [{letters}], four dimensions, not {list(x.shape)}.")
        if x.dtype not in _DTYPES:
            raise InvalidArgument(f"{name} must be float64, float32, bfloat16 or float16, not {x.dtype}.")
        if x.dtype != query.dtype or x.device != query.device:
            raise InvalidArgument(
                f"{name} is {x.dtype} on {x.device}, but query is {query.dtype} on {query.device}; they must agree."
            )
    batch, query_heads, query_length, dim = query.shape
    _, key_heads, key_length, value_dim = value.shape
    if key.shape != (batch, key_heads, key_length, dim) or value.shape[0] != batch:
        raise InvalidArgument(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: expected "
            "[B, Hq, Lq, D], [B, Hk, Lk, D] and [B, Hk, Lk, Dv]."
        )
    if not key_heads or query_heads % key_heads:
        raise InvalidArgument(f"{query_heads} query heads cannot share {key_heads} key heads: Hk must divide Hq.")
    if dim == 0 or value_dim == 0:
        raise InvalidArgument(f"head dimensions must be 1 or more, not {dim} (query, key) and {value_dim} (value).")
    cache = state if isinstance(state, CacheState) else state.near if isinstance(state, MixedState) else None
    past_length = 0 if cache is None else cache.keys.shape[2]
    entries = merged.entries(batch)
    if state is not None and state.batch != entries:
        raise InvalidArgument(f"The state has {state.batch} batch entries, but this call has {entries}.")
    if merged.alibi is not None and merged.alibi.slopes.shape != (query_heads,):
        raise InvalidArgument(
            f"Alibi: slopes must be [{query_heads}], one per query head, not {list(merged.alibi.slopes.shape)}."
        )
    if merged.relative is not None and merged.relative.table.shape[0] != query_heads:
        raise InvalidArgument(
            f"RelativeBias: table must be [{query_heads}, distances], one row per query head, not "
            f"{list(merged.relative.table.shape)}."
        )
    shape = (batch, query_heads, query_length, key_length)
    for part in merged.pairwise:
        given = part.tensor
        if (
            any(n not in (1, m) for n, m in zip(given.shape[:2], shape[:2], strict=True))
            or given.shape[2:] != shape[2:]
        ):
            raise InvalidArgument(
                f"{part}: the tensor must be {list(shape)}, batch and heads also 1, not {list(given.shape)}."
            )
        if given.device != query.device:
            raise InvalidArgument(f"{part}: the tensor is on {given.device}, but query is on {query.device}.")
    accumulator = 8 if query.dtype == torch.float64 else 4
    return Sizes(
        batch,
        query_heads,
        key_heads,
        query_length,
        key_length,
        dim,
        value_dim,
        past_length,
        accumulator,
        query.element_size(),
        "cpu" if query.device.type == "meta" else query.device.type,
        cache is not None and cache.valid is not None,
        torch.is_grad_enabled() and _wants_gradient(query, key, value, state, kernel),
        bfloat16=query.dtype == torch.bfloat16,
    )


def _wants_gradient(query: Tensor, key: Tensor, value: Tensor, state: State | None, kernel: Kernel) -> bool:
    """Whether a gradient of what comes before the normaliser is wanted; structures are asked elsewhere."""
    given = (query, key, value)
    if any(x.requires_grad for x in given):
        return True
    if not torch.compiler.is_compiling() and any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        return True
    parts: list[object] = [*vars(kernel).values(), *kernel.tensors().values()]
    for past in (state.near, state.far) if isinstance(state, MixedState) else (state,):
        parts += () if past is None else vars(past).values()
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)
