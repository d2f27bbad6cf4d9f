"""The attentions a study compares, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mercer.core.kernels import Exp, Taylor
from mercer.core.names import attention_name
from mercer.core.normalizers import L2, RMS, Standardize, Sum
from mercer.errors import InvalidArgument
from mercer.mixers.names import is_mixer
from mercer.models.config import causal_attention
from mercer.models.layer_names import expand
from mercer.studies.layers import parse_pattern
from mercer.studies.records.orders import Arm, Family

GAIN_INIT = 0.1
"""Where a learned gain starts. Near 0, a block adds little to the residual stream at first, as softmax's averages "
"do."""


def parse_arm(name: str, layers: int | None = None) -> Arm:
    """An arm from ``"exp-l2"``, or from ``"exp-l2+gain"`` with a gain learned per head that starts at 0.1, or from
    ``"exp-l2+gain=1"`` with another start; a mixer from ``"mamba"``, and a pattern over the layers from
    ``"7*mamba,softmax"``.

    Raises:
        InvalidArgument: an attention that is unknown or cannot be computed, or a gain on a normaliser other than L2,
            RMS and layernorm, or more names than layers.
    """
    base, plus, extra = name.partition("+")
    written = parse_pattern(base, layers)
    if is_mixer(written) or len(expand(written)) > 1:
        if plus:
            raise InvalidArgument(
                f"attention {name!r}: a gain is for one attention in all layers, as in 'exp-l2+gain'."
            )
        family: Family = "mixer" if is_mixer(written) else "pattern"
        return Arm(name=written, attention=written, family=family, normalizer="none")
    given = re.fullmatch(r"gain(?:=(\d+\.?\d*|\.\d+))?", extra)
    if plus and not given:
        raise InvalidArgument(
            f"attention {name!r}: only '+gain' can follow a name, or '+gain=' and where it starts, as in "
            "'exp-l2+gain=1'."
        )
    start = None
    if given:
        start = GAIN_INIT if given[1] is None else float(given[1])
    kernel, normalizer = causal_attention(base)
    if plus and not isinstance(normalizer, L2 | RMS | Standardize):
        raise InvalidArgument(
            f"attention {name!r}: a gain is learned after L2, RMS or layernorm only, as in 'exp-l2+gain'."
        )
    attention = attention_name(kernel, normalizer)
    order = kernel.order if isinstance(kernel, Taylor) else None
    family = "linear"
    if isinstance(kernel, Taylor):
        family = "taylor"
    elif isinstance(kernel, Exp):
        family = "softmax" if isinstance(normalizer, Sum) else "exp"
    return Arm(
        name=attention + plus + extra,
        attention=attention,
        family=family,
        normalizer=attention_name(kernel, normalizer).rpartition("-")[2] if family != "softmax" else "sum",
        order=order,
        gain_init=start,
    )


def parse_arms(names: Iterable[str], layers: int | None = None) -> list[Arm]:
    """Arms of models of so many layers, if that is given, from names, each once, in the order given."""
    arms: dict[str, Arm] = {}
    for name in names:
        arm = parse_arm(name, layers)
        arms.setdefault(arm.name, arm)
    if not arms:
        raise InvalidArgument("a study needs at least one attention.")
    return list(arms.values())
