"""Milliseconds a token of greedy generation, ours and other libraries', from the same weights, one prompt at a time.

Each measurement is a process of its own, which loads the model (`load`), and twice reads a prompt and writes 129
tokens, each stamped when it is there: `first` is the time to the first of them (the better call), `ms/token` the median
of the others, `mean` what they took on the average in the better call, and `cpu` the same of what all threads of the
process were busy, which other processes disturb less; the `cpu` behind `first` likewise. `peak` is the most memory it
held. Rounds go through all contestants in turns; given are medians and quartiles. `of memory` is what a step has to
read, weights and the cache halfway, over its time, as a part of what a sum over a large tensor reads in the same run.
The weights are random, of the shape of SmolLM2-135M; they are made once in --folder. Whoever is not installed is left
out with the reason; the extra `generation` has them all, of which llama-cpp-python is built from source.

    python -m benchmarks generation_speed [--dtype NAME] [--prompt N] [--contestant NAME] [--rounds N] [--threads N]
        [--folder DIR] [--shape NAME] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import _generation_models as models
from benchmarks._generation_contestants import CONTESTANTS
from benchmarks._process import VARIABLES

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0625, "int4": 0.625}
"""Of a weight in our own format; others' differ by a twentieth at most but for int4, where theirs are 0.5625."""
AGREE = 16
"""First tokens in which contestants of float32 must agree with transformers."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generation_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=BYTES, action="append", help="default: float32 and bfloat16")
    parser.add_argument("--prompt", type=int, action="append", help="tokens of the prompt; default: 64 and 2,048")
    parser.add_argument("--contestant", choices=CONTESTANTS, action="append", help="default: all that are installed")
    parser.add_argument("--new", type=int, default=128, help="tokens to write (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all processors")
    parser.add_argument("--folder", type=Path, default=Path("runs/generation"), help="where models are kept")
    parser.add_argument("--shape", choices=models.SHAPES, default="smollm2-135m")
    parser.add_argument("--quick", action="store_true", help="the tiny shape, 8 tokens, one round: a look, no result")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args(arguments)


def measured(name: str, dtype: str, options: argparse.Namespace, prompt: int) -> dict[str, Any]:
    """One process; "skipped" says why there is no number."""
    command = [sys.executable, "-m", "benchmarks._generation_contestants", name, dtype, str(options.folder)]
    command += [options.shape, str(prompt), str(options.new), str(options.threads)]
    threads = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=VARIABLES | os.environ | threads)
    if done.returncode:
        lines = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()
        return {"skipped": lines[-1][:160]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def read_rate(threads: int) -> float:
    """Bytes a second of a sum over half a gigabyte, the best of some."""
    import time

    import torch

    torch.set_num_threads(threads)
    numbers, best = torch.ones(1 << 27), 0.0
    for _ in range(7):
        before = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - before))
    return best


def step_bytes(shape: str, dtype: str, tokens: int) -> float:
    """What a step has to read: every weight once, and keys and values of so many tokens."""
    vocabulary, dim, layers, heads, key_heads, hidden = models.SHAPES[shape]
    size = dim // heads
    scores, weights = vocabulary * dim, layers * dim * (2 * dim + 2 * key_heads * size + 3 * hidden)
    cache = 2 * layers * key_heads * size * tokens * (4 if dtype == "float32" else 2)
    return weights * BYTES[dtype] + scores * BYTES["int8" if dtype == "int4" else dtype] + cache


def case(dtype: str, prompt: int, options: argparse.Namespace) -> dict[str, Any]:
    chosen = [n for n in options.contestant or CONTESTANTS if dtype in CONTESTANTS[n][2]]
    rows: dict[str, list[dict[str, Any]]] = {}
    skipped: dict[str, str] = {}
    for name in chosen:
        package = CONTESTANTS[name][1]
        if importlib.util.find_spec(package) is None:
            skipped[name] = f"{package} is not installed"
    rates = [read_rate(options.threads)]
    for turn in range(options.rounds):
        for name in chosen if turn % 2 == 0 else reversed(chosen):
            if name in skipped:
                continue
            found = measured(name, dtype, options, prompt)
            if "skipped" in found:
                skipped[name] = found["skipped"]
            else:
                rows.setdefault(name, []).append(found)
    rates.append(read_rate(options.threads))
    reference = rows.get("transformers", rows.get("mercer", [{}]))[0].get("tokens", [])
    for name, runs in rows.items():
        same = next((i for i, (a, b) in enumerate(zip(runs[0]["tokens"], reference, strict=True)) if a != b), None)
        for run in runs:
            run["agrees"] = len(reference) if same is None else same
        if dtype == "float32" and same is not None and same < min(AGREE, len(reference)):
            skipped[name] = f"differs from the reference from token {same} on, so it is not shown"
    rows = {name: runs for name, runs in rows.items() if name not in skipped}
    needed = step_bytes(options.shape, dtype, prompt + options.new // 2)
    return {
        "dtype": dtype, "prompt": prompt, "rows": rows, "skipped": skipped, "step_bytes": needed,
        "read_bytes_per_second": max(rates),
    }  # fmt: skip


def shown(found: dict[str, Any]) -> None:
    rate, needed = found["read_bytes_per_second"], found["step_bytes"]
    print(
        f"\n{found['dtype']}, a prompt of {found['prompt']:,}: a step reads {needed / 1e6:,.0f} MB, "
        f"{1e3 * needed / rate:.1f} ms at {rate / 1e9:.1f} GB/s"
    )
    heads = (
        ("ms/token", 9),
        ("quartiles", 16),
        ("mean", 8),
        ("cpu ms", 8),
        ("of memory", 11),
        ("first s", 9),
        ("cpu s", 7),
        ("load s", 8),
        ("peak MB", 9),
    )
    print(" " * 28 + "".join(f"{head:>{width}}" for head, width in (*heads, ("agrees", 8))))
    ours = found["rows"].get("mercer")
    for name, runs in sorted(found["rows"].items(), key=lambda row: median(row[1], "token")):
        token = median(runs, "token")
        low, high = (sorted(r["token"] for r in runs)[i] for i in (len(runs) // 4, -1 - len(runs) // 4))
        print(
            f"{name:28}{1e3 * token:9.2f}{f'{1e3 * low:.2f}-{1e3 * high:.2f}':>16}"
            f"{1e3 * median(runs, 'mean'):8.2f}{1e3 * median(runs, 'cpu'):8.2f}{needed / token / rate:11.0%}"
            f"{median(runs, 'first'):9.2f}{median(runs, 'first_cpu'):7.2f}"
            f"{median(runs, 'load'):8.1f}{median(runs, 'peak') / 1e6:9.0f}"
            f"{runs[0]['agrees']:8}"
        )
        if ours and name != "mercer":
            token, first = (
                statistics.median(theirs[key] / mine[key] for theirs, mine in zip(runs, ours, strict=False))
                for key in ("token", "first")
            )
            print(f"{'':28}{token:9.2f} times ours a token, {first:.2f} to the first, round by round")
    for name, reason in found["skipped"].items():
        print(f"{name:28} left out: {reason}")


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.quick:
        options.shape, options.new, options.rounds = "tiny", 8, 1
        options.prompt = options.prompt or [16]
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = []
    for dtype in options.dtype or ["float32", "bfloat16"]:
        for prompt in options.prompt or [64, 2048]:
            cases.append(case(dtype, prompt, options))
            shown(cases[-1])
    load = [round(x, 2) for x in os.getloadavg()]
    print(f"\n{options.threads} threads, {options.rounds} rounds; load of the machine at the end: {load}")
    if options.json is not None:
        record = {"kind": "mercer.benchmarks.generation_speed/1", "load": load, "threads": options.threads}
        options.json.write_text(json.dumps(record | {"shape": options.shape, "cases": cases}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
