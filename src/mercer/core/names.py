"""Names of attentions, as used on the command line and in configurations: ``<kernel>-<normaliser>``.

    softmax = exp-sum    exp-l2    exp-rms    taylor2-sum    taylor4-l2    elu-sum    relu-sum    cosine-l2
    power2-sum    favor256-sum    hedgehog-sum    ...

``powerN`` is the symmetric power, ``favorN`` :class:`PositiveRandomFeatures` with N features, ``hyperbolicN`` the same
with both signs, ``trigN`` and ``rfaN`` :class:`TrigonometricRandomFeatures`, the latter of unit vectors, ``dpfpN``
:class:`Dpfp` with nu = N, ``mlpN`` :class:`MlpFeatures` with N features and N hidden units, ``learnedreluN`` the same
without hidden units.

A closed registry: a name never becomes an import path.
"""

from __future__ import annotations

import re
from typing import Any

from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.errors import InvalidArgument

KERNELS: dict[str, type[Kernel]] = {
    "exp": Exp,
    "taylor": Taylor,
    "elu": Elu,
    "relu": Relu,
    "cosine": Cosine,
    "gaussian": Gaussian,
    "power": Power,
    "favor": PositiveRandomFeatures,
    "hyperbolic": PositiveRandomFeatures,
    "trig": TrigonometricRandomFeatures,
    "rfa": TrigonometricRandomFeatures,
    "dpfp": Dpfp,
    "expfeatures": ExpFeatures,
    "hedgehog": Hedgehog,
    "mlp": MlpFeatures,
    "learnedrelu": MlpFeatures,
}
NORMALIZERS: dict[str, type[Normalizer]] = {
    "sum": Sum,
    "l2": L2,
    "rms": RMS,
    "layernorm": Standardize,
    "identity": Identity,
    "length": Length,
    "gate": SigmoidGate,
    "clamped": Clamped,
    "detached": Detached,
}
ALIASES = {"softmax": "exp-sum", "linear": "elu-sum"}
_NUMBERED = ("taylor", "power", "favor", "hyperbolic", "trig", "rfa", "dpfp", "mlp", "learnedrelu")
_SIGNED = ("taylor", "power", "cosine", "trig", "rfa")
_SETTINGS: dict[str, dict[str, Any]] = {"hyperbolic": {"hyperbolic": True}, "rfa": {"unit": True}}
"""What a word says beyond its class. (The number of "mlp" is also that of its hidden units.)"""


def parse_attention(name: str) -> tuple[Kernel, Normalizer]:
    """Kernel and normaliser of a name such as ``softmax``, ``taylor4-l2`` or ``taylor3-signed-sum``.

    ``-gate`` comes without its gate, and learned kernels without their weights; an attention layer makes both.

    Raises:
        InvalidArgument: for an unknown name; the message lists what is allowed.
    """
    match = re.fullmatch(r"([a-z]+)(\d+)?(-signed)?-([a-z0-9]+)", ALIASES.get(name, name))
    if match is not None:
        word, number, signed, ending = match.groups()
        normalizer = NORMALIZERS.get(ending)
        known = word in KERNELS and (number is not None) == (word in _NUMBERED) and (not signed or word in _SIGNED)
        if known and normalizer is not None:
            return _kernel(word, None if number is None else int(number), bool(signed)), normalizer()
    words = ", ".join(f"{word}N" if word in _NUMBERED else word for word in KERNELS)
    raise InvalidArgument(
        f"Unknown attention {name!r}: write {', '.join(ALIASES)} or KERNEL-NORMALISER with a kernel of {words} "
        f"({', '.join(_SIGNED)} also with -signed behind) and a normaliser of {', '.join(NORMALIZERS)}, for example "
        "taylor4-l2."
    )


def attention_name(kernel: Kernel, normalizer: Normalizer) -> str:
    """The name of a kernel and normaliser; the inverse of :func:`parse_attention`.

    Raises:
        InvalidArgument: for parts of one's own, and for settings or tensors that a name does not carry.
    """
    endings = {cls: word for word, cls in NORMALIZERS.items()}
    plain = not isinstance(normalizer, Clamped) or normalizer == Clamped()
    plain = plain and (not isinstance(normalizer, SigmoidGate) or normalizer.inner == Identity())
    if type(kernel) not in KERNELS.values() or type(normalizer) not in endings or not plain:
        raise InvalidArgument(f"{kernel} with {normalizer} has no registered name.")
    number = next((getattr(kernel, n) for n in ("order", "degree", "count", "nu") if hasattr(kernel, n)), None)
    signed = kernel.allows_negative_denominator
    for word, cls in KERNELS.items():
        if type(kernel) is cls and kernel == _kernel(word, number, signed):
            name = f"{word}{'' if number is None else number}{'-signed' if signed else ''}-{endings[type(normalizer)]}"
            return "softmax" if name == "exp-sum" else name
    raise InvalidArgument(
        f"{kernel} has no registered name, since a name carries neither tensors nor settings other than a number and "
        "'signed': write the kernel itself."
    )


def _kernel(word: str, number: int | None, signed: bool) -> Kernel:
    settings = _SETTINGS.get(word, {}) | ({"hidden": number} if word == "mlp" else {})
    settings |= {"signed": True} if signed else {}
    return KERNELS[word](*([] if number is None else [number]), **settings)
