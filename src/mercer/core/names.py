"""Names of attentions, as used on the command line and in configurations: ``<kernel>-<normaliser>``.

    softmax = exp-sum    exp-l2    exp-rms    taylor2-sum    taylor4-l2    elu-sum    relu-sum    cosine-l2
    power2-sum    ...

A closed registry: a name never becomes an import path.
"""

from __future__ import annotations

import re

from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
from mercer.errors import InvalidArgument

KERNELS: dict[str, type[Kernel]] = {
    "exp": Exp,
    "taylor": Taylor,
    "elu": Elu,
    "relu": Relu,
    "cosine": Cosine,
    "gaussian": Gaussian,
    "power": Power,
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
_NUMBERED: tuple[type[Kernel], ...] = (Taylor, Power)


def parse_attention(name: str) -> tuple[Kernel, Normalizer]:
    """Kernel and normaliser of a name such as ``softmax``, ``taylor4-l2`` or ``taylor3-signed-sum``.

    ``-gate`` comes without its gate, which an attention layer makes.

    Raises:
        InvalidArgument: for an unknown name; the message lists what is allowed.
    """
    match = re.fullmatch(r"([a-z]+)(\d+)?(-signed)?-([a-z0-9]+)", ALIASES.get(name, name))
    if match is not None:
        word, number, signed, ending = match.groups()
        kernel, normalizer = KERNELS.get(word), NORMALIZERS.get(ending)
        if kernel is not None and normalizer is not None and (number is not None) == (kernel in _NUMBERED):
            flags = {"signed": True} if signed else {}
            if not signed or "signed" in kernel.__dataclass_fields__:  # pyright: ignore[reportAttributeAccessIssue]
                return kernel(*([int(number)] if number else []), **flags), normalizer()
    raise InvalidArgument(
        f"Unknown attention {name!r}: write {', '.join(ALIASES)} or KERNEL-NORMALISER with a kernel of exp, taylorN, "
        "elu, relu, cosine, gaussian, powerN (or KERNEL-signed) "
        f"and a normaliser of {', '.join(NORMALIZERS)}, for example taylor4-l2."
    )


def attention_name(kernel: Kernel, normalizer: Normalizer) -> str:
    """The name of a kernel and normaliser; the inverse of :func:`parse_attention`."""
    words = {cls: word for word, cls in KERNELS.items()}
    endings = {cls: word for word, cls in NORMALIZERS.items()}
    plain = not isinstance(normalizer, Clamped) or normalizer == Clamped()
    plain = plain and (not isinstance(normalizer, SigmoidGate) or normalizer.inner == Identity())
    if type(kernel) not in words or type(normalizer) not in endings or not plain:
        raise InvalidArgument(f"{kernel} with {normalizer} has no registered name.")
    number = kernel.order if isinstance(kernel, Taylor) else kernel.degree if isinstance(kernel, Power) else ""
    signed = "-signed" if kernel.allows_negative_denominator else ""
    name = f"{words[type(kernel)]}{number}{signed}-{endings[type(normalizer)]}"
    return "softmax" if name == "exp-sum" else name
