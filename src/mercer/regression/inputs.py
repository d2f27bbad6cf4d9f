"""What users hand in, checked and turned into float64 tensors; what they get back, in the kind they gave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.core.kernels import Gaussian, Kernel
from mercer.core.merged import merge
from mercer.core.normalizers import Sum
from mercer.core.structures import Full
from mercer.core.support import unsupported
from mercer.errors import InvalidArgument, Unsupported


def matrix(x: Any, name: str = "X") -> Tensor:
    """Points ``[n, D]`` as float64, n and D at least 1."""
    x = _numbers(x, name)
    shape = tuple(x.shape)
    if x.dim() != 2:
        raise InvalidArgument(
            f"{name} must be [samples, features], two dimensions, not {shape}. Reshape your data either using "
            "reshape(-1, 1) if it has a single feature or reshape(1, -1) if it is a single sample."
        )
    for count, what in zip(shape, ("sample", "feature"), strict=True):
        if count == 0:
            raise InvalidArgument(f"{name} has 0 {what}(s) (shape={shape}) while a minimum of 1 is required.")
    return x


def targets(y: Any, samples: int) -> Tensor:
    """Targets ``[n]`` or ``[n, outputs]`` as float64."""
    if y is None:
        raise InvalidArgument("KernelRegression requires y to be passed, but the target y is None.")
    y = _numbers(y, "y")
    if y.dim() not in (1, 2) or y.shape[0] != samples or 0 in y.shape:
        raise InvalidArgument(
            f"y must be [{samples}] or [{samples}, outputs], as X has {samples} samples, not {tuple(y.shape)}."
        )
    return y


def sample_weights(weight: Any, samples: int, device: torch.device) -> Tensor:
    """Weights ``[n]`` as float64, relative to the largest; ones for None."""
    if weight is None:
        return torch.ones(samples, dtype=torch.float64, device=device)
    weight = _numbers(weight, "sample_weight").to(device)
    if weight.shape != (samples,):
        raise InvalidArgument(f"sample_weight must be [{samples}], one a sample, not {tuple(weight.shape)}.")
    if bool((weight < 0).any()) or not bool((weight > 0).any()):
        raise InvalidArgument("sample_weight must be 0 or more everywhere, and not zero for every sample.")
    return weight


def checked_kernel(kernel: Kernel | None) -> Kernel:
    """The kernel, `Gaussian()` for None; refused if its weights do not form an average."""
    kernel = Gaussian() if kernel is None else kernel
    if not isinstance(kernel, Kernel):
        raise InvalidArgument(
            f"kernel must be a mercer kernel such as Gaussian() or Taylor(2), or None for Gaussian(), not {kernel!r}."
        )
    if unsupported(kernel, Sum(), merge(Full()), "dense", "pairs") is not None:
        raise Unsupported(
            f"{kernel} takes negative values, so a sum of its weights may be zero or change sign: use an even order, a "
            "positive kernel, or say signed=True to the kernel."
        )
    return kernel


def checked_scale(kernel: Kernel, scale: Any, dim: int) -> float:
    """The scale as a number, the kernel's own for None."""
    if scale is None:
        return kernel.default_scale(dim)
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number) or not 0 < float(scale) < math.inf:
        raise InvalidArgument(
            f"scale must be a positive finite number, None or (in KernelRegression) 'loo', not {scale!r}."
        )
    return float(scale)


def floating(y: Any) -> torch.dtype:
    """The dtype of predictions: that of the targets if it is a floating one, else float64."""
    if isinstance(y, Tensor):
        return y.dtype if y.dtype.is_floating_point else torch.float64
    kind = getattr(y, "dtype", None)
    kinds = {"float16": torch.float16, "float32": torch.float32}
    return kinds.get(str(kind), torch.float64)


def give_back(prediction: Tensor, asked: Any, dtype: torch.dtype) -> Any:
    """The prediction as a tensor beside ``asked`` if that is a tensor, else as a numpy array."""
    if isinstance(asked, Tensor):
        return prediction.to(asked.device, dtype)
    return prediction.detach().to("cpu", dtype).numpy()


def _numbers(x: Any, name: str) -> Tensor:
    if hasattr(x, "tocsr") or (isinstance(x, Tensor) and x.layout != torch.strided):
        raise InvalidArgument(
            f"{name} is sparse; kernel regression needs dense data, for example {name}.toarray() or {name}.to_dense()."
        )
    if not isinstance(x, Tensor):
        x = np.asarray(x)
        if np.iscomplexobj(x):
            raise InvalidArgument(f"Complex data not supported: {name} has dtype {x.dtype}.")
        try:
            x = torch.from_numpy(np.array(x, dtype=np.float64))
        except ValueError as error:
            raise InvalidArgument(f"{name} must hold numbers only: {error}.") from None
    if x.is_complex():
        raise InvalidArgument(f"Complex data not supported: {name} has dtype {x.dtype}.")
    x = x.to(torch.float64)
    if not bool(torch.isfinite(x).all()):
        raise InvalidArgument(f"{name} contains NaN or infinity; remove or fill those entries first.")
    return x
