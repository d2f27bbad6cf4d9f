"""Names of attentions in transformers: `mercer:NAME`, of the grammar of `mercer.parse_attention` or one's own."""

import re

from transformers import AttentionInterface, AttentionMaskInterface

from mercer.core.denominators import SigmoidGate
from mercer.core.kernels import Exp, Kernel
from mercer.core.merged import merge
from mercer.core.names import NORMALIZERS, parse_attention
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.structures import Both, Causal, Documents, Padding, Structure
from mercer.core.support import unsupported
from mercer.errors import InvalidArgument, MercerError, Unsupported
from mercer.integrations.hf.attention import PREFIX, AttentionFunction, Parts
from mercer.integrations.hf.masks import mask_function

COMMON = ("exp", "gaussian", "elu", "relu", "cosine", "taylor2", "taylor4", "taylor6", "taylor8", "power2", "power4")
"""Kernels that are registered, with every normaliser that takes them, when the module is imported."""

_OWN = re.compile(r"[a-z0-9][a-z0-9._-]*")
_TAKEN = ("flash", "sdpa", "flex_attention", "eager", "paged")  # words that transformers looks for inside names


def register(
    name: str,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
) -> str:
    """Make an attention known to transformers; returns what to say as `attn_implementation`: "mercer:" and the name.

    With a name of the grammar of `mercer.parse_attention` and nothing else, it is that kernel and normaliser:
    `register("taylor4-l2")`. With parts it is a name of one's own, of small letters, digits and "._-" (parts
    that are left out are `Exp()`, `Sum()` and no structure). structure: composed with the one that the model
    asks for, so that `Window.last(128)` makes a causal model see 128 tokens back; a padding and packed sequences come
    from the call. Registering a name again replaces it for every model that uses it.

    Raises:
        InvalidArgument: an unknown name, or one that cannot be one's own.
        Unsupported: parts that cannot be combined; the message says what would work.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"register: name must be a string, not {name!r}.")
    short = name.removeprefix(PREFIX)
    if kernel is None and normalizer is None and structure is None:
        parts = Parts(*parse_attention(short))
    else:
        _check_own(short)
        parts = Parts(Exp() if kernel is None else kernel, Sum() if normalizer is None else normalizer, structure)
    check(parts)
    full = PREFIX + short
    AttentionInterface.register(full, AttentionFunction(full, parts))
    AttentionMaskInterface.register(full, mask_function)
    return full


def check(parts: Parts) -> None:
    """Refuse what no model could run."""
    for what, part, kind in (("kernel", parts.kernel, Kernel), ("normalizer", parts.normalizer, Normalizer)):
        if not isinstance(part, kind):
            raise InvalidArgument(f"{what} must be a {what} object, not {part!r}.")
    if isinstance(parts.normalizer, SigmoidGate) and parts.normalizer.gate is None:
        raise Unsupported(
            "SigmoidGate multiplies by gates of the input, which a swapped model does not make: use L2()."
        )
    structure = parts.structure
    if structure is not None:
        if not isinstance(structure, Structure):
            raise InvalidArgument(f"structure must be a structure object, not {structure!r}.")
        if any(isinstance(part, Padding | Documents) for part in structure.parts):
            raise Unsupported(
                "Padding and Documents belong to a batch: the model's attention_mask and position_ids say them."
            )
    merged = merge(Causal() if structure is None else Both((Causal(), *structure.parts)))
    why = unsupported(parts.kernel, parts.normalizer, merged, "chunked", "pairs")
    if why is not None:
        raise Unsupported(why)


def _check_own(name: str) -> None:
    if not _OWN.fullmatch(name) or any(word in name for word in _TAKEN):
        raise InvalidArgument(
            f"register: {name!r} cannot be a name: use small letters, digits and '._-', without {', '.join(_TAKEN)}, "
            "which transformers reads as its own."
        )
    try:
        parse_attention(name)
    except InvalidArgument:
        return
    raise InvalidArgument(f"register: {name!r} already names an attention; give the parts another name.")


def register_common() -> None:
    """Register "softmax", "linear" and the kernels of :data:`COMMON` with every normaliser that takes them."""
    for name in ("softmax", "linear", *(f"{kernel}-{ending}" for kernel in COMMON for ending in NORMALIZERS)):
        try:
            register(name)
        except MercerError:  # signed kernels with denominators, and gates that a model does not have
            continue
