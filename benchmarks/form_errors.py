"""Largest error of every form against the float64 specification, by dtype: outputs and gradients of q, k and v.

For each shape, structure, kernel and normaliser the form runs on inputs rounded to the dtype; the double loop of
`mercer.core.reference` runs on the same rounded numbers in float64. Reported is max |difference| / max |expected| over
all of them, so in bfloat16 and float16 the last rounding of the result is part of the error (half a unit: 2^-9, 2^-12).
Inputs are standard normal: rows whose terms cancel are included.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.normalizers import L2, Normalizer, Sum
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal, Full, Padding, Structure, Window
from mercer.core.support import FORMS, PATHS, unsupported
from mercer.ops import attention, plan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
KERNELS: tuple[Kernel, ...] = (Exp(), Elu(), Taylor(2), Taylor(4))
NORMALIZERS: tuple[Normalizer, ...] = (Sum(), L2())
SHAPES = ((2, 4, 2, 13, 3, 5), (1, 2, 1, 33, 8, 8), (1, 4, 1, 70, 4, 4))
"""Batch, query heads, key heads, length, dimension, value dimension; the last crosses a chunk of 64 tokens."""


def structures(batch: int, heads: int, length: int, generator: torch.Generator) -> dict[str, Structure]:
    """One structure of each kind."""
    gates = torch.rand(batch, heads, length, generator=generator, dtype=torch.float64) * 0.5 + 0.5
    mask = torch.rand(batch, length, generator=generator) > 0.2
    slopes = torch.rand(heads, generator=generator, dtype=torch.float64)
    return {
        "full": Full(),
        "causal": Causal(),
        "window": Window.last(5),
        "padding": Causal() & Padding(mask),
        "alibi": Causal() & Alibi(slopes),
        "decay": Causal() & Decay(gates),
    }


def relative(actual: Tensor, expected: Tensor) -> float:
    """max |difference| / max |expected|."""
    largest = float(expected.detach().abs().max())
    error = float((actual.detach().double() - expected.detach()).abs().max())
    return error / largest if largest else error


def errors(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], seed: int) -> Iterator[tuple[str, str, float]]:
    """(form, path and backend; output or gradient; error) of every call."""
    for batch, heads, key_heads, length, dim, value_dim in shapes:
        generator = torch.Generator().manual_seed(seed)
        sizes = ((heads, dim), (key_heads, dim), (key_heads, value_dim), (heads, value_dim))
        q, k, v, cotangent = (
            torch.randn(batch, h, length, d, generator=generator, dtype=torch.float64).to(dtype) for h, d in sizes
        )
        for structure in structures(batch, heads, length, generator).values():
            for kernel in KERNELS:
                for normalizer in NORMALIZERS:
                    exact = [x.double().requires_grad_() for x in (q, k, v)]
                    expected = reference_attention(*exact, kernel, normalizer, structure)
                    wanted = torch.autograd.grad(expected, exact, cotangent.double())
                    for form in FORMS:
                        for path in PATHS:
                            if unsupported(kernel, normalizer, merge(structure), form, path) is not None:
                                continue
                            given = [x.clone().requires_grad_() for x in (q, k, v)]
                            options = {"kernel": kernel, "normalizer": normalizer, "structure": structure}
                            chosen = plan(*given, **options, form=form, path=path)
                            label = f"{form} {path} ({chosen.backend})"
                            out = attention(*given, **options, form=form, path=path)
                            yield label, "output", relative(out, expected)
                            for g, w in zip(torch.autograd.grad(out, given, cotangent), wanted, strict=True):
                                yield label, "gradient", relative(g, w)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="form_errors", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the two shorter shapes only")
    options = parser.parse_args(arguments)
    shapes = SHAPES[:2] if options.quick else SHAPES
    started = time.monotonic()
    worst: dict[str, dict[str, dict[str, float]]] = {}
    calls = 0
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for seed in range(options.seeds):
            for label, what, error in errors(dtype, shapes, seed):
                cell = worst.setdefault(label, {}).setdefault(name, {"output": 0.0, "gradient": 0.0})
                cell[what] = max(cell[what], error)
                calls += what == "output"
    names = [str(d).removeprefix("torch.") for d in DTYPES]
    print(f"{'largest relative error':30}" + "".join(f"{n:>22}" for n in names))
    for label in sorted(worst):
        row = (f"{worst[label][n]['output']:.1e} / {worst[label][n]['gradient']:.1e}" for n in names)
        print(f"{label:30}" + "".join(f"{cell if cell else '':>22}" for cell in row))
    print(f"output / gradient; {calls:,} calls, {time.monotonic() - started:.0f} s, torch {torch.__version__}")
    if options.json:
        result = {"shapes": shapes, "seeds": options.seeds, "calls": calls, "torch": torch.__version__, "errors": worst}
        options.json.write_text(json.dumps(result, indent=1))
