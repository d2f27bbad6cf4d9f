"""Write docs/support.md from `mercer.core.support`: `python scripts/support_docs.py`."""

from collections.abc import Iterator
from pathlib import Path

import torch

from mercer.core.bigbird import BigBird
from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.log_weights import Alibi, Decay, RelativeBias
from mercer.core.merged import Merged, merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
from mercer.core.pairwise import Bias, Mask
from mercer.core.patterns import Blocks, Longformer, Strided
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.soft_cap import SoftCap
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.core.support import FORMS, PATHS, unsupported

PAGE = Path(__file__).parent.parent / "docs" / "support.md"
KERNELS: dict[str, list[Kernel]] = {
    "`Exp`, `Gaussian`, `SoftCap`": [Exp(), Gaussian(), SoftCap(50)],
    "`Taylor(even)`, `Power(even)`": [Taylor(2), Taylor(4), Power(2)],
    "`Taylor(odd)`, `Power(odd)`": [Taylor(1), Taylor(3), Power(1)],
    "`Elu`, `Relu`, `Dpfp`, `ExpFeatures`, `Hedgehog`, `MlpFeatures`": [
        Elu(),
        Relu(),
        Dpfp(),
        ExpFeatures(),
        Hedgehog(),
        MlpFeatures(),
    ],
    "`PositiveRandomFeatures`": [PositiveRandomFeatures(), PositiveRandomFeatures(hyperbolic=True)],
    "`Cosine`, `TrigonometricRandomFeatures`": [Cosine(), TrigonometricRandomFeatures()],
}
FINITE: list[Kernel] = [k for kernels in KERNELS.values() for k in kernels if k.feature_dim(1) is not None]
MIXED: list[Kernel] = [Mixed(Exp(), k) for k in FINITE if k.positive]
EVERY: list[Kernel] = [k for kernels in KERNELS.values() for k in kernels]
NORMALIZERS: dict[str, list[Normalizer]] = {
    "`Sum`, `Detached`": [Sum(), Detached()],
    "`L2`, `RMS`, `Standardize`": [L2(), RMS(), Standardize()],
    "`Clamped`": [Clamped()],
    "`Length`, `Identity`, `SigmoidGate`": [Length(), Identity(), SigmoidGate()],
}
_ONE = torch.ones(1)
STRUCTURES: dict[str, Structure] = {
    "`Full`": Full(),
    "`Causal`": Causal(),
    "`Window(l, 0)`": Window(3, 0),
    "`Window(l, r)`": Window(3, 2),
    "`Padding`": Padding(lengths=torch.ones(1, dtype=torch.int64)),
    "`Documents`": Documents(torch.tensor([0, 1])),
    "`Causal & Documents`": Causal() & Documents(torch.tensor([0, 1])),
    "`Alibi`": Alibi(_ONE),
    "`Causal & Alibi`": Causal() & Alibi(_ONE),
    "`Causal & Decay`": Causal() & Decay(_ONE),
    "`RelativeBias`": RelativeBias(_ONE.unsqueeze(0)),
    "patterns such as `Longformer`": Longformer(4, (0,)),
    "`Causal &` patterns, `Strided`": Causal() & (Strided(4) | Blocks(4)),
    "`BigBird`, `RandomBlocks`": BigBird(4),
    "`Causal & RelativeBias`": Causal() & RelativeBias(_ONE.unsqueeze(0)),
    "`Mask`, `Bias`": Mask(torch.ones(1, 1, 1, 1, dtype=torch.bool)) & Bias(torch.ones(1, 1, 1, 1)),
}


def forms(kernels: list[Kernel], merged: Merged, path: str) -> str:
    """The forms that work on one path for all of these kernels alike."""
    works = {tuple(f for f in FORMS if unsupported(k, L2(), merged, f, path) is None) for k in kernels}
    assert len(works) == 1, f"these kernels differ in their forms: {works}"
    return ", ".join(works.pop()) or "-"


def stateful(kernels: list[Kernel], merged: Merged, path: str) -> str:
    works = {unsupported(k, L2(), merged, "chunked", path, stateful=True) is None for k in kernels}
    assert len(works) == 1
    return "yes" if works.pop() else "-"


def normaliser(kernels: list[Kernel], normalizers: list[Normalizer]) -> str:
    works = {unsupported(k, n, merge(Causal()), "chunked", "pairs") is None for k in kernels for n in normalizers}
    assert len(works) == 1
    return "yes" if works.pop() else "with `signed=True`"


def page() -> Iterator[str]:
    yield "# What composes with what"
    yield ""
    yield "Written by `scripts/support_docs.py` from the table that the dispatcher and the contract tests read."
    yield "The *pairs* path computes scores of query-key pairs, and its state is a key/value cache; the *features* path"
    yield "carries a state of fixed size. A cell with a dash raises `Unsupported` with the reason and what would work."
    yield ""
    yield "## Structures and forms"
    yield ""
    yield (
        "| structure | pairs: all kernels | cache | features: all but `Exp`, `Gaussian`, `SoftCap` | with a state "
        "| `Mixed` |"
    )
    yield "|---|---|---|---|---|---|"
    for name, structure in STRUCTURES.items():
        merged = merge(structure)
        cells = [
            column(kernels, merged, path)
            for path, kernels in zip(PATHS, (EVERY, FINITE), strict=True)
            for column in (forms, stateful)
        ]
        cells.append("yes" if all(forms(MIXED, merged, path) != "-" for path in PATHS) else "-")
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    yield "`Padding` composes with every structure except `Documents`; windows, `Alibi` and `Decay` compose with each"
    yield "other and with `Documents`. Grouped- and multi-query heads, a value dimension of its own, and float64,"
    yield "float32, bfloat16 and float16 work in every cell. `Mixed(near, far, window)` takes any two kernels by pairs,"
    yield "and a finite `far` by features, chunked or recurrent; where it says yes, with states too."
    yield ""
    yield "## Kernels and normalisers"
    yield ""
    yield "| kernel | " + " | ".join(NORMALIZERS) + " |"
    yield "|---" * (len(NORMALIZERS) + 1) + "|"
    for name, kernels in KERNELS.items():
        yield f"| {name} | " + " | ".join(normaliser(kernels, n) for n in NORMALIZERS.values()) + " |"
    yield ""
    yield "`SigmoidGate(gate, inner)` works where its inner normaliser does. torch's fused attention and the Numba"
    yield "kernels for softmax serve `Sum`, `L2`, `RMS`, `Standardize` and gates around them, not `Detached`, whose"
    yield "gradient is another; the Numba scan of finite kernels serves every normaliser. Under patterns the Numba"
    yield "kernels serve the same, in float32, bfloat16 and float16 (widened), with a cache too, and with slopes of"
    yield "`Alibi` that want no gradient; `Decay`, `RelativeBias`, `Mask`, `Bias` and float64 run by tiles in torch."


def text() -> str:
    return "\n".join(page()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
