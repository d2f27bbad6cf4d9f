"""Attention as a kernel, a normaliser and a structure, computed in whichever form the kernel allows.

    o_i = N( sum_j  w_ij  K(q_i, k_j)  v_j )

`mercer.attention` computes it and `mercer.plan` says beforehand how. The parts are values: kernels (`Exp`, `Taylor`,
...), normalisers (`Sum`, `L2`, ...) and structures (`Causal`, `Window`, ..., composed with `&`).

Names are imported when they are first used, so that `import mercer` is quick and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mercer.advice import Advice, advise, measure_machine
    from mercer.approximation import ApproximationError, approximation_error
    from mercer.core.bigbird import BigBird, RandomBlocks
    from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
    from mercer.core.feature_maps import Dpfp, ExpFeatures
    from mercer.core.feature_variance import feature_mean, feature_variance
    from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
    from mercer.core.learned_maps import Hedgehog, MlpFeatures, matching_loss
    from mercer.core.log_weights import Alibi, Decay, RelativeBias
    from mercer.core.machine import Machine, use_machine
    from mercer.core.mixed import Mixed
    from mercer.core.names import attention_name, parse_attention
    from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
    from mercer.core.pairwise import Bias, Mask
    from mercer.core.patterns import (
        Blocks,
        Columns,
        Fixed,
        Global,
        Longformer,
        Prefix,
        PrefixLM,
        Strided,
        Visible,
    )
    from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
    from mercer.core.soft_cap import SoftCap
    from mercer.core.state import CacheState, FeatureState, MixedState, State
    from mercer.core.structure_names import parse_structure, structure_name
    from mercer.core.structures import Causal, Documents, Full, Padding, Pattern, Structure, Window
    from mercer.errors import (
        Interrupted,
        InvalidArgument,
        MercerError,
        NonFinite,
        PeerError,
        StorageError,
        Unsupported,
    )
    from mercer.memory import AssociativeMemory
    from mercer.ops import attention, plan
    from mercer.regression import KernelRegression, kernel_regression

_HOMES = {
    "mercer.advice": ("Advice", "advise", "measure_machine"),
    "mercer.approximation": ("ApproximationError", "approximation_error"),
    "mercer.core.bigbird": ("BigBird", "RandomBlocks"),
    "mercer.core.denominators": ("Clamped", "Detached", "Length", "SigmoidGate"),
    "mercer.core.feature_maps": ("Dpfp", "ExpFeatures"),
    "mercer.core.feature_variance": ("feature_mean", "feature_variance"),
    "mercer.core.learned_maps": ("Hedgehog", "MlpFeatures", "matching_loss"),
    "mercer.core.pairwise": ("Bias", "Mask"),
    "mercer.core.patterns": (
        "Blocks",
        "Columns",
        "Fixed",
        "Global",
        "Longformer",
        "Prefix",
        "PrefixLM",
        "Strided",
        "Visible",
    ),
    "mercer.core.random_features": ("PositiveRandomFeatures", "TrigonometricRandomFeatures"),
    "mercer.core.kernels": ("Cosine", "Elu", "Exp", "Gaussian", "Kernel", "Power", "Relu", "Taylor"),
    "mercer.core.machine": ("Machine", "use_machine"),
    "mercer.core.mixed": ("Mixed",),
    "mercer.core.names": ("attention_name", "parse_attention"),
    "mercer.core.normalizers": ("L2", "RMS", "Identity", "Normalizer", "Standardize", "Sum"),
    "mercer.core.soft_cap": ("SoftCap",),
    "mercer.core.state": ("CacheState", "FeatureState", "MixedState", "State"),
    "mercer.core.log_weights": ("Alibi", "Decay", "RelativeBias"),
    "mercer.core.structure_names": ("parse_structure", "structure_name"),
    "mercer.core.structures": (
        "Causal",
        "Documents",
        "Full",
        "Padding",
        "Pattern",
        "Structure",
        "Window",
    ),
    "mercer.errors": (
        "Interrupted",
        "InvalidArgument",
        "MercerError",
        "NonFinite",
        "PeerError",
        "StorageError",
        "Unsupported",
    ),
    "mercer.memory": ("AssociativeMemory",),
    "mercer.ops": ("attention", "plan"),
    "mercer.regression": ("KernelRegression", "kernel_regression"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "L2",
    "RMS",
    "Advice",
    "Alibi",
    "ApproximationError",
    "AssociativeMemory",
    "Bias",
    "BigBird",
    "Blocks",
    "CacheState",
    "Causal",
    "Clamped",
    "Columns",
    "Cosine",
    "Decay",
    "Detached",
    "Documents",
    "Dpfp",
    "Elu",
    "Exp",
    "ExpFeatures",
    "FeatureState",
    "Fixed",
    "Full",
    "Gaussian",
    "Global",
    "Hedgehog",
    "Identity",
    "Interrupted",
    "InvalidArgument",
    "Kernel",
    "KernelRegression",
    "Length",
    "Longformer",
    "Machine",
    "Mask",
    "MercerError",
    "Mixed",
    "MixedState",
    "MlpFeatures",
    "NonFinite",
    "Normalizer",
    "Padding",
    "Pattern",
    "PeerError",
    "PositiveRandomFeatures",
    "Power",
    "Prefix",
    "PrefixLM",
    "RandomBlocks",
    "RelativeBias",
    "Relu",
    "SigmoidGate",
    "SoftCap",
    "Standardize",
    "State",
    "StorageError",
    "Strided",
    "Structure",
    "Sum",
    "Taylor",
    "TrigonometricRandomFeatures",
    "Unsupported",
    "Visible",
    "Window",
    "__version__",
    "advise",
    "approximation_error",
    "attention",
    "attention_name",
    "feature_mean",
    "feature_variance",
    "kernel_regression",
    "matching_loss",
    "measure_machine",
    "parse_attention",
    "parse_structure",
    "plan",
    "structure_name",
    "use_machine",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("mercer")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'mercer' has no attribute {name!r}")
    globals()[name] = value  # found only once: later uses do not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
