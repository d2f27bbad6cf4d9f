"""Mamba's selective scan, and its whole layer, for `mixers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call

if TYPE_CHECKING:
    from benchmarks._mixer_rows import Case, Run

SCAN = (7, 22)
"""Operations for a number of the state and token, an exponential being one: the decay's exponent, the decay, a
product with B, and two sums with a product; backward makes them again, and is a recurrence of its own with a share in
the gradients of A, B, C, dt and x."""

AT_ONCE = 4096
"""Tokens up to which mambapy takes part: it keeps the states of all, 100 KB a token, several times."""


def selective_scan(length: int, channels: int = 1536, states: int = 16) -> Case:
    """The scan of a layer of 768 channels, with softplus and gate."""
    from benchmarks._mixer_rows import Case
    from mercer.mixers.selective_scan import selective_scan as scan

    def by(form: Any) -> Run:
        return lambda x, s, a, b, c, d, z: scan(
            x, s, -a.exp(), b, c, skip=d, gate=z, softplus=True, form=form
        )[0]  # fmt: skip

    def transformers(x: Tensor, s: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan

        across = [v.transpose(1, 2) for v in (x, s, b, c, z)]
        y = mamba_selective_scan(
            across[0], across[1], -a.exp(), *across[2:4], d, across[4], delta_softplus=True
        )  # fmt: skip
        return y.transpose(1, 2)

    def mambapy(x: Tensor, s: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor) -> Tensor:
        from mambapy.mamba import MambaBlock

        step = torch.nn.functional.softplus(s)
        return MambaBlock.selective_scan(None, x, step, -a.exp(), b, c, d) * torch.nn.functional.silu(z)

    sizes = (1, length, channels)
    tensors = (
        torch.randn(sizes),
        torch.randn(sizes) - 4,
        torch.arange(1.0, states + 1).log().expand(channels, -1).clone(),
        *torch.randn(2, 1, length, states),
        torch.randn(channels),
        torch.randn(sizes),
    )
    ours = {"ours" if form == "auto" else f"ours, {form}": by(form) for form in ("auto", "chunked", "recurrent")}
    peers = {"transformers mamba_selective_scan": transformers}
    if length <= AT_ONCE:
        peers["mambapy selective_scan"] = mambapy
    entries = length * channels * states
    shape = f"B=1 n={length:,} channels={channels} N={states}"
    slow = frozenset({"ours, recurrent", "transformers mamba_selective_scan"})
    return Case(shape, tensors, ours, peers, (SCAN[0] * entries, SCAN[1] * entries), slow)


NAMES = {
    "input": "in_proj",
    "convolution": "conv1d",
    "select": "x_proj",
    "step": "dt_proj",
    "output": "out_proj",
    "log_rate": "A_log",
    "skip": "D",
}
"""Of a parameter's first name here the one that transformers and mambapy share."""


def mamba(length: int, dim: int = 768) -> Case:
    """A whole layer, all of its parameters with a gradient."""
    from benchmarks._mixer_rows import Case
    from mercer.mixers.mamba import Mamba

    mixer = Mamba(dim)
    names = [name for name, _ in mixer.named_parameters()]

    def ours(x: Tensor, *given: Tensor) -> Tensor:
        return functional_call(mixer, dict(zip(names, given, strict=True)), (x,))

    def theirs(module: torch.nn.Module) -> Run:
        def run(x: Tensor, *given: Tensor) -> Tensor:
            parameters = {}
            for name, value in zip(names, given, strict=True):
                first, dot, rest = name.partition(".")
                parameters[NAMES[first] + dot + rest] = value.unsqueeze(1) if name == "convolution.weight" else value
            return functional_call(module, parameters, (x,))

        return run

    def transformers(*given: Tensor) -> Tensor:
        from transformers.models.mamba.configuration_mamba import MambaConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer

        if "transformers" not in made:
            made["transformers"] = theirs(MambaMixer(MambaConfig(hidden_size=dim), 0).eval())
        return made["transformers"](*given)

    def mambapy(*given: Tensor) -> Tensor:
        from mambapy.mamba import MambaBlock, MambaConfig

        if "mambapy" not in made:
            made["mambapy"] = theirs(MambaBlock(MambaConfig(d_model=dim, n_layers=1)))
        return made["mambapy"](*given)

    made: dict[str, Run] = {}
    weights = sum(v.numel() for name, v in mixer.named_parameters() if v.dim() == 2 and name != "log_rate")
    entries = length * mixer.inner * mixer.state
    flops = (2 * length * weights + SCAN[0] * entries, 6 * length * weights + SCAN[1] * entries)
    tensors = (torch.randn(1, length, dim), *(v.detach() for v in mixer.parameters()))
    peers = {"transformers MambaMixer": transformers}
    if length <= AT_ONCE:
        peers["mambapy MambaBlock"] = mambapy
    shape = f"B=1 n={length:,} dim={dim}"
    return Case(shape, tensors, {"ours": ours}, peers, flops, frozenset({"transformers MambaMixer"}))
