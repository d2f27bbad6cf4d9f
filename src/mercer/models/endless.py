"""Whether a model may read a text of any length as one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mercer.core.merged import merge
from mercer.models.visibility import ending
from mercer.nn.attention import Attention
from mercer.ops import plan

if TYPE_CHECKING:
    from mercer.models.decoder import DecoderLM


def is_endless(model: DecoderLM) -> bool:
    """Whether no position of a model ends and the states of all its layers have a bounded size: those of mixers, of
    kernels with finitely many features, and caches under a window.

    Rotary, sinusoidal and learned positions end where the model was trained, also where `allow_longer` lets them run
    on. Without positions, and with ALiBi or T5's bias, nothing ends, but all keys of a softmax stay in its cache.
    """
    if model.config.position in ("rotary", "sinusoidal", "learned"):
        return False
    return all(_is_bounded(part, model) for part in model.modules() if isinstance(part, Attention))


def _is_bounded(attention: Attention, model: DecoderLM) -> bool:
    structure = attention.structure if model.relative is None else attention.structure & model.relative()
    if ending(structure) is not None:
        return False
    if merge(structure).left is not None:
        return True
    query, key = (
        torch.empty(1, heads, 1024, attention.head_dim, device="meta")
        for heads in (attention.heads, attention.kv_heads)
    )
    chosen = plan(
        query,
        key,
        key,
        kernel=attention.kernel,
        normalizer=attention.normalizer,
        structure=structure,
        return_state=True,
        form=attention.form,
        path=attention.path,
    )
    return chosen.path == "features"
