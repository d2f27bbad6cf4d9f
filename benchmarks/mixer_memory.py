"""Time and memory of recurrent mixers against length: both should be straight lines, with states of all tokens nowhere.

Rows are those of `mixers`, ours as a user gets it: layers of Mamba and RG-LRU, gated linear attention, RWKV-7's and
Mamba-2's recurrences. Each length and direction is a process of its own: inputs and parameters are made, the kernel's
high-water mark is reset, and one pass runs. Reported is the peak above what the process held before it, and of that
what no way can do without: outputs forward, gradients of all inputs with backward. `saved` are the bytes a token that
the forward pass leaves for the backward pass, counted on 2,048 tokens. Linux only.

    python -m benchmarks mixer_memory [--quick] [--row NAME] [--length N] [--direction forward|backward] [--most GIB]
        [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._process import VARIABLES

DIRECTIONS = ("forward", "backward")
ROWS = ("mamba", "rg-lru", "gla", "rwkv7", "ssd")
COUNTED = 2048
"""Tokens that what is saved is counted on; as many as it takes to have every kernel compiled or read from the disk."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mixer_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", action="append", help=f"a row of `mixers`; default: {', '.join(ROWS)}")
    parser.add_argument("--length", type=int, action="append", help="tokens; default: 4,096, 16,384 and 65,536")
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="default: both")
    parser.add_argument("--most", type=float, default=8.0, help="GiB that no process may be expected to exceed (8)")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes each (default 3)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="512 and 1,024 tokens, one pass: a look, no result")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--one", nargs=3, metavar=("ROW", "DIRECTION", "LENGTH"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def saved_bytes(row: str, length: int) -> int:
    """What the forward pass keeps for the backward pass besides the inputs, each piece of memory once."""
    import torch

    from benchmarks._mixer_rows import ROWS as CASES

    case = CASES[row](length)
    leaves = [x.detach().clone().requires_grad_() for x in case.tensors]
    inputs = {x.untyped_storage().data_ptr() for x in leaves}
    kept: dict[int, tuple[Any, int]] = {}  # with the memory itself, lest another piece get its address

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = (storage, storage.nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        next(iter(case.ours.values()))(*leaves)
    return sum(size for _, size in kept.values())


def measure(row: str, backward: bool, length: int, rounds: int) -> dict[str, Any]:
    """Of one case, in this process."""
    import statistics

    import torch

    from benchmarks._clock import seconds
    from benchmarks._memory import high_water, peak_above
    from benchmarks._mixer_rows import ROWS as CASES
    from benchmarks.mixers import call
    from mercer.runtime.allocator import tune

    torch.manual_seed(0)
    saved = saved_bytes(row, COUNTED) / COUNTED if backward else 0.0
    small = CASES[row](COUNTED)
    run = next(iter(small.ours.values()))
    call(run, small, backward)()  # loads and compiles what it needs
    del small, run
    case = CASES[row](length)
    made, shape = call(next(iter(case.ours.values())), case, backward), case.shape
    del case  # a pass with backward has inputs of its own
    returned: list[torch.Tensor] = []
    peak = peak_above(lambda: returned.extend(made()))
    whole, size = high_water(), sum(x.nbytes for x in returned)
    returned.clear()
    tune()  # passes that are timed keep the memory they have had
    times = [seconds(made, torch.device("cpu")) for _ in range(rounds)]
    return {
        "row": row,
        "direction": DIRECTIONS[backward],
        "length": length,
        "shape": shape,
        "peak": peak,
        "returned": size,
        "saved_a_token": saved,
        "process": whole,
        "ms": {"median": 1e3 * statistics.median(times), "low": 1e3 * min(times), "high": 1e3 * max(times)},
    }


def expected(done: list[dict[str, Any]], length: int) -> float:
    """Bytes that the process of a length will hold at the highest, by the line through the two lengths before it; 0 for
    the first two, of which nothing is known.
    """
    if len(done) < 2:
        return 0.0
    a, b = done[-2:]
    return b["process"] + (length - b["length"]) * (b["process"] - a["process"]) / (b["length"] - a["length"])


def line(found: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Of the table; what another token takes is seen from the length before it."""
    text = f"  {found['length']:>8,}{found['ms']['median']:12,.1f}{1e3 * found['ms']['median'] / found['length']:10.2f}"
    text += f"{found['peak'] / 2**20:12,.1f}{found['peak'] / found['length']:12,.0f}"
    if before is None:
        return text
    more = (found["peak"] - before["peak"]) / (found["length"] - before["length"])
    return f"{text}{more:12,.0f}"


def child(row: str, direction: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.mixer_memory", "--one", row, direction, str(length)]
    command += ["--rounds", str(1 if options.quick else options.rounds)]
    command += ["--threads", str(options.threads)] if options.threads else []
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=VARIABLES | os.environ)
    if answer.returncode:
        raise SystemExit(f"mixer_memory: {row}, {direction}, {length:,} tokens ended with {answer.returncode}")
    return json.loads(answer.stdout.splitlines()[-1])


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.one:
        import torch

        if options.threads:
            torch.set_num_threads(options.threads)
        row, direction, length = options.one
        print(json.dumps(measure(row, direction == "backward", int(length), options.rounds)))
        return
    from benchmarks._mixer_rows import ROWS as CASES

    if unknown := [name for name in options.row or () if name not in CASES]:
        raise SystemExit(f"there is no row {unknown[0]!r}; there are {', '.join(CASES)}")
    lengths = sorted(options.length or ([512, 1024] if options.quick else [4096, 16_384, 65_536]))
    results: list[dict[str, Any]] = []
    print(f"  {'tokens':>8}{'ms':>12}{'us/token':>10}{'peak MiB':>12}{'B/token':>12}{'B/one more':>12}")
    for row in options.row or ROWS:
        for direction in options.direction or DIRECTIONS:
            done: list[dict[str, Any]] = []
            print(f"{row}, {direction}", flush=True)
            for length in lengths:
                if (foreseen := expected(done, length)) > options.most * 2**30:
                    print(f"  {length:>8,}  left out: {foreseen / 2**30:.1f} GiB expected, {options.most:g} allowed")
                    break
                done.append(child(row, direction, length, options))
                print(line(done[-1], done[-2] if len(done) > 1 else None), flush=True)
            last = done[-1]
            text = f"  of it {last['returned'] / last['length']:,.0f} B/token are what a pass returns"
            text += f", and {last['saved_a_token']:,.0f} saved" if direction == "backward" else ""
            print(text, flush=True)
            results += done
            if options.json:
                options.json.write_text(json.dumps({"cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
