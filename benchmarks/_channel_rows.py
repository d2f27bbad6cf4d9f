"""Recurrences of single channels for `mixers`: the linear one, Griffin's block, and the diagonal state space."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

if TYPE_CHECKING:
    from benchmarks._mixer_rows import Case, Run

CHANNEL = (3, 8)
"""Operations for a channel and token, an exponential being one: decay, product and sum; backward makes the decay again
and is the same recurrence from the end, with two more products."""
AT_ONCE = 4096
"""Tokens up to which a whole Vandermonde matrix is made: 8 bytes for each channel, number of the state and token."""


def linear_recurrence(length: int, channels: int = 2560) -> Case:
    """The operator alone, as wide as RecurrentGemma 2B. What it takes is moving 12 bytes a channel and token."""
    from benchmarks._mixer_rows import Case
    from mercer.mixers.linear_recurrence import linear_recurrence as scan

    def by(form: str) -> Run:
        return lambda g, x: scan(g, x, form=form)[0]

    def transformers(g: Tensor, x: Tensor) -> Tensor:
        from transformers import RecurrentGemmaConfig
        from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

        unit = RecurrentGemmaRglru(RecurrentGemmaConfig(hidden_size=32, num_attention_heads=1))
        never = torch.zeros(1, g.shape[1], 1, dtype=torch.bool)
        return unit._rnn_scan(x, g.exp(), never, None)[0]  # pyright: ignore[reportPrivateUsage]

    def mambapy(g: Tensor, x: Tensor) -> Tensor:
        from mambapy.pscan import pscan  # pyright: ignore[reportMissingTypeStubs]

        return pscan(g.exp().unsqueeze(-1), x.unsqueeze(-1)).squeeze(-1)

    tensors = (-(torch.rand(1, length, channels) ** 4), torch.randn(1, length, channels))
    ours = {"ours" if form == "auto" else f"ours, {form}": by(form) for form in ("auto", "chunked", "recurrent")}
    name = "transformers RecurrentGemmaRglru._rnn_scan"
    entries = length * channels
    flops = (CHANNEL[0] * entries, CHANNEL[1] * entries)
    return Case(
        f"B=1 n={length:,} C={channels}",
        tensors,
        ours,
        {name: transformers, "mambapy pscan": mambapy},
        flops,
        frozenset({"ours, recurrent", name}),
    )


NAMES = {
    "conv.": "conv_1d.",
    "input_gate.": "rg_lru.input_gate_",
    "decay_gate.": "rg_lru.recurrent_gate_",
    "output.": "linear_out.",
}
"""Of a parameter's first name here the one in transformers."""


def rg_lru(length: int, dim: int = 768, heads: int = 8) -> Case:
    """Griffin's recurrent block, all of its parameters with a gradient."""
    from benchmarks._mixer_rows import Case
    from mercer.mixers.rg_lru import RGLRU

    mixer = RGLRU(dim, dim, blocks=heads)
    names = [name for name, _ in mixer.named_parameters()]
    made: dict[str, torch.nn.Module] = {}

    def ours(x: Tensor, *given: Tensor) -> Tensor:
        return functional_call(mixer, dict(zip(names, given, strict=True)), (x,))

    def transformers(x: Tensor, *given: Tensor) -> Tensor:
        from transformers import RecurrentGemmaConfig
        from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

        if "block" not in made:
            config = RecurrentGemmaConfig(hidden_size=dim, num_attention_heads=heads)
            made["block"] = RecurrentGemmaRecurrentBlock(config, 0)
        there: dict[str, Tensor] = {}
        for name, value in zip(names, given, strict=True):
            kind = name.rpartition(".")[2]
            if name.startswith("input."):
                there[f"linear_y.{kind}"], there[f"linear_x.{kind}"] = value.chunk(2)
            elif name == "decay":
                there["rg_lru.recurrent_param"] = value
            else:
                first = next(part for part in NAMES if name.startswith(part))
                there[NAMES[first] + kind] = value.unsqueeze(1) if name == "conv.weight" else value
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        return functional_call(made["block"], there, (x, positions, None), {"use_cache": False})[0]

    weights = sum(p.numel() for p in mixer.parameters() if p.dim() > 1)
    entries = length * dim
    flops = (2 * length * weights + CHANNEL[0] * entries, 6 * length * weights + CHANNEL[1] * entries)
    tensors = (torch.randn(1, length, dim), *(p.detach() for p in mixer.parameters()))
    name = "transformers RecurrentGemmaRecurrentBlock"
    return Case(f"B=1 n={length:,} dim={dim}", tensors, {"ours": ours}, {name: transformers}, flops, frozenset({name}))


def s4d(length: int, dim: int = 256, state: int = 64) -> Case:
    """The diagonal state space of every channel without what stands around it, its parameters with a gradient. The
    operations are those of three transforms of twice the length for every channel.
    """
    from benchmarks._mixer_rows import Case
    from mercer.mixers.diagonal_system import DiagonalSystem
    from mercer.mixers.s4d import S4D
    from mercer.mixers.state_space import run

    mixer = S4D(dim, state=state)

    def by(form: str) -> Run:
        def ours(u: Tensor, log_rate: Tensor, frequency: Tensor, read: Tensor, log_step: Tensor) -> Tensor:
            rates = torch.complex(-log_rate.double().exp(), frequency.double())
            numbers = torch.view_as_complex(read.double())
            return run(DiagonalSystem(rates, numbers, log_step.double().exp(), "zoh", torch.float32), u, form=form)[0]

        return ours

    def whole(u: Tensor, log_rate: Tensor, frequency: Tensor, read: Tensor, log_step: Tensor) -> Tensor:
        rates = torch.complex(-log_rate.exp(), frequency)
        turned = rates * log_step.exp().unsqueeze(1)
        factors = torch.view_as_complex(read) * (turned.exp() - 1) / rates
        table = torch.exp(turned.unsqueeze(-1) * torch.arange(u.shape[1]))
        kernel = 2 * torch.einsum("hn,hnl->hl", factors, table).real
        size = 2 * u.shape[1]
        spectrum = torch.fft.rfft(u.transpose(1, 2), n=size) * torch.fft.rfft(kernel, n=size)
        return torch.fft.irfft(spectrum, n=size)[..., : u.shape[1]].transpose(1, 2)

    assert mixer.frequency is not None
    parameters = (mixer.log_rate, mixer.frequency, mixer.read, mixer.log_step)
    tensors = (torch.randn(1, length, dim), *(p.detach() for p in parameters))
    forms = ("auto", "convolution", "recurrent")
    ours = {"ours" if form == "auto" else f"ours, {form}": by(form) for form in forms}
    peers: dict[str, Run] = {"whole Vandermonde, one transform": whole} if length <= AT_ONCE else {}
    transforms = 3 * 2.5 * 2 * length * math.log2(2 * length) * dim
    shape = f"B=1 n={length:,} dim={dim} N={state}"
    return Case(shape, tensors, ours, peers, (transforms, 3 * transforms), frozenset({"ours, recurrent"}))
