"""The kernels that the study of approximation compares, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mercer.core.denominators import SigmoidGate
from mercer.core.kernels import Kernel, Taylor
from mercer.core.learned_maps import LearnedMap
from mercer.core.mixed import Mixed
from mercer.core.names import attention_name
from mercer.core.normalizers import Normalizer
from mercer.core.random_features import RandomFeatures
from mercer.errors import InvalidArgument
from mercer.models.config import causal_attention
from mercer.studies.records.approximation import ApproximationArm, ArmFamily

VARIANTS = {"independent": {"orthogonal": False}, "sqrt": {"norms": "sqrt"}}
"""What may follow a name of random features: directions that are independent, or norms that are all sqrt(D)."""


@dataclass(frozen=True)
class Arm:
    """A kernel, its normaliser, and how the record calls them."""

    kernel: Kernel
    normalizer: Normalizer
    record: ApproximationArm


def parse_arm(name: str) -> Arm:
    """An arm from a name such as ``"taylor4-l2"``, or ``"favor256-sum+independent"``.

    Raises:
        InvalidArgument: an attention that is unknown, cannot be computed, or has weights to be learned first; a variant
            of something other than random features.
    """
    base, plus, variant = name.partition("+")
    kernel, normalizer = causal_attention(base)
    if any(isinstance(k, LearnedMap) for k in ((kernel.near, kernel.far) if isinstance(kernel, Mixed) else (kernel,))):
        raise InvalidArgument(f"attention {name!r} has weights to be learned first; this study compares fixed kernels.")
    if isinstance(normalizer, SigmoidGate):
        raise InvalidArgument(f"attention {name!r} has a gate to be learned first; this study compares fixed parts.")
    settings = VARIANTS.get(variant)
    if plus and settings is None:
        raise InvalidArgument(f"attention {name!r}: only {' or '.join(f'+{v}' for v in VARIANTS)} can follow a name.")
    canonical = attention_name(kernel, normalizer)
    if settings is not None:
        if not isinstance(kernel, RandomFeatures):
            raise InvalidArgument(
                f"attention {name!r}: +{variant} is for random features, as in 'favor256-sum+{variant}'."
            )
        kernel = replace(kernel, **settings)
    family: ArmFamily = "other"
    order = count = None
    if isinstance(kernel, Taylor):
        family, order = "taylor", kernel.order
    elif isinstance(kernel, RandomFeatures):
        family, count = "features", kernel.count
    series = canonical + plus + variant
    if family != "other":
        series = re.sub(r"^([a-z]+)\d+", r"\1", series)
    if family == "taylor":
        series = series.replace("-signed", "")  # odd orders under a sum stand beside even ones
    record = ApproximationArm(name=canonical + plus + variant, family=family, series=series, order=order, count=count)
    return Arm(kernel, normalizer, record)


def parse_arms(names: Iterable[str]) -> list[Arm]:
    """Arms from names, each once, in the order given."""
    arms: dict[str, Arm] = {}
    for name in names:
        arm = parse_arm(name)
        arms.setdefault(arm.record.name, arm)
    return list(arms.values())
