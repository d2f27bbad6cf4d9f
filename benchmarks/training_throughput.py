"""Training tokens a second of `DecoderLM` (softmax) and of transformers' Llama of the same shape, side by side.

Both models have the same weights, shape, dtype, tokens, fused AdamW, allocator and threads, and live in one process;
the peer runs torch's SDPA without a cache. Before anything is timed their losses must agree. Steps alternate, ours and
theirs, so that whatever else the machine does falls on both; the ratio is the median over the pairs, with quartiles.
The columns behind it time attention alone (forward and backward, all layers): ours, and SDPA on the same tensors.

    python -m benchmarks.training_throughput [--rounds N] [--shape NAME] [--dtype NAME] [--json FILE]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Name: batch, length, dim, layers, heads, kv_heads, vocabulary.
SHAPES = {
    "bytes-small": (16, 256, 128, 4, 8, 8, 256),
    "bytes-medium": (8, 512, 256, 4, 8, 8, 256),
    "words-32k": (4, 256, 256, 2, 8, 2, 32_768),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CHILD = "MERCER_BENCHMARK_CHILD"


def main(arguments: list[str]) -> None:
    """Run in a process of its own, since the allocator has to be set before torch is imported."""
    parser = argparse.ArgumentParser(prog="training_throughput", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed pairs of steps (default 15)")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--dtype", choices=TOLERANCE, action="append", help="default: all")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)
    if os.environ.get(CHILD) != "1":
        command = [sys.executable, "-m", "benchmarks.training_throughput", *arguments]
        subprocess.run(command, check=True, env={"OMP_WAIT_POLICY": "passive"} | os.environ | {CHILD: "1"})
        return

    from mercer.runtime.allocator import tune

    tune()
    from mercer.runtime.environment import environment

    about = environment()
    print(f"{about['processor']}, {about['threads']} threads, torch {about['packages']['torch']}, ", end="")
    print(f"transformers {about['packages']['transformers']}, allocator tuned: {about['allocator']['tuned']}\n")
    print(f"{'shape':14}{'dtype':10}{'ours tok/s':>11}{'theirs':>9}{'ratio':>7}  quartiles   ", end="")
    print(f"{'attention ms':>12}{'SDPA ms':>9}{'share':>7}")
    results: list[dict[str, Any]] = []
    for shape in options.shape or SHAPES:
        for dtype in options.dtype or TOLERANCE:
            result = compare(shape, dtype, options.rounds)
            results.append(result)
            print(
                f"{shape:14}{dtype:10}{result['ours_tokens_per_second']:11,.0f}{result['theirs_tokens_per_second']:9,.0f}"
                f"{result['ratio']:7.2f}  {result['ratio_quartiles'][0]:.2f} - {result['ratio_quartiles'][1]:.2f}"
                f"{1e3 * result['attention_seconds']:15.1f}{1e3 * result['sdpa_seconds']:9.1f}"
                f"{result['attention_share']:7.0%}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": about, "results": results}, indent=2) + "\n")


def compare(shape: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Check that the losses agree, then time alternating steps."""
    import torch
    from torch.nn import functional

    batch, length, dim, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    ours, theirs = models(shape, getattr(torch, dtype))
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def peer_loss() -> torch.Tensor:
        return functional.cross_entropy(theirs(input_ids=inputs).logits.flatten(0, 1).float(), targets.flatten())

    def our_loss() -> torch.Tensor:
        return ours.loss(inputs, targets)

    with torch.no_grad():
        difference = abs(our_loss().item() - peer_loss().item())
    if not difference <= TOLERANCE[dtype]:
        raise SystemExit(f"{shape} {dtype}: the losses differ by {difference:.2e}, so their speeds cannot be compared")

    steps = (training_step(ours, our_loss), training_step(theirs, peer_loss))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 2):
        for step, record in zip(steps, times, strict=True):
            seconds = timed(step)
            if turn >= 2:  # the first two warm up
                record.append(seconds)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    mine, peer = (statistics.median(record) for record in times)
    attention, sdpa = attention_seconds(shape, getattr(torch, dtype), rounds)
    return {
        "shape": shape,
        "dtype": dtype,
        "rounds": rounds,
        "batch": batch,
        "length": length,
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "vocabulary": vocabulary,
        "parameters": ours.parameter_count,
        "loss_difference": difference,
        "ours_seconds": times[0],
        "theirs_seconds": times[1],
        "ours_tokens_per_second": batch * length / mine,
        "theirs_tokens_per_second": batch * length / peer,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "attention_seconds": attention,
        "sdpa_seconds": sdpa,
        "attention_share": attention / mine,
    }


def models(shape: str, dtype: Any) -> tuple[Any, Any]:
    """Ours and the peer with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mercer.models.config import ModelConfig
    from mercer.models.decoder import DecoderLM

    _, length, dim, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    ours = DecoderLM(
        ModelConfig(vocab_size=vocabulary, dim=dim, layers=layers, heads=heads, kv_heads=kv_heads, max_length=length)
    )
    weights = ours.state_dict()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            intermediate_size=weights["blocks.0.feedforward.output.weight"].shape[1],
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=length,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    own = {"model.embed_tokens.weight": weights["embedding.weight"], "model.norm.weight": weights["norm.weight"]}
    own["lm_head.weight"] = weights["embedding.weight"]
    sizes = [dim, dim * kv_heads // heads, dim * kv_heads // heads]
    for i in range(layers):
        a, b = f"model.layers.{i}", f"blocks.{i}"
        q, k, v = weights[f"{b}.attention.qkv.weight"].split(sizes)
        gate, up = weights[f"{b}.feedforward.input.weight"].chunk(2)
        own |= {f"{a}.self_attn.{n}_proj.weight": w for n, w in (("q", q), ("k", k), ("v", v))}
        own |= {f"{a}.mlp.gate_proj.weight": gate, f"{a}.mlp.up_proj.weight": up}
        own[f"{a}.self_attn.o_proj.weight"] = weights[f"{b}.attention.output.weight"]
        own[f"{a}.mlp.down_proj.weight"] = weights[f"{b}.feedforward.output.weight"]
        own[f"{a}.input_layernorm.weight"] = weights[f"{b}.attention_norm.weight"]
        own[f"{a}.post_attention_layernorm.weight"] = weights[f"{b}.feedforward_norm.weight"]
    theirs.load_state_dict(own)
    assert sum(p.numel() for p in theirs.parameters()) == ours.parameter_count
    return ours.to(dtype), theirs.to(dtype).train()


def training_step(model: Any, loss: Callable[[], Any]) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def attention_seconds(shape: str, dtype: Any, rounds: int) -> tuple[float, float]:
    """Median time of one step's attention, forward and backward over all layers: ours, and SDPA."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from mercer.core.structures import Causal
    from mercer.ops import attention

    batch, length, dim, layers, heads, kv_heads, _ = SHAPES[shape]
    # [B, L, H, D] seen as [B, H, L, D], the strides that projections give.
    q, k, v = (
        torch.randn(batch, length, n, dim // heads, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(batch, length, heads, dim // heads, dtype=dtype).transpose(1, 2)

    def ours() -> None:
        torch.autograd.grad(attention(q, k, v, structure=Causal()), (q, k, v), upstream)

    def sdpa() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(out, (q, k, v), upstream)

    pairs = [(timed(ours), timed(sdpa)) for _ in range(rounds + 2)][2:]
    mine, peer = (statistics.median(record) for record in zip(*pairs, strict=True))
    return layers * mine, layers * peer


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1:])
