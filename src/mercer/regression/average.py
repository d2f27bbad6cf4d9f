"""The kernel average, from samples or from a feature state; float64 tensors throughout.

Exponential kernels go through exact attention with `Sum`. Sample weights enter as log-weights there, and of the
Gaussian exponent -s |x - x_i|^2 / 2 the part -s |x|^2 / 2, the same for every x_i, is left out: so far from all data
nothing underflows and the average tends to the target of the nearest sample.

Finite kernels carry w_i beside w_i y_i as one more value column, so that one sum gives numerators and denominators,
from pairs as from features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.kernels import Exp, Gaussian, Kernel
from mercer.core.normalizers import Identity, Sum
from mercer.core.state import FeatureState
from mercer.errors import NonFinite
from mercer.ops import attention


def exponents(kernel: Kernel, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """q', k' and a key offset c with K(q, k) = f(scale (<q', k'> + c)), up to a factor that a row's average cancels."""
    if isinstance(kernel, Gaussian):
        return queries, keys, -keys.square().sum(-1) / 2
    return kernel.map_query(queries), kernel.map_key(keys), None


def average(kernel: Kernel, scale: float, queries: Tensor, keys: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """m(x) for queries ``[M, D]``, keys ``[N, D]``, targets ``[N, m]`` and positive weights ``[N]``: ``[M, m]``."""
    if kernel.exponential:
        queries, keys, offset = exponents(kernel, queries, keys)
        log = weights.log() if offset is None else weights.log() + scale * offset
        queries = torch.cat((queries * scale, torch.ones_like(queries[:, :1])), -1)
        keys = torch.cat((keys, log.unsqueeze(-1)), -1)
        out = attention(
            queries[None, None], keys[None, None], targets[None, None], kernel=Exp(), normalizer=Sum(), scale=1.0
        )
        return _finite(out[0, 0], kernel)
    sums = attention(
        queries[None, None],
        keys[None, None],
        _columns(targets, weights)[None, None],
        kernel=kernel,
        normalizer=Identity(),
        scale=scale,
        path="pairs",
    )
    return _ratio(sums[0, 0], kernel)


def absorb(
    kernel: Kernel, scale: float, state: FeatureState | None, keys: Tensor, targets: Tensor, weights: Tensor
) -> FeatureState:
    """The state after more samples: sums of phi(x_i) [w_i y_i, w_i]; few kernels' depends on the scale."""
    _, after = attention(
        keys[None, None, :0],
        keys[None, None],
        _columns(targets, weights)[None, None],
        kernel=kernel,
        normalizer=Identity(),
        scale=scale,
        state=state,
        return_state=True,
        path="features",
    )
    assert isinstance(after, FeatureState)
    return after


def read(kernel: Kernel, scale: float, queries: Tensor, state: FeatureState) -> Tensor:
    """m(x) from a state that :func:`absorb` made."""
    keys = queries[None, None, :0]
    values = state.features[:, :, 0, :].unsqueeze(2)[:, :, :0]
    sums = attention(queries[None, None], keys, values, kernel=kernel, normalizer=Identity(), scale=scale, state=state)
    return _ratio(sums[0, 0], kernel)


def _columns(targets: Tensor, weights: Tensor) -> Tensor:
    weights = weights.unsqueeze(-1)
    return torch.cat((targets * weights, weights), -1)


def _ratio(sums: Tensor, kernel: Kernel) -> Tensor:
    total = sums[:, -1:]
    empty = int((total == 0).sum())
    if empty:
        raise NonFinite(
            f"The weights of {empty} of {len(total)} queries sum to 0 under {kernel}, so their average is 0/0: use a "
            "strictly positive kernel such as Gaussian(), Elu() or an even Taylor order."
        )
    return _finite(sums[:, :-1] / total, kernel)


def _finite(out: Tensor, kernel: Kernel) -> Tensor:
    if not bool(torch.isfinite(out).all()):
        raise NonFinite(f"The sums of {kernel} left the range of float64: bring X and y to a smaller scale.")
    return out
