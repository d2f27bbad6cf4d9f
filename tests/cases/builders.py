"""Cells and small tensors for the cases."""

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.merged import merge
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.structures import Structure
from mercer.core.support import FORMS, PATHS, unsupported


def cells(
    kernel: Kernel, structure: Structure, normalizer: Normalizer | None = None, stateful: bool = False
) -> list[tuple[str, str]]:
    """Every form and path that computes a combination."""
    found = [
        (form, path)
        for form in FORMS
        for path in PATHS
        if unsupported(kernel, normalizer or Sum(), merge(structure), form, path, None, stateful) is None
    ]
    assert found, "a case without a single cell tests nothing"
    return found


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers of their own seed."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def positive(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers between 0.1 and 1.1."""
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).add(0.1).to(dtype)


def filled(value: float, *size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full(size, value, dtype=dtype)
