"""torch's flex attention as a backend of the chunked pairs form: softmax under masks that fused kernels do not know.

On a GPU it is compiled (by torch.compile, once for each kind of mask) and skips the blocks that nothing is seen of;
the plan takes it there where torch's fused attention does not serve. On the CPU it runs only when asked for: all scores
at once, without a gradient, to compare with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mercer.core.kernels import Exp, Kernel
from mercer.core.layout import Layout
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.core.places import Place
from mercer.core.structures import Pattern, Window, intersection
from mercer.core.support import Sizes


def serves(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> bool:
    """Whether flex attention computes this combination: masks and slopes of pairs one by one, without decay."""
    return (
        type(kernel) is Exp
        and normalizer.scale_invariant
        and normalizer.takes_divided_rows
        and merged.decay is None
        and merged.relative is None
        and not merged.pairwise
        and all(p.pairwise for together in intersection(_planned(merged)) for p in together)
        and not any(p.weighs for p in merged.patterns)
        and (merged.alibi is None or not merged.alibi.slopes.requires_grad)
        and sizes.query_length > 0
        and sizes.key_length + sizes.past_length > 0
        and sizes.itemsize == 4
        and (sizes.device == "cuda" or (sizes.device == "cpu" and not sizes.trained))
        and not torch.compiler.is_compiling()
        and _installed()
    )


def _planned(merged: Merged) -> tuple[Pattern, ...]:
    return tuple(p.planned() for p in merged.patterns)


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("torch.nn.attention.flex_attention") is not None


def flex(query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> tuple[Tensor, Tensor]:
    """Rows divided by their sums, ``[B, Hq, Lq, Dv]``, and the logarithms of these, ``[B, Hq, Lq]``."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    sees = _sees(layout)
    alone = layout.query_position.shape[0] == layout.key_position.shape[0] == 1
    alone = alone and layout.query_valid is None and layout.key_valid is None and not layout.patterns
    mask = create_block_mask(sees, None if alone else batch, None, queries, keys, device=query.device)
    with warnings.catch_warnings():
        # What they warn of is known: uncompiled on the CPU, and an argument's new name in later versions of torch.
        warnings.simplefilter("ignore")
        out, lse = _function(query.device.type)(
            query,
            key,
            value,
            score_mod=_slopes(layout),
            block_mask=mask,
            scale=scale,
            enable_gqa=heads != key.shape[1],
            return_lse=True,
        )
    empty = lse == -torch.inf
    return out.masked_fill(empty.unsqueeze(-1), 0), lse


@lru_cache(maxsize=2)
def _function(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention)


def _sees(layout: Layout) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether query i sees key j, for one pair at a time."""
    terms = intersection((*layout.patterns, Window(layout.left, layout.right)))
    total = layout.total if layout.total is not None else layout.key_position.new_full((1, 1), layout.key_length)

    def at(x: Tensor, row: Tensor, place: Tensor) -> Tensor:
        return x[row if x.shape[0] > 1 else 0, place if x.shape[1] > 1 else 0]

    def sees(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = Place(at(layout.query_position, row, i), at(layout.key_position, row, j), at(total, row, i), row, head)
        seen = torch.zeros((), dtype=torch.bool, device=i.device)
        for together in terms:
            shown = torch.ones((), dtype=torch.bool, device=i.device)
            for pattern in together:
                shown = shown & pattern.sees(place)
            seen = seen | shown
        for valid, index in ((layout.query_valid, i), (layout.key_valid, j)):
            if valid is not None:
                seen = seen & at(valid, row, index)
        return seen

    return sees


def _slopes(layout: Layout) -> Callable[..., Tensor] | None:
    if layout.slopes is None:
        return None
    slopes = layout.slopes.detach().float()
    query, key = layout.query_position, layout.key_position

    def weigh(score: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        apart = query[row if query.shape[0] > 1 else 0, i] - key[row if key.shape[0] > 1 else 0, j]
        return score - slopes[head] * apart.abs()

    return weigh
