"""Linear attention whose past fades, as mixers use it: the core's operator on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.kernels import Power
from mercer.core.log_weights import Decay
from mercer.core.normalizers import Identity
from mercer.core.state import FeatureState
from mercer.core.structures import Causal, Padding
from mercer.ops import attention

_LINEAR = Power(1, signed=True)


def decayed_sum(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_rate: Tensor,
    *,
    lengths: Tensor | None = None,
    past: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The configuration of `mercer.attention` that retention and state-space duality are,

        S_t = exp(log_rate_t) S_{t-1} + k_t v_t^T,    o_t = scale S_t^T q_t:

    the plain inner product, no normaliser, and `Decay` under `Causal`, by features.

    query, key: [B, H, L, K]; value: [B, H, L, V]; all float32 or float64. log_rate: [H] or [B, H, L], 0 or less.
    lengths: int64 [B], how many tokens of each row are real, the first ones; None: all. past: S before, [B, H, K, V];
    None: 0. Returns o [B, H, L, V] and S after the last real token. A single token is a step of the formula itself,
    which takes less time than planning one.
    """
    if query.shape[2] == 1:
        return _step(query, key, value, log_rate, lengths, past, scale)
    structure = Causal() & Decay(log_rate=log_rate)
    if lengths is not None:
        structure = structure & Padding(lengths=lengths)
    state = None
    if past is not None:
        nothing = past.new_zeros(past.shape[:2], dtype=torch.float64)
        length = torch.zeros(past.shape[0], dtype=torch.int64, device=past.device)
        state = FeatureState(past, None, length, nothing, _LINEAR.state_tag(scale))
    out, after = attention(
        query,
        key,
        value,
        kernel=_LINEAR,
        normalizer=Identity(),
        structure=structure,
        scale=scale,
        state=state,
        return_state=True,
        path="features",
    )
    assert isinstance(after, FeatureState)
    return out, after.features


def _step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_rate: Tensor,
    lengths: Tensor | None,
    past: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    written = key.mT * value
    rate = log_rate.view(-1, *log_rate.shape[-2:], 1) if log_rate.dim() == 3 else log_rate.view(1, -1, 1, 1)
    if lengths is not None:  # a row without a token keeps its sums to the bit
        absent = (lengths == 0).view(-1, 1, 1, 1)
        written, rate = written.masked_fill(absent, 0), rate.masked_fill(absent, 0)
    sums = written if past is None else torch.addcmul(written, past, rate.exp().to(past.dtype))
    with torch.autocast(query.device.type, enabled=False):
        return scale * (query @ sums), sums
