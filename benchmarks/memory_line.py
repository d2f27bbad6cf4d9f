"""Peak memory of the chunked forms, forward and backward, against length: it should be a straight line.

Each measurement is a process of its own: inputs are made, the kernel's high-water mark is reset, and one forward and
backward pass of `mercer.attention` runs. Reported is the peak above what the process held before the pass (the inputs);
of it the output and three gradients, in JSON as "unavoidable", are the part that no algorithm can do without. Linux
only.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = {
    "softmax, tiles": ("exp-sum", "pairs", "window"),
    "softmax, fused": ("exp-sum", "pairs", "causal"),
    "taylor2-l2, tiles": ("taylor2-l2", "pairs", "causal"),
    "elu-sum, features": ("elu-sum", "features", "causal"),
    "taylor2-sum, features": ("taylor2-sum", "features", "causal"),
}


def measure(name: str, path: str, structure: str, length: int, heads: int, dim: int) -> dict[str, float]:
    """Peak bytes of one pass in this process."""
    import torch

    from benchmarks._memory import peak_above
    from mercer import Causal, Window, attention
    from mercer.core.names import parse_attention

    kernel, normalizer = parse_attention(name)
    shape = Causal() if structure == "causal" else Window(length)
    q, k, v = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, heads, length, dim)
    # as large as it takes to have every kernel compiled or read from the disk
    small = [t.detach()[:, :, :4096].clone().requires_grad_() for t in (q, k, v)]
    parts: dict[str, Any] = {"kernel": kernel, "normalizer": normalizer, "structure": shape}
    attention(*small, **parts, form="chunked", path=path).backward(grad[:, :, :4096].clone())
    peak = peak_above(lambda: attention(q, k, v, **parts, form="chunked", path=path).backward(grad))
    return {"peak": peak, "unavoidable": 4 * q.numel() * 4}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="memory_line", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "PATH", "STRUCTURE", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        name, path, structure, length = options.one
        print(json.dumps(measure(name, path, structure, int(length), options.heads, options.dim)))
        return
    table: dict[str, dict[int, dict[str, float]]] = {}
    print(
        f"{'MiB above the inputs':24}" + "".join(f"{n:>12,}" for n in options.lengths) + "   bytes a token, last step"
    )
    for label, case in CASES.items():
        table[label] = {}
        for length in options.lengths:
            command = [sys.executable, "-m", "benchmarks.memory_line", "--one", *case, str(length)]
            command += ["--heads", str(options.heads), "--dim", str(options.dim)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            table[label][length] = json.loads(out.splitlines()[-1])
        peaks = [table[label][n]["peak"] for n in options.lengths]
        slope = (
            (peaks[-1] - peaks[-2]) / (options.lengths[-1] - options.lengths[-2]) if len(peaks) > 1 else float("nan")
        )
        print(f"{label:24}" + "".join(f"{p / 2**20:12.1f}" for p in peaks) + f"{slope:12.0f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
