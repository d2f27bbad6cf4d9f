"""torch's `scaled_dot_product_attention`, with any kernel and normaliser."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.normalizers import Normalizer
from mercer.core.structures import Causal, Full, Structure
from mercer.errors import InvalidArgument, Unsupported
from mercer.integrations.given import structure_of
from mercer.ops import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by mercer: the same arguments, which mean the same.

        o_i = N( sum_j  w_ij  K(q_i, k_j)  v_j )

    Args:
        query: `[..., Hq, Lq, D]`, or without some of the leading dimensions. Leading dimensions broadcast.
        key: `[..., Hk, Lk, D]`.
        value: `[..., Hk, Lk, Dv]`.
        attn_mask: boolean, True where a query sees a key, or of numbers that are added to scores; broadcasts to
            `[..., Hq, Lq, Lk]`. (For another kernel than exp, exp of what is added is a factor of the weight.)
        dropout_p: 0; dropout of weights is not computed.
        is_causal: query i sees keys 0 .. i, also where there are not as many queries as keys. That is torch's rule,
            aligned at the first tokens; :class:`mercer.Causal` is aligned at the last. Not together with attn_mask.
        scale: of inner products; None for the kernel's own, for `Exp` D^-1/2.
        enable_gqa: query heads share key heads, Hk a divisor of Hq.
        kernel, normalizer: `Exp()` and `Sum()` if left out: softmax.

    Returns:
        `[..., Hq, Lq, Dv]`. A row that sees no key is zero, with finite gradients. (Which of zero and NaN torch gives
        depends on its version and backend.)

    Raises:
        InvalidArgument: shapes, dtypes or options that are wrong in themselves.
        Unsupported: what cannot be computed; the message says what would work.
    """
    _check(query, key, value, attn_mask, dropout_p, is_causal)
    queries, keys, dims = query.shape[-2], key.shape[-2], query.dim()
    query, key, value, lead = _four(query, key, value, enable_gqa)
    parts = {"kernel": kernel, "normalizer": normalizer, "scale": scale}

    def part(rows: slice, columns: slice, structure: Structure) -> Tensor:
        return attention(query[:, :, rows], key[:, :, columns], value[:, :, columns], structure=structure, **parts)

    every = slice(None)
    if is_causal:
        square = slice(0, min(queries, keys))  # keys behind the last query are hidden from all
        out = part(square, square, Causal())
        if queries > keys:  # queries behind the last key see every key
            out = torch.cat((out, part(slice(keys, None), every, Full())), 2)
    elif attn_mask is None:
        out = part(every, every, Full())
    else:
        out = part(every, every, structure_of(_mask(attn_mask, (*lead, queries, keys)), query.shape[0]))
    return out.reshape(*lead, queries, out.shape[-1]) if dims != 4 or lead != out.shape[:2] else out


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.dim() < 2:
            what = (
                type(x).__name__ if not isinstance(x, Tensor) else "a nested tensor" if x.is_nested else list(x.shape)
            )
            raise InvalidArgument(f"{name} must be a tensor of two dimensions or more, [..., L, D], not {what}.")
    if dropout:
        raise Unsupported(
            f"dropout_p={dropout:g}: dropout of attention weights is not computed here: pass 0.0 (dropout of the "
            "output, or of the layers around it, works)."
        )
    if mask is not None and causal:
        raise InvalidArgument("Give attn_mask or is_causal=True, not both: a causal mask can be a part of attn_mask.")
    if mask is not None and not isinstance(mask, Tensor):
        raise InvalidArgument(f"attn_mask must be a tensor or None, not {type(mask).__name__}.")


def _four(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """All three as `[batch, heads, length, dim]`, and the leading dimensions of the output."""
    given = [tuple(x.shape[:-2]) for x in (query, key, value)]
    heads = [shape[-1:] for shape in given] if grouped else [(), (), ()]
    if grouped and (not all(heads) or heads[1] != heads[2] or not heads[1][0] or heads[0][0] % heads[1][0]):
        raise InvalidArgument(
            f"enable_gqa: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} must be "
            "[..., heads, length, dim] with as many value heads as key heads, a divisor of the query heads."
        )
    if not grouped and len(given[0]) > 0 and given[1][-1:] == given[2][-1:] == (1,) != given[0][-1:]:
        grouped, heads = True, [shape[-1:] for shape in given]  # one key head for all, which need not be copied
    rest = [shape[:-1] if grouped else shape for shape in given]
    try:
        lead = tuple(torch.broadcast_shapes(*rest))
    except RuntimeError as error:
        raise InvalidArgument(
            f"The leading dimensions of query {list(query.shape)}, key {list(key.shape)} and value "
            f"{list(value.shape)} do not broadcast; enable_gqa=True shares key heads between query heads."
        ) from error

    def laid(x: Tensor, own: tuple[int, ...]) -> Tensor:
        wide = x.expand(*lead, *own, *x.shape[-2:])
        if not grouped:
            own = lead[-1:] or (1,)
        batch = prod(lead if grouped else lead[:-1])
        return wide.reshape(batch, *own, *x.shape[-2:])

    out = (*lead, *heads[0])
    return *(laid(x, own) for x, own in zip((query, key, value), heads, strict=True)), out  # pyright: ignore[reportReturnType]


def _mask(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask as `[B or 1, H or 1, Lq, Lk]`, without making entries where it says the same for all rows or heads."""
    try:
        torch.broadcast_shapes(mask.shape, shape)
        fits = mask.dim() <= max(len(shape), 2)
    except RuntimeError:
        fits = False
    if not fits:
        raise InvalidArgument(
            f"attn_mask must broadcast to [..., queries, keys] = {list(shape)}, not {list(mask.shape)}."
        )
    shape = (1,) * (3 - len(shape)) + shape if len(shape) < 3 else shape
    mask = mask.expand(*mask.shape[:-2], *shape[-2:]) if mask.dim() >= 2 else mask.expand(*shape[-2:])
    mask = mask.view(*(1,) * (len(shape) - mask.dim()), *mask.shape)
    rows, heads = shape[:-3], mask.shape[-3]
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, heads, *shape[-2:])
    return mask.expand(*rows, heads, *shape[-2:]).reshape(prod(rows), heads, *shape[-2:])
