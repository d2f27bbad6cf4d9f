"""Milliseconds of one attention, forward and with backward, for each form and backend; one thread by default.

python -m benchmarks.operator_times [--shape B H L D] [--threads N] [--repeats N] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="operator_times", description=__doc__)
    parser.add_argument("--shape", type=int, nargs=4, default=[16, 8, 256, 16], metavar=("B", "H", "L", "D"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args(arguments)

    from mercer.runtime.allocator import tune

    tune()
    import torch

    from mercer import L2, Causal, Elu, Taylor, Window, attention

    torch.set_num_threads(options.threads)
    length = options.shape[2]
    q, k, v = (torch.randn(options.shape, requires_grad=True) for _ in range(3))
    upstream = torch.randn(options.shape)

    def ours(**parts: Any) -> Callable[[], torch.Tensor]:
        return lambda: attention(q, k, v, **({"structure": Causal(), "form": "chunked"} | parts))

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "Exp, Sum: numba": ours(backend="numba"),
        "Exp, Sum: tiles": ours(backend="torch"),
        "Exp, Sum: tiles, window of all": ours(structure=Window(length)),
        "Exp, Sum: dense": ours(form="dense"),
        "Taylor 2, L2: tiles": ours(kernel=Taylor(2), normalizer=L2(), path="pairs"),
        "Taylor 4, L2: tiles": ours(kernel=Taylor(4), normalizer=L2(), path="pairs"),
        "Elu, L2: features": ours(kernel=Elu(), normalizer=L2(), path="features"),
        "Taylor 2, L2: features": ours(kernel=Taylor(2), normalizer=L2(), path="features"),
    }

    def median(run: Callable[[], object]) -> float:
        run()
        times = []
        for _ in range(options.repeats):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times)

    print(
        f"{options.shape} (B, H, L, D), float32, {options.threads} threads, median of {options.repeats}, milliseconds"
    )
    print(f"{'':32}{'forward':>9}{'with backward':>15}")
    results = {}
    for name, way in ways.items():
        with torch.no_grad():
            forward = median(way)
        both = median(lambda way=way: way().backward(upstream))
        results[name] = {"forward": forward, "with_backward": both}
        print(f"{name:32}{forward:9.1f}{both:15.1f}", flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"shape": options.shape, "threads": options.threads, "ms": results}, indent=1)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
