"""One command for a machine with an accelerator: the contracts on it, then the time of every kernel and form.

It takes the accelerator that torch finds (CUDA, MPS, XPU, ...), or else the CPU, and less than six minutes. The
contracts compare every kernel, normaliser, structure and form, in float32 and bfloat16, outputs and gradients, with the
float64 specification on the CPU. What is wrong on the device gets no time and makes the command fail. Times are beside
SDPA's and, where they load, fla's, with the fraction of the device's measured product and copy rates.
docs/benchmarks.md explains what is written.

    python -m benchmarks accelerator [--device NAME] [--quick] [--dtype NAME] [--contracts SECONDS] [--times SECONDS]
        [--each SECONDS] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._process import in_child, prepare

if TYPE_CHECKING:
    import torch

    from benchmarks._device_contracts import Verdict
    from benchmarks._device_times import Time
    from benchmarks._machine import Limits

OWN_CONTRACTS = True
"""Tells `python -m benchmarks` that the contracts are run here, on the device, and not on the CPU first."""
DTYPES = ("float32", "bfloat16")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="accelerator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: the accelerator that torch finds, else the CPU")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of the times; default: both")
    parser.add_argument("--contracts", type=float, default=150.0, help="seconds for the contracts at most (150)")
    parser.add_argument("--times", type=float, default=130.0, help="seconds for the times at most (130)")
    parser.add_argument("--each", type=float, default=0.2, help="longest call; others run on shorter sequences (0.2 s)")
    parser.add_argument(
        "--quick", action="store_true", help="40 cells and an eighth of the lengths: does it run at all?"
    )
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's own choice")
    parser.add_argument("--json", type=Path, help="also write everything here")
    options = parser.parse_args(arguments)
    if options.quick:
        options.each, options.times = min(options.each, 0.02), min(options.times, 45.0)
    if not in_child("benchmarks.accelerator", arguments):
        return
    prepare(options.threads)

    import torch

    from benchmarks._device_contracts import compare
    from benchmarks._device_times import Watch, measure
    from benchmarks._machine import measure as rates
    from mercer.runtime.environment import environment

    began = time.monotonic()
    device = torch.device(options.device) if options.device else found()
    dtypes = tuple(options.dtype or DTYPES)
    about = environment()
    print(f"{device}: {about['device'] or about['processor']}, torch {about['packages']['torch']}, ", end="")
    print(f"float32 products: {torch.get_float32_matmul_precision()}", flush=True)

    verdict = compare(device, options.contracts, 40 if options.quick else None)
    report(verdict)
    limits = rates(dtypes, device, quick=options.quick)
    show_limits(limits)
    watch = Watch(device, limits, options.each)
    times, left = measure(watch, dtypes, verdict.bad, options.times, 8 if options.quick else 1, print)
    table(times)
    if left:
        print(f"{left} more were not reached in {options.times:.0f} s")
    print(f"{time.monotonic() - began:.0f} s in all")
    if options.json is not None:
        told = asdict(verdict) | {"bad": sorted(verdict.bad)}
        result = {
            "kind": "mercer.benchmarks.accelerator/1",
            "environment": about,
            "device": str(device),
            "contracts": told,
            "limits": asdict(limits),
            "not_reached": left,
            "times": [asdict(one) for one in times],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if verdict.failures:
        raise SystemExit(1)


def found() -> torch.device:
    """The accelerator that torch finds, or the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else accelerator


def report(verdict: Verdict) -> None:
    covered = "all pairs of kinds among them" if verdict.pairs else "not every pair of kinds among them"
    worst = ", ".join(f"{name} {value:.2f}" for name, value in verdict.worst.items())
    print(
        f"Contracts: {verdict.cells:,} of {verdict.of:,} cells ({covered}), {verdict.calls:,} calls forward and ",
        end="",
    )
    print(f"backward in {verdict.seconds:.0f} s; largest error over what is allowed: {worst}")
    for failure in verdict.failures[:30]:
        print(f"  WRONG {failure}")
    if len(verdict.failures) > 30:
        print(f"  and {len(verdict.failures) - 30} more")
    if verdict.bad:
        print("  What is wrong gets no time: " + "; ".join(" ".join(way) for way in sorted(verdict.bad)))


def show_limits(limits: Limits) -> None:
    for dtype, by_shape in limits.products.items():
        print(f"Products in {dtype}: " + ", ".join(f"{s}: {r / 1e12:.3g} TFLOP/s" for s, r in by_shape.items()))
    print(f"Memory: copy {limits.copy / 1e9:.4g} GB/s, read {limits.read / 1e9:.4g} GB/s", flush=True)


def table(times: list[Time]) -> None:
    """Forward and backward side by side, a line a way."""
    head = ("forward ms", "products", "copy", "SDPA /", "both ms", "products", "copy", "SDPA /")
    group: tuple[object, ...] = ()
    rows: dict[tuple[object, ...], dict[bool, Time]] = {}
    for one in times:
        key = (one.dtype, one.batch, one.heads, one.dim, one.kernel, one.form, one.path, one.backend, one.length)
        rows.setdefault(key, {})[one.backward] = one
    for key, both in sorted(rows.items(), key=lambda row: _order(row[0])):
        if key[:4] != group:
            group = key[:4]
            print(
                f"\n{key[0]}, batch {key[1]}, {key[2]} heads of {key[3]}: time, share of the product and copy rates, ",
                end="",
            )
            print("SDPA's time over this")
            print(f"{'':58}" + "".join(f"{name:>11}" for name in head))
        label = f"{key[4]:28}{' '.join(str(part) for part in key[5:8] if part):22}{key[8]:>8,}"
        cells = ""
        for backward in (False, True):
            one = both.get(backward)
            cells += (
                f"{1e3 * one.seconds:11.4g}{one.product_fraction:11.1%}{one.copy_fraction:11.1%}{one.sdpa:11.2f}"
                if one
                else " " * 44
            )
        print(label + cells.rstrip())


def _order(key: tuple[object, ...]) -> tuple[int, int]:
    """Wide heads first, and float32 before bfloat16."""
    return -int(str(key[3])), DTYPES.index(str(key[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
