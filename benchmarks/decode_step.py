"""Microseconds of one decoding step from a state, and how near it comes to copying the state.

A step of a finite kernel reads its state once and writes it once, so no such step can be quicker than a copy of it; a
step of softmax reads its key/value cache once. Every way is timed in turns, forward only, with the same threads: ours,
torch's recurrent form and a plain copy; for caches of some lengths and dtypes ours, which appends to the cache at every
step, its kernel alone, torch SDPA over a cache that stands there already, and a sum over keys and values, which reads
them once; then a step of a small language model. --compile adds torch.compile, which needs a C++ compiler, to steps of
kernels and of the model.

    python -m benchmarks decode_step [--quick] [--compile] [--batch N] [--kernel NAME] [--cache N] [--dtype NAME]
        [--group N] [--model NAME] [--only PART] [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_child, prepare

if TYPE_CHECKING:
    from mercer.core.kernels import Kernel

HEADS = 8
MODELS = ("elu-sum", "taylor2-sum", "softmax")
DTYPES = ("float32", "bfloat16", "float16")
PARTS = ("kernels", "caches", "models")
NAMES = ("elu", "taylor2", "taylor2-16", "taylor3-16", "favor256")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="decode_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", choices=NAMES, action="append", help="default: all")
    parser.add_argument("--batch", type=int, action="append", help="default: 1 and 16")
    parser.add_argument("--cache", type=int, action="append", help="tokens in the cache; default: 2,048 and 32,768")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of caches; default: float32 and bfloat16")
    parser.add_argument("--group", type=int, action="append", help="query heads to a key head of caches; default: 1")
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all parts")
    parser.add_argument("--model", action="append", help="attentions of the model; default: elu, Taylor 2, softmax")
    parser.add_argument("--compile", action="store_true", help="also time torch.compile")
    parser.add_argument("--rounds", type=int, default=41, help="timed calls each (default 41)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="batch 1, a cache of 256, 3 rounds: a look, no result")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args(arguments)


def kernel_of(name: str) -> tuple[Kernel, int]:
    """A kernel by name, and the head dimension it is timed with."""
    from mercer.core.kernels import Elu, Taylor
    from mercer.core.random_features import PositiveRandomFeatures

    kernels: dict[str, tuple[Kernel, int]] = {
        "elu": (Elu(), 64),
        "taylor2": (Taylor(2), 64),
        "taylor2-16": (Taylor(2), 16),
        "taylor3-16": (Taylor(3, signed=True), 16),
        "favor256": (PositiveRandomFeatures(256), 64),
    }
    return kernels[name]


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median and quartiles in microseconds of each."""
    import torch

    from benchmarks._clock import Spread, interleave

    with torch.inference_mode():
        times = interleave(calls, rounds, 2.0, torch.device("cpu"))
    spreads = {name: Spread.of(taken) for name, taken in times.items()}
    return {n: {"median": 1e6 * s.median, "low": 1e6 * s.low, "high": 1e6 * s.high} for n, s in spreads.items()}


def feature_case(name: str, batch: int, rounds: int, compiled: bool = False) -> dict[str, Any]:
    """A step of a finite kernel: as the plan has it, in torch, and a copy of its state."""
    import torch

    from mercer import Causal, attention, plan
    from mercer.core.state import FeatureState

    kernel, dim = kernel_of(name)
    q, k, v = (torch.randn(batch, HEADS, 1, dim) for _ in range(3))
    parts: dict[str, Any] = {"kernel": kernel, "structure": Causal(), "path": "features", "return_state": True}
    with torch.inference_mode():
        _, state = attention(q, k, v, **parts)
        assert isinstance(state, FeatureState)
        chosen = plan(q, k, v, **parts, state=state)
        ours, theirs = (attention(q, k, v, **parts, state=state, backend=b)[0] for b in (chosen.backend, "torch"))
        if not torch.allclose(ours, theirs, atol=1e-4):
            raise SystemExit(f"decode_step: the step of {name} differs from torch's form, so it is not timed")
        target = torch.empty_like(state.features)

    def step(backend: str) -> Callable[[], object]:
        return lambda: attention(q, k, v, **parts, state=state, backend=backend)

    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(state.features)}
    calls |= {f"step ({backend})": step(backend) for backend in dict.fromkeys((chosen.backend, "torch"))}
    if compiled:
        torch.compiler.reset()
        traced = torch.compile(lambda q, k, v, state: attention(q, k, v, **parts, state=state))
        calls["step (torch.compile)"] = lambda: traced(q, k, v, state)
    times = timed(calls, rounds)
    moved = 2 * state.features.numel() * 4
    return {"case": name, "batch": batch, "dim": dim, "state_bytes": moved // 2, "plan": chosen.reason, "us": times}


def cache_case(length: int, batch: int, rounds: int, dtype: str = "float32", group: int = 1) -> dict[str, Any]:
    """A step of softmax over a cache of `length` tokens, 8 key heads and 8 `group` query heads.

    Every step goes on from the one before, as decoding does, so the cache grows by a token at each.
    """
    import torch

    from mercer import Causal, attention, plan
    from mercer.backends.sharing import installed
    from mercer.core.state import CacheState

    dim, kind = 64, getattr(torch, dtype)
    q = torch.randn(batch, HEADS * group, 1, dim).to(kind)
    k, v = (torch.randn(batch, HEADS, 1, dim).to(kind) for _ in range(2))
    keys, values = (torch.randn(batch, HEADS, length, dim).to(kind) for _ in range(2))
    parts: dict[str, Any] = {"structure": Causal(), "return_state": True}
    with torch.inference_mode():
        _, state = attention(q, keys, values, **parts)
        assert isinstance(state, CacheState)
        chosen = plan(q, k, v, **parts, state=state)
        ours, theirs = (attention(q, k, v, **parts, state=state, backend=b)[0] for b in (chosen.backend, "torch"))
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-4 if kind == torch.float32 else 1e-2):
            raise SystemExit(
                f"decode_step: the step over {length:,} cached differs from torch's form, so it is not timed"
            )
        _, state = attention(q, keys[:, :, 1:], values[:, :, 1:], **parts)  # nothing has gone on from this one
        _, state = attention(q, k, v, **parts, state=state)  # a buffer to grow in
    newest = [state]
    keys, values = state.keys, state.values  # where the step finds them: all ways read the same memory
    words = [x.view(torch.float32) for x in (keys, values)]  # summed as float32, whatever they are

    def step() -> None:
        _, newest[0] = attention(q, k, v, **parts, state=newest[0])

    calls: dict[str, Callable[[], object]] = {
        "read": lambda: [x.sum() for x in words],
        "SDPA, no append": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, enable_gqa=group > 1
        ),
        "softmax step": step,
    }
    if installed():
        from mercer.backends.decode import decode

        calls["decode kernel"] = lambda: decode(q, keys, values, dim**-0.5)
    times = timed(calls, rounds)
    case = f"softmax, {length:,} cached, {dtype}" + (f", {group} queries a head" if group > 1 else "")
    size = 2 * keys.numel() * keys.element_size()
    return {"case": case, "batch": batch, "dim": dim, "state_bytes": size, "plan": chosen.reason, "us": times}


def model_case(name: str, rounds: int, compiled: bool = False, layers: int = 4) -> dict[str, Any]:
    """A step of a language model that has read 64 tokens."""
    import torch

    from mercer.models.config import ModelConfig
    from mercer.models.decoder import DecoderLM

    model = DecoderLM(ModelConfig(vocab_size=256, dim=128, layers=layers, heads=HEADS, attention=name)).eval()
    token = torch.tensor([[7]])
    with torch.inference_mode():
        _, states = model(torch.randint(0, 256, (1, 64)), return_states=True)
    calls: dict[str, Callable[[], object]] = {"step": lambda: model(token, states=states, return_states=True)}
    if compiled:
        torch.compiler.reset()
        traced = torch.compile(model)
        calls["step (torch.compile)"] = lambda: traced(token, states=states, return_states=True)
    size = sum(state.nbytes for state in states)
    title = f"DecoderLM {name}, {layers} x 128"
    return {"case": title, "batch": 1, "dim": 16, "state_bytes": size, "us": timed(calls, rounds)}


def shown(found: dict[str, Any]) -> str:
    """Lines of the table for a case."""
    lines = [f"{found['case']}, batch {found['batch']}, D = {found['dim']}: {found['state_bytes'] / 1e6:.2f} MB"]
    copy, read = found["us"].get("copy"), found["us"].get("read")
    for name, spread in found["us"].items():
        share = f"{100 * copy['median'] / spread['median']:6.0f} % of the copy's rate" if copy else ""
        if read:
            rate = found["state_bytes"] / spread["median"] / 1e3
            share = f"{spread['median'] / read['median']:8.2f} times reading it once, {rate:.1f} GB/s"
        lines.append(f"  {name:20}{spread['median']:11,.1f} us  ({spread['low']:,.1f} to {spread['high']:,.1f}){share}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if not in_child("benchmarks.decode_step", arguments):
        return
    prepare(options.threads)

    import torch

    torch.manual_seed(0)
    groups, dtypes = options.group or [1], options.dtype or list(DTYPES[:2])
    asked = options.only or PARTS
    batches = options.batch or ([1] if options.quick else [1, 16])
    caches = options.cache or ([256] if options.quick else [2048, 32768])
    rounds = 3 if options.quick else options.rounds
    print(f"{HEADS} heads, {torch.get_num_threads()} threads, median of {rounds} (quartiles), microseconds")
    results: list[dict[str, Any]] = []

    def add(found: dict[str, Any]) -> None:
        results.append(found)
        print(shown(found), flush=True)
        if options.json:
            record = {"heads": HEADS, "threads": torch.get_num_threads(), "rounds": rounds, "cases": results}
            options.json.write_text(json.dumps(record, indent=1))

    for batch in batches:
        for name in options.kernel or NAMES if "kernels" in asked else ():
            add(feature_case(name, batch, rounds, options.compile))
        if "caches" in asked:
            for length, dtype, group in product(caches, dtypes, groups):
                add(cache_case(length, batch, rounds, dtype, group))
    for name in options.model or MODELS[: 1 if options.quick else None] if "models" in asked else ():
        add(model_case(name, rounds, options.compile, layers=1 if options.quick else 4))


if __name__ == "__main__":
    main(sys.argv[1:])
