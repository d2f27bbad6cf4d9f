"""Kernels that carry tensors, kept on the attention modules of a model that is not mercer's."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mercer.core.kernels import Kernel
from mercer.nn.kernel_tensors import KernelTensors

MODULE = "mercer_kernel"
"""Name of the submodule that an attention module gets; what `state_dict` calls its tensors starts with it."""


@dataclass
class Site:
    """An attention module and the sizes of its heads."""

    module: nn.Module
    dim: int
    query_heads: int
    key_heads: int
    device: torch.device


@dataclass
class Recorder:
    """Passes calls on to another attention function, and notes each module that was called once."""

    inner: Any
    sites: dict[int, Site] = field(default_factory=dict)

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        site = Site(module, query.shape[-1], query.shape[1], key.shape[1], query.device)
        self.sites.setdefault(id(module), site)
        return self.inner(module, query, key, value, *rest, **options)


def missing(kernel: Kernel) -> set[str]:
    """Names of the tensors that the kernel gets when it is bound and does not have yet."""
    return set(kernel.bind(4, 1, 1).tensors()) - set(kernel.tensors())


def bind(kernel: Kernel, sites: list[Site], seed: int) -> None:
    """Give every module tensors of its own: drawn from the seed and the number of the module, in the order of calls."""
    for number, site in enumerate(sites):
        generator = torch.Generator().manual_seed(seed + number)
        bound = KernelTensors(kernel.bind(site.dim, site.query_heads, site.key_heads, generator))
        bound.made_from = kernel  # pyright: ignore[reportAttributeAccessIssue]
        site.module.add_module(MODULE, bound.to(site.device))


def unbind(model: nn.Module) -> None:
    """Take away what :func:`bind` gave."""
    for module in [m for m in model.modules() if MODULE in m._modules]:
        delattr(module, MODULE)


def bound(module: nn.Module, kernel: Kernel) -> Kernel | None:
    """The kernel with this module's tensors, if they were bound for it."""
    own = module._modules.get(MODULE)
    return own.kernel() if isinstance(own, KernelTensors) and own.made_from == kernel else None


def holders(model: nn.Module) -> Iterator[tuple[str, KernelTensors]]:
    """Every module that :func:`bind` added, by its name in the model."""
    return ((n, m) for n, m in model.named_modules() if isinstance(m, KernelTensors) and n.endswith(MODULE))
