"""The contestants of `generation_speed`: one process loads one model, generates, and says how long that took.

    python -m benchmarks._generation_contestants NAME DTYPE ROOT SHAPE PROMPT NEW THREADS

Every contestant is asked for greedy tokens through the interface that its own documentation shows for that, and
gives each as soon as it has it: all times are taken in one call.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import _generation_models as models

Told = Callable[[int], Any]
"""Is told of a token."""
Generate = Callable[[list[int], int, Told], Any]
"""From a prompt and a count to so many new tokens, each of which the third is told of when it is there."""


def ours(dtype: str, root: Path, shape: str, threads: int) -> Generate:
    import torch

    from mercer.checkpoints import load
    from mercer.inference.engine import prepare

    torch.set_num_threads(threads)
    plain = dtype in ("float32", "bfloat16")
    model = load(models.hub_folder(root, shape, dtype if plain else "float32"))
    engine = prepare(model, "as_is" if plain else dtype, keep=False)
    del model

    def run(prompt: list[int], count: int, told: Told) -> None:
        tokens, states = torch.tensor([prompt]), None
        with torch.inference_mode():
            for i in range(count):
                if i:
                    logits, states = engine(tokens, states=states, return_states=True)
                else:
                    hidden, states = engine.hidden(tokens, return_states=True)
                    logits = engine.score(hidden[:, -1:])
                tokens = logits[:, -1].argmax(-1, keepdim=True)
                told(int(tokens))

    return run


def module(dtype: str, root: Path, shape: str, threads: int) -> Generate:
    """Our model without the engine."""
    import torch

    from mercer.checkpoints import load
    from mercer.inference.generate import generate
    from mercer.inference.sampler import Sampling

    torch.set_num_threads(threads)
    model = load(models.hub_folder(root, shape, dtype))

    def run(prompt: list[int], count: int, told: Told) -> None:
        for token in generate(model, prompt, count, Sampling(temperature=0)):
            told(token)

    return run


def transformers(dtype: str, root: Path, shape: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(models.hub_folder(root, shape, dtype), dtype=getattr(torch, dtype))

    class Streamer(BaseStreamer):
        """Gets the prompt, and then each token."""

        def __init__(self, told: Told) -> None:
            self.told, self.prompted = told, False

        def put(self, value: torch.Tensor) -> None:
            if self.prompted:
                self.told(int(value))
            self.prompted = True

        def end(self) -> None:
            pass

    def run(prompt: list[int], count: int, told: Told) -> None:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
                streamer=Streamer(told),
            )

    return run


def ctranslate2(dtype: str, root: Path, shape: str, threads: int) -> Generate:
    package = importlib.import_module("ctranslate2")
    folder = models.ctranslate2_folder(root, shape, dtype)
    generator = package.Generator(str(folder), device="cpu", intra_threads=threads, inter_threads=1, compute_type=dtype)
    pieces = json.loads((folder / "vocabulary.json").read_text())

    def run(prompt: list[int], count: int, told: Told) -> None:
        generator.generate_batch(
            [[pieces[token] for token in prompt]],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            cache_static_prompt=False,
            callback=lambda step: told(step.token_id) or False,
        )

    return run


def llama_cpp(dtype: str, root: Path, shape: str, threads: int) -> Generate:
    package = importlib.import_module("llama_cpp")
    model = package.Llama(
        str(models.gguf_file(root, shape, dtype)),
        n_ctx=4096,
        n_batch=2048,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def run(prompt: list[int], count: int, told: Told) -> None:
        model.reset()
        tokens = model.generate(prompt, temp=0.0, repeat_penalty=1.0, top_k=1)
        for _, token in zip(range(count), tokens, strict=False):
            told(token)

    return run


def openvino(dtype: str, root: Path, shape: str, threads: int) -> Generate:
    """From GGUF, of which it reads 8 and 4 bits (and float16) alone: other models take a converter of its own."""
    package, tensors = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    file = models.gguf_file(root, shape, dtype)
    pipe = package.LLMPipeline(str(file), "CPU", INFERENCE_NUM_THREADS=threads, ATTENTION_BACKEND="SDPA")

    class Streamer(package.StreamerBase):
        """Gets each token, or several."""

        def __init__(self, told: Told) -> None:
            super().__init__()
            self.told = told

        def write(self, token: int | list[int]) -> Any:
            for one in [token] if isinstance(token, int) else token:
                self.told(one)
            return package.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def run(prompt: list[int], count: int, told: Told) -> None:
        import numpy as np

        options = package.GenerationConfig()
        options.max_new_tokens = options.min_new_tokens = count
        options.ignore_eos, options.do_sample, options.apply_chat_template = True, False, False
        pipe.generate(tensors.Tensor(np.array([prompt], np.int64)), options, Streamer(told))

    return run


def onnxruntime(dtype: str, root: Path, shape: str, threads: int) -> Generate:
    package = importlib.import_module("onnxruntime_genai")
    folder = models.onnx_folder(root, shape, dtype)
    config = package.Config(str(folder))
    config.overlay(
        json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}),
    )
    model = package.Model(config)

    def run(prompt: list[int], count: int, told: Told) -> None:
        total = len(prompt) + count
        parameters = package.GeneratorParams(model)
        parameters.set_search_options(max_length=total, min_length=total, do_sample=False)
        generator = package.Generator(model, parameters)
        generator.append_tokens([prompt])
        for _ in range(count):
            generator.generate_next_token()
            told(int(generator.get_next_tokens()[0]))

    return run


CONTESTANTS: dict[str, tuple[Callable[[str, Path, str, int], Generate], str, tuple[str, ...]]] = {
    "mercer": (ours, "mercer", ("float32", "bfloat16", "int8", "int4")),
    "mercer, without the engine": (module, "mercer", ("float32", "bfloat16")),
    "transformers": (transformers, "transformers", ("float32", "bfloat16")),
    "ctranslate2": (ctranslate2, "ctranslate2", ("float32", "bfloat16", "int8")),
    "llama.cpp": (llama_cpp, "llama_cpp", ("float32", "bfloat16", "int8", "int4")),
    "openvino-genai": (openvino, "openvino_genai", ("int8", "int4")),
    "onnxruntime-genai": (onnxruntime, "onnxruntime_genai", ("float32", "int4")),
}
"""What loads each, the package that has to be there, and the dtypes of weights that it is asked for."""


def prompt_of(length: int, shape: str) -> list[int]:
    """Tokens that are neither the end nor single bytes."""
    size = models.SHAPES[shape][0]
    return [300 + (7919 * i + 104_729) % (size - 300) for i in range(length)]


def peak_bytes() -> int:
    """The most memory that this process held. What `getrusage` says begins with what the parent held."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Stamps:
    """The tokens of one call, and the clock and the processor time when each was there."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.clock, self.busy = [time.perf_counter()], [time.process_time()]

    def __call__(self, token: int) -> None:
        self.tokens.append(token)
        self.clock.append(time.perf_counter())
        self.busy.append(time.process_time())


def told(calls: list[Stamps]) -> dict[str, Any]:
    """Times of calls alike: to the first token, the better of them; of a later token, the median of all."""
    gaps = [b - a for call in calls for a, b in zip(call.clock[1:], call.clock[2:], strict=False)]
    later = len(calls[0].tokens) - 1
    return {
        "first": min(call.clock[1] - call.clock[0] for call in calls),
        "first_cpu": min(call.busy[1] - call.busy[0] for call in calls),
        "token": statistics.median(gaps),
        "mean": min(call.clock[-1] - call.clock[1] for call in calls) / later,
        "cpu": min(call.busy[-1] - call.busy[1] for call in calls) / later,
        "tokens": calls[-1].tokens,
    }


def main(arguments: list[str]) -> None:
    name, dtype, root, shape = arguments[:4]
    length, new, threads = map(int, arguments[4:])
    before = time.perf_counter()
    generate = CONTESTANTS[name][0](dtype, Path(root), shape, threads)
    loaded = time.perf_counter() - before
    prompt = prompt_of(length, shape)
    generate(prompt[:16], 3, Stamps())
    calls: list[Stamps] = []
    for _ in range(2):
        calls.append(Stamps())
        generate(prompt, 1 + new, calls[-1])
        if len(calls[-1].tokens) != 1 + new:
            raise SystemExit(f"{name} gave {len(calls[-1].tokens)} tokens for {1 + new}")
    found = told(calls) | {"load": loaded, "peak": peak_bytes()}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
