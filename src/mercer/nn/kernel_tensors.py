"""The tensors of a kernel as parameters or buffers of a module: trained, saved, moved and drawn again with it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from mercer.core.kernels import Exp, Kernel
from mercer.core.mixed import Mixed
from mercer.core.random_features import RandomFeatures
from mercer.errors import InvalidArgument
from mercer.nn.values import with_values


class KernelTensors(nn.Module):
    """What `Kernel.tensors` lists of a bound kernel, under those names: parameters of a learned map, buffers otherwise.

    Buffers keep their dtype when the module's changes: directions rounded to bfloat16 would be others, and with them
    every feature. Random features also save their seed and the number of their draw, so that a loaded module draws on
    from where the saved one was.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._bound = without_graph(kernel)
        self.names = tuple(kernel.tensors())
        for name, tensor in kernel.tensors().items():
            # A copy, since two layers made of one bound kernel do not share its tensors; in one piece, for safetensors.
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            if kernel.is_parameter(name):
                self.register_parameter(name, nn.Parameter(own))
            else:
                self.register_buffer(name, own)
        for prefix, part in random_parts(kernel).items():
            _check_seed(part)
            self.register_buffer(f"{prefix}drawn", torch.tensor([part.seed, part.draw]))

    def kernel(self) -> Kernel:
        """The kernel with the tensors as they are now."""
        return self._bound.with_tensors({name: getattr(self, name) for name in self.names})

    @torch.no_grad()
    def redraw(self, seed: int | None = None) -> None:
        """New directions: the next draw of the seed that they came from, or the first of `seed`."""
        parts = random_parts(self.kernel())
        if not parts:
            raise InvalidArgument(f"redraw is for random features, and {self._bound} has none")
        drawn: dict[str, Tensor] = {prefix: getattr(self, f"{prefix}drawn") for prefix in parts}
        for prefix, part in parts.items():
            was, draw = drawn[prefix].tolist()
            parts[prefix] = dataclasses.replace(part, seed=was, draw=draw).redraw(seed)
            _check_seed(parts[prefix])
        for prefix, new in parts.items():
            getattr(self, f"{prefix}directions").copy_(new.tensors()["directions"])
            drawn[prefix].copy_(torch.tensor([new.seed, new.draw]))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before: dict[str, Any] = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class WithKernel(nn.Module):
    """A module whose attention has a kernel, and holds the kernel's tensors if it has some."""

    def __init__(
        self, kernel: Kernel | None, head_dim: int, heads: int, kv_heads: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        if not isinstance(kernel, Kernel | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"kernel must be a kernel object such as Elu(), not {kernel!r}; mercer.parse_attention makes one from "
                "a name"
            )
        self._kernel = Exp() if kernel is None else without_graph(kernel)
        with with_values():
            bound = self._kernel.bind(head_dim, heads, kv_heads, generator)
            self.kernel_tensors = KernelTensors(bound) if bound.tensors() else None
        bound.check(head_dim, heads, kv_heads)

    @property
    def kernel(self) -> Kernel:
        """The kernel of the next call, with its tensors as they are now."""
        return self._kernel if self.kernel_tensors is None else self.kernel_tensors.kernel()

    @property
    def has_random_features(self) -> bool:
        """Whether there is something to :meth:`redraw`."""
        return self.kernel_tensors is not None and bool(random_parts(self.kernel))

    def redraw(self, seed: int | None = None) -> None:
        """Draw random features anew: the next draw of their seed, or the first of `seed`. In place; states made before
        are refused afterwards, since their features are others.
        """
        if self.kernel_tensors is None:
            raise InvalidArgument(f"redraw is for random features, and {self._kernel} has none")
        self.kernel_tensors.redraw(seed)


def without_graph(kernel: Kernel) -> Kernel:
    """The kernel with its tensors cut from what they were computed of, since a module that is copied copies it too."""
    tensors = kernel.tensors()
    return kernel.with_tensors({name: tensor.detach() for name, tensor in tensors.items()}) if tensors else kernel


def _check_seed(part: RandomFeatures) -> None:
    if max(part.seed, part.draw) >= 2**63:
        raise InvalidArgument(f"a seed that is saved with a module must be below 2^63, not {part.seed}")


def random_parts(kernel: Kernel) -> dict[str, RandomFeatures]:
    """The random features in a kernel, by what stands before the names of their tensors."""
    parts = {"near_": kernel.near, "far_": kernel.far} if isinstance(kernel, Mixed) else {"": kernel}
    return {prefix: part for prefix, part in parts.items() if isinstance(part, RandomFeatures)}
