"""How far rotary positions are from those of `transformers`, by rope type: rates, cos and sin, and attention outputs.

For each type a configuration is given to `transformers` (a layer of Llama, or of Phi where a part of a head turns; all
its weights drawn anew) and to `mercer.nn.rope_from_config`, for a sequence within the trained length and one of twice
that. Rates: largest relative difference of the radians a position. Turns: largest difference of cos and sin. Attention:
largest difference of the outputs of a causal layer over the largest output. Ours are computed in float64 and rounded
to float32; theirs in float32, which at these lengths is what the differences are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DIM, HEADS, HEAD, TRAINED, CONTEXT = 96, 4, 24, 64, 256
PAIRS = HEAD // 2

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default, base 500": {"rope_type": "default", "rope_theta": 500.0},
    "default, half turned": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, half turned": {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "yarn, all keys": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": TRAINED, "beta_fast": 8.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "rope_theta": 50000.0,
    },
    "yarn, attention factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "attention_factor": 0.8,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": TRAINED, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "rope_theta": 100.0,
    },
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": TRAINED, "factor": 4.0,
        "short_factor": [1 + i / 50 for i in range(PAIRS)], "long_factor": [1.0 + i / 2 for i in range(PAIRS)],
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}  # fmt: skip
"""Every rope type of transformers 5.24, and variations."""

LENGTHS = (TRAINED, 2 * TRAINED)


@dataclass(frozen=True)
class Errors:
    """Differences from `transformers` at one rope type and sequence length."""

    case: str
    length: int
    rates: float
    turns: float
    attention: float
    temperature: float


def peer(parameters: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Configuration, turning and attention layer of `transformers`, with all weights drawn anew."""
    from transformers import LlamaConfig, PhiConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    from transformers.models.phi.modeling_phi import PhiAttention, PhiRotaryEmbedding

    partial = parameters["rope_type"] != "proportional" and "partial_rotary_factor" in parameters
    made, turning, layer = (
        (PhiConfig, PhiRotaryEmbedding, PhiAttention)
        if partial
        else (LlamaConfig, LlamaRotaryEmbedding, LlamaAttention)
    )
    longer = parameters["rope_type"] in ("yarn", "llama3", "longrope")
    config = made(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=2, num_hidden_layers=1,
        max_position_embeddings=CONTEXT if longer else TRAINED, attn_implementation="eager",
        rope_parameters={"rope_theta": 10000.0} | parameters,
    )  # fmt: skip
    attention = layer(config, 0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return config, turning(config), attention


def measure(case: str, length: int) -> Errors:
    """Ours against theirs on a sequence of so many tokens."""
    from mercer.nn import Attention, rope_from_config

    config, theirs, layer = peer(CASES[case])
    rotary = rope_from_config(CASES[case], head_dim=HEAD, max_length=config.max_position_embeddings, allow_longer=True)
    x = torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length)[None]
    hidden = torch.full((length, length), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        cos, sin = theirs(x, positions)
        expected = layer(x, (cos, sin), hidden)[0]
        ours = Attention(
            DIM, HEADS, kv_heads=2, head_dim=HEAD, rotary=rotary, bias=rotary.turned < HEAD
        ).requires_grad_(False)
        for part in ("weight", "bias") if rotary.turned < HEAD else ("weight",):
            joined = torch.cat([getattr(getattr(layer, f"{name}_proj"), part) for name in "qkv"])
            getattr(ours.qkv, part).copy_(joined)
            getattr(ours.output, part).copy_(getattr(layer.dense if hasattr(layer, "dense") else layer.o_proj, part))
        attention = difference(ours(x), expected) / float(expected.abs().max())
    turns = rotary.turns(positions)
    turned, half = rotary.turned, rotary.turned // 2
    signed = torch.cat((-turns.ahead[0, :, :half], turns.behind[0, :, half:turned]), -1)
    our_rates, their_rates = rates(rotary, length), theirs.inv_freq.double()
    turning = our_rates != 0
    return Errors(
        case,
        length,
        float(((their_rates - our_rates)[turning] / our_rates[turning]).abs().max()),
        max(difference(turns.cos[0, :, :turned], cos[0]), difference(signed, sin[0])),
        attention,
        1.0 if rotary.scaling is None else rotary.scaling.temperature,
    )


def rates(rotary: Any, length: int) -> Tensor:
    """Radians a position in float64, [turned / 2], for a sequence of so many tokens."""
    from mercer.nn.rope_scaling import plain_rates

    like: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float64}
    if rotary.scaling is None:
        return plain_rates(rotary.turned, rotary.base, **like)
    return rotary.scaling.rates(rotary.turned, rotary.base, torch.tensor(length), **like)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="rope_errors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same: this takes seconds")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)
    import transformers

    found = [measure(case, length) for case in CASES for length in LENGTHS]
    print("| rope type | tokens | rates, relative | cos and sin | attention, relative | factor of cos and sin |")
    print("|---|---|---|---|---|---|")
    for e in found:
        print(f"| {e.case} | {e.length} | {e.rates:.1e} | {e.turns:.1e} | {e.attention:.1e} | {e.temperature:.5f} |")
    print(f"\ntransformers {transformers.__version__}, torch {torch.__version__}, trained length {TRAINED}")
    if options.json:
        options.json.write_text(json.dumps([asdict(e) for e in found], indent=1))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
