"""Recurrences for a single token from a state, which read the state once and write it once, for `mixers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._mamba_rows import SCAN
from benchmarks._mixer_rows import DELTA, PLAIN, REMOVING, Case, Run, deltanet_parts, fla, gla_parts, rwkv7_parts

Pair = tuple[Tensor, Tensor]
"""Outputs, and the state after the token."""
COPY = "a copy of the state"


def _case(
    words: str, state: Tensor, inputs: tuple[Tensor, ...], ours: dict[str, Run], peers: dict[str, Run], per: int
) -> Case:
    """per: operations for an entry of the state. Every run takes the state first and returns outputs and state."""
    target = torch.empty_like(state)
    return Case(
        f"B={state.shape[0]}, a token, {words}: a state of {state.numel() * 4 / 1e6:.3g} MB",
        (state, *inputs),
        ours,
        peers,
        (per * state.numel(), None),
        beside={COPY: lambda: target.copy_(state)},
    )


def _going_on(update: Callable[..., Tensor], turned: Callable[[Tensor], Tensor]) -> Run:
    """One that writes into its state: it gets its own to begin with, in its layout, and goes on from there."""
    own: list[Tensor] = []

    def run(state: Tensor, *given: Tensor) -> Pair:
        if not own:
            own.append(turned(state).contiguous().clone())
        return update(own[0], *given), turned(own[0])

    return run


def _matrix(batch: int, parts: Callable[..., dict[str, Any]], inputs: tuple[Tensor, ...], peer: dict[str, Run]) -> Case:
    from mercer.mixers.matrix_recurrence import matrix_recurrence

    def by(form: str) -> Run:
        return lambda state, *given: matrix_recurrence(**parts(*given), state=state, form=form)

    heads, dim = inputs[0].shape[1], inputs[0].shape[3]
    state = torch.randn(batch, heads, dim, dim)
    ours = {"ours": by("auto"), "ours, recurrent": by("recurrent")}
    per = {gla_parts: PLAIN, deltanet_parts: DELTA, rwkv7_parts: REMOVING}[parts]
    return _case(f"H={heads} K={dim} V={dim}", state, inputs, ours, peer, per[0])


def _drawn(batch: int, heads: int = 8, dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, unit keys, values and log-decays of every channel, [B, H, 1, D]."""
    q, k, v, g = torch.randn(4, batch, heads, 1, dim)
    return q, torch.nn.functional.normalize(k, dim=-1), v, torch.nn.functional.logsigmoid(g) / 16


def gla(batch: int) -> Case:
    def peer(state: Tensor, *given: Tensor) -> Pair:
        turned = (x.transpose(1, 2) for x in given)
        out, after = fla("gla").naive_recurrent_gla(*turned, initial_state=state, output_final_state=True)
        return out.transpose(1, 2), after

    return _matrix(batch, gla_parts, _drawn(batch), {"fla naive_recurrent_gla": peer})


def deltanet(batch: int) -> Case:
    def peer(state: Tensor, *given: Tensor) -> Pair:
        return fla("delta_rule").delta_rule_recurrence(*given, initial_state=state)

    q, k, v, _ = _drawn(batch)
    inputs = (q, k, v, torch.rand(q.shape[:3]))
    return _matrix(batch, deltanet_parts, inputs, {"fla delta_rule_recurrence": peer})


def rwkv7(batch: int) -> Case:
    def peer(state: Tensor, *given: Tensor) -> Pair:
        return fla("generalized_delta_rule/dplr").dplr_recurrence(*given, initial_state=state)

    q, b, v, g = _drawn(batch)
    inputs = (q, torch.randn_like(b), v, b, -torch.rand(*b.shape[:3], 1) * b, g)
    return _matrix(batch, rwkv7_parts, inputs, {"fla dplr_recurrence": peer})


def selective_scan(batch: int, channels: int = 1536, states: int = 16) -> Case:
    """Of a layer of 768 channels, with softplus and gate."""
    from mercer.mixers.selective_scan import selective_scan as scan

    def by(form: Any) -> Run:
        return lambda h, x, s, a, b, c, d, z: scan(
            x, s, a, b, c, skip=d, gate=z, softplus=True, state=h, form=form
        )  # fmt: skip

    def update(h: Tensor, x: Tensor, s: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
        from transformers.models.mamba.modeling_mamba import mamba_selective_state_update

        x, s, b, c, z = (v.squeeze(1) for v in (x, s, b, c, z))
        return mamba_selective_state_update(h, x, s, a, b, c, d, dt_softplus=True, z=z).unsqueeze(1)

    x, s, z = torch.randn(3, batch, 1, channels)
    b, c = torch.randn(2, batch, 1, states)
    rates = -torch.arange(1.0, states + 1).expand(channels, -1).clone()
    inputs = (x, s - 4, rates, b, c, torch.randn(channels), z)
    state = torch.randn(batch, states, channels)
    ours = {"ours": by("auto"), "ours, recurrent": by("recurrent")}
    peers = {"transformers mamba_selective_state_update": _going_on(update, lambda h: h.transpose(1, 2))}
    return _case(f"channels={channels} N={states}", state, inputs, ours, peers, SCAN[0])


def ssd(batch: int, heads: int = 24, dim: int = 128, width: int = 64) -> Case:
    """Mamba-2's, as its layer calls it: a key and a query for all heads. Values and decays come from steps of 1/8."""
    from mercer.mixers.decayed_sum import decayed_sum

    def ours(state: Tensor, q: Tensor, k: Tensor, x: Tensor, rates: Tensor, steps: Tensor) -> Pair:
        query, key = (part.view(batch, 1, 1, dim).expand(-1, heads, -1, -1) for part in (q, k))
        value, decay = (steps.unsqueeze(-1) * x).unsqueeze(2), (steps * rates).unsqueeze(2)
        return decayed_sum(query, key, value, decay, past=state)

    def update(state: Tensor, q: Tensor, k: Tensor, x: Tensor, rates: Tensor, steps: Tensor) -> Tensor:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

        across = steps.unsqueeze(-1).expand(-1, -1, width)
        every = rates.view(-1, 1, 1).expand(-1, width, dim)
        return mamba2_selective_state_update(state, x, across, every, k.unsqueeze(1), q.unsqueeze(1)).unsqueeze(2)

    q, k = torch.randn(2, batch, dim) * dim**-0.5
    inputs = (q, k, torch.randn(batch, heads, width), -1 - torch.rand(heads), torch.full((batch, heads), 0.125))
    state = torch.randn(batch, heads, dim, width)
    peers = {"transformers mamba2_selective_state_update": _going_on(update, lambda s: s.transpose(2, 3))}
    return _case(f"H={heads} K={dim} V={width}", state, inputs, {"ours": ours}, peers, PLAIN[0])


STEPS: dict[str, Callable[[int], Case]] = {
    "gla-step": gla,
    "deltanet-step": deltanet,
    "rwkv7-step": rwkv7,
    "selective-scan-step": selective_scan,
    "ssd-step": ssd,
}
