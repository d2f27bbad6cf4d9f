"""Names of attentions, as used on the command line and in configurations: ``<kernel>-<normaliser>``.

    softmax = exp-sum    exp-l2    exp-rms    taylor2-sum    taylor4-l2    elu-sum    relu-sum    cosine-l2
    power2-sum    softcap50-sum    favor256-sum    hedgehog-sum    ...

``powerN`` is the symmetric power, ``softcapN`` :class:`SoftCap` with cap N, ``favorN``
:class:`PositiveRandomFeatures` with N features, ``hyperbolicN`` the same with both signs, ``trigN`` and ``rfaN``
:class:`TrigonometricRandomFeatures`, the latter of unit vectors, ``dpfpN`` :class:`Dpfp` with nu = N, ``mlpN``
:class:`MlpFeatures` with N features and N hidden units, ``learnedreluN`` the same without hidden units.
``exp@64:taylor2-sum`` is :class:`Mixed`: the first kernel for the last 64 keys, the second for all before them.

A closed registry: a name never becomes an import path.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.soft_cap import SoftCap
from mercer.errors import InvalidArgument

KERNELS: dict[str, type[Kernel]] = {
    "exp": Exp,
    "taylor": Taylor,
    "elu": Elu,
    "relu": Relu,
    "cosine": Cosine,
    "gaussian": Gaussian,
    "power": Power,
    "softcap": SoftCap,
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
_NUMBERED = ("taylor", "power", "softcap", "favor", "hyperbolic", "trig", "rfa", "dpfp", "mlp", "learnedrelu")
_SIGNED = ("taylor", "power", "cosine", "trig", "rfa")
_NUMBER = "0|[1-9][0-9]{0,8}"  # written in one way only, so that a name comes back as it was
_SETTINGS: dict[str, dict[str, Any]] = {"hyperbolic": {"hyperbolic": True}, "rfa": {"unit": True}}
"""What a word says beyond its class. (The number of "mlp" is also that of its hidden units.)"""


def parse_attention(name: str) -> tuple[Kernel, Normalizer]:
    """Kernel and normaliser of a name such as ``softmax``, ``taylor4-l2`` or ``taylor3-signed-sum``.

    ``-gate`` comes without its gate, and learned kernels without their weights; an attention layer makes both.

    Raises:
        InvalidArgument: for an unknown name; the message lists what is allowed.
    """
    text, _, ending = ALIASES.get(name, name).rpartition("-") if isinstance(name, str) else ("", "", "")  # pyright: ignore[reportUnnecessaryIsInstance]
    mixed = re.fullmatch(rf"([^@:]+)@({_NUMBER}):([^@:]+)", text)
    kernels = [_parse_kernel(part) for part in (mixed.group(1, 3) if mixed else (text,))]
    if ending in NORMALIZERS and kernels[0] is not None and kernels[-1] is not None:
        kernel = Mixed(kernels[0], kernels[1], int(mixed[2])) if mixed and kernels[1] is not None else kernels[0]
        return kernel, NORMALIZERS[ending]()
    words = ", ".join(f"{word}N" if word in _NUMBERED else word for word in KERNELS)
    raise InvalidArgument(
        f"Unknown attention {name!r}{_what_is_wrong(name)}: write {', '.join(ALIASES)} or KERNEL-NORMALISER with a "
        f"kernel of {words} ({', '.join(_SIGNED)} also with -signed behind; or NEAR@WINDOW:FAR of two) and a "
        f"normaliser of {', '.join(NORMALIZERS)}, for example taylor4-l2 or exp@64:taylor2-sum; docs/kernels.md and "
        "docs/normalizers.md have them all."
    )


def _what_is_wrong(name: object) -> str:
    """Which part of a name is unknown, and what is spelt like it."""
    if not isinstance(name, str):
        return ""
    text, _, ending = name.rpartition("-")
    if _kernels(name) is not None or (ending not in NORMALIZERS and _kernels(text) is None):
        text, ending = name, ""  # a kernel is meant, without a normaliser
    mixed = re.fullmatch(rf"([^@:]+)@({_NUMBER}):([^@:]+)", text)
    parts = mixed.group(1, 3) if mixed else (text,)
    unknown = next((part for part in parts if _parse_kernel(part) is None), None)
    if unknown is None:
        found = f" has no known normaliser, {ending!r}" if ending else " names no normaliser"
    elif not text:
        return " names a normaliser and no kernel" if ending else ""
    else:
        found = "" if unknown == name else f" has no known kernel, {unknown!r}"
    close = difflib.get_close_matches(name, ALIASES, 1, 0.7)
    near = [part if _parse_kernel(part) else _near_kernel(part) for part in parts]
    if not close and all(near):
        known = difflib.get_close_matches(ending, NORMALIZERS, 1) or ["sum"]
        close = [f"{f'@{mixed[2]}:'.join(map(str, near)) if mixed else near[0]}-{known[0]}"]
    return f"{found} (did you mean {close[0]}?)" if close else found


def _kernels(text: str) -> tuple[Kernel, ...] | None:
    """The kernel that a text names, or two of them; None if it names something else."""
    mixed = re.fullmatch(rf"([^@:]+)@({_NUMBER}):([^@:]+)", text)
    kernels = [_parse_kernel(part) for part in (mixed.group(1, 3) if mixed else (text,))]
    return tuple(kernel for kernel in kernels if kernel is not None) if None not in kernels else None


def _near_kernel(text: str) -> str | None:
    """The kernel that is spelt like this, with the number that was given."""
    parts = re.fullmatch(r"([^\d-]*)(\d*)(-signed)?", text)
    close = [] if parts is None else difflib.get_close_matches(parts[1].lower(), KERNELS, 1)
    if parts is None or not close:
        return None
    near = f"{close[0]}{(parts[2] or 2) if close[0] in _NUMBERED else ''}{parts[3] or ''}"
    try:
        return near if _parse_kernel(near) is not None else None
    except InvalidArgument:  # a number that this kernel cannot have
        return None


def attention_name(kernel: Kernel, normalizer: Normalizer) -> str:
    """The name of a kernel and normaliser; the inverse of :func:`parse_attention`.

    Raises:
        InvalidArgument: for parts of one's own, and for settings or tensors that a name does not carry.
    """
    endings = {cls: word for word, cls in NORMALIZERS.items()}
    plain = not isinstance(normalizer, Clamped) or normalizer == Clamped()
    if isinstance(normalizer, SigmoidGate):
        plain = normalizer.gate is None and normalizer.inner == Identity()
    elif isinstance(normalizer, L2 | RMS | Standardize):
        plain = all(tensor is None for tensor in vars(normalizer).values())
    if type(normalizer) not in endings or not plain:
        raise InvalidArgument(f"{kernel} with {normalizer} has no registered name.")
    name = f"{_kernel_name(kernel)}-{endings[type(normalizer)]}"
    return "softmax" if name == "exp-sum" else name


def _kernel_name(kernel: Kernel) -> str:
    if isinstance(kernel, Mixed) and kernel.log_ratio is None:
        return f"{_kernel_name(kernel.near)}@{kernel.window}:{_kernel_name(kernel.far)}"
    if type(kernel) not in KERNELS.values():
        raise InvalidArgument(f"{kernel} has no registered name.")
    number = next((getattr(kernel, n) for n in ("order", "degree", "cap", "count", "nu") if hasattr(kernel, n)), None)
    whole = None if number is None else int(number)  # which a cap need not be
    signed = kernel.allows_negative_denominator
    for word, cls in KERNELS.items():
        if type(kernel) is cls and whole == number and kernel == _kernel(word, whole, signed):
            return f"{word}{'' if whole is None else whole}{'-signed' if signed else ''}"
    raise InvalidArgument(
        f"{kernel} has no registered name, since a name carries neither tensors nor settings other than a number and "
        "'signed': write the kernel itself."
    )


def _parse_kernel(text: str) -> Kernel | None:
    match = re.fullmatch(rf"([a-z]+)({_NUMBER})?(-signed)?", text)
    if match is None:
        return None
    word, number, signed = match.groups()
    known = word in KERNELS and (number is not None) == (word in _NUMBERED) and (not signed or word in _SIGNED)
    return _kernel(word, None if number is None else int(number), bool(signed)) if known else None


def _kernel(word: str, number: int | None, signed: bool) -> Kernel:
    settings = _SETTINGS.get(word, {}) | ({"hidden": number} if word == "mlp" else {})
    settings |= {"signed": True} if signed else {}
    return KERNELS[word](*([] if number is None else [number]), **settings)
