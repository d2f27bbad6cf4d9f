"""One call of one layout: blank the padding, run a path, normalise, and check."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mercer.core.counts import keys_seen
from mercer.core.layout import Tokens, layout, tokens
from mercer.core.merged import Merged
from mercer.core.mixed import Mixed
from mercer.core.state import CacheState, State
from mercer.errors import InvalidArgument, NonFinite
from mercer.forms import features, mixed, pairs, sparse
from mercer.forms.call import Call, Rows, blank


def run(call: Call) -> tuple[Tensor, State | None, Tensor | None]:
    """Compute a call whose documents, if any, the form handles itself: outputs, a state and log-sums, where asked."""
    kind = call.query.device.type
    if not torch.is_autocast_enabled(kind):
        return _run(call)
    with torch.autocast(kind, enabled=False):  # sums are float32 or float64, whatever surrounds the call
        return _run(call)


def _run(call: Call) -> tuple[Tensor, State | None, Tensor | None]:
    batch, query_heads, query_length, _ = call.query.shape
    key_heads, key_length = call.key.shape[1], call.key.shape[2]
    own = tokens(call.merged, batch, query_heads, key_heads, query_length, key_length, call.query.device)
    query = blank(call.query, own.query_valid)
    key, value = blank(call.key, own.key_valid), blank(call.value, own.key_valid)
    mix = isinstance(call.kernel, Mixed)
    path = mixed if mix else features if call.path == "features" else pairs
    rows = path.rows(call, own, query, key, value)
    numerator, denominator, log_factor = rows.numerator, rows.denominator, rows.log_factor
    log_sum = _log_sum(rows, own) if call.log_sums else None
    if call.mass and log_factor is not None and denominator is not None:
        _vanished(call, own, denominator)
    if call.normalizer.needs_count:
        past = None if call.state is None else call.state.length
        denominator = _shown(call, own) if _by_pair(call.merged) else keys_seen(call.merged, own, past, numerator.dtype)
    normalizer = call.normalizer.map_tokens(lambda x: blank(x, own.query_valid))
    if log_factor is None or normalizer.scale_invariant:
        out = normalizer.apply(numerator, denominator)
    else:
        out = normalizer.apply_factored(numerator, denominator, log_factor)
    if out.shape != numerator.shape:
        raise InvalidArgument(
            f"{call.normalizer} returned {list(out.shape)} for a numerator {list(numerator.shape)}: apply must keep "
            "the shape."
        )
    if own.query_valid is not None:
        out = out.masked_fill(~own.query_valid[:, None, :, None], 0)
    out = out.to(call.query.dtype)
    # Elsewhere the check would wait for the device.
    if out.is_cpu and not torch.compiler.is_compiling() and not math.isfinite(out.detach().sum().item()):
        _explain(call, query, key, value, out)
    return out, rows.state, log_sum


def _log_sum(rows: Rows, own: Tokens) -> Tensor:
    """The logarithm of each row's sum of weights, minus infinity where nothing is seen."""
    found = rows.log_sum
    if found is None:
        assert rows.denominator is not None
        empty = rows.denominator == 0
        found = rows.denominator.masked_fill(empty, 1).log()
        found = (found if rows.log_factor is None else found + rows.log_factor).masked_fill(empty, -torch.inf)
    return found if own.query_valid is None else found.masked_fill(~own.query_valid.unsqueeze(1), -torch.inf)


def _by_pair(merged: Merged) -> bool:
    """Whether how many keys a query sees takes more than positions to say."""
    return bool(merged.patterns or merged.pairwise)


def _shown(call: Call, own: Tokens) -> Tensor:
    """How many keys each query sees under a pattern, ``[b, h, Lq]``."""
    past = call.state.past() if isinstance(call.state, CacheState) else None
    return sparse.counts(layout(call.merged, own, past), call.precision)


def _vanished(call: Call, own: Tokens, mass: Tensor) -> None:
    """Raise if a row's weights are so small that they may consist of what the accumulator cannot hold.

    A weight of features that are exponentials is a sum of products of numbers of 1 or less (`forms/log_features.py`);
    products below the smallest normal number are lost. In a row whose weights sum to much more that does not matter.
    """
    if mass.device.type != "cpu" or torch.compiler.is_compiling() or not mass.numel():
        return
    keys = call.key.shape[2] + (0 if call.state is None else int(call.state.length.max()))
    least = torch.finfo(mass.dtype).tiny * 1e6 * keys * (call.kernel.feature_dim(call.query.shape[-1]) or 1)
    low = mass.detach() < least
    if not low.any() or (_by_pair(call.merged) and not call.kernel.log_features):
        return
    past = None if call.state is None else call.state.length
    seen = _shown(call, own) if _by_pair(call.merged) else keys_seen(call.merged, own, past, mass.dtype)
    low = low & (seen > 0)
    if call.merged.decay is not None and call.merged.decay.complement:
        low = low & (mass != 0)  # keys whose rate is 1 weigh nothing
    if low.any():
        raise NonFinite(
            f"{call.kernel} lost the weights of {int(low.sum())} rows below the range of {mass.dtype}: logarithms of "
            "features of a query and a key lie too far apart. Use smaller queries and keys, a smaller scale, or "
            "float64."
        )


def _log_weights(merged: Merged) -> list[Tensor]:
    """What log-weights are made of, with 0 for minus infinity where a bias may say it."""
    bias, alibi, relative, decay = merged.bias, merged.alibi, merged.relative, merged.decay
    found = [
        None if bias is None else bias.tensor.masked_fill(bias.tensor == -torch.inf, 0),
        None if alibi is None else alibi.slopes,
        None if relative is None else relative.table,
        None if decay is None else decay.rate if decay.log_rate is None else decay.log_rate,
    ]
    return [x for x in found if x is not None]


def _explain(call: Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Raise if a result is not finite although everything that went in is."""
    given = [query, key, value]
    if call.state is not None:
        given += [t for t in call.state.tensors().values() if t.is_floating_point()]
    call.normalizer.map_tokens(lambda x: given.append(x) or x)
    given += [*call.kernel.tensors().values(), *_log_weights(call.merged)]
    if all(bool(torch.isfinite(t).all()) for t in given) and not bool(torch.isfinite(out).all()):
        scale = 1.0 if isinstance(call.kernel, Mixed) and call.given_scale is None else call.scale
        largest = scale * (query.double().norm(dim=-1).amax() * key.double().norm(dim=-1).amax()).item()
        raise NonFinite(
            f"{call.kernel} with {call.normalizer} left the range of {out.dtype} or of its sums, though all inputs "
            "are finite: "
            f"scores may reach {abs(largest):.4g}; use a smaller scale, a lower order, or a scale-invariant normaliser."
        )
