"""What can be turned on a kernel to come closer to softmax, and what of it is random; ``Mixed`` by its parts."""

from __future__ import annotations

from dataclasses import replace

from mercer.core.kernels import Kernel, Taylor
from mercer.core.mixed import Mixed
from mercer.core.random_features import RandomFeatures


def is_drawn(kernel: Kernel) -> bool:
    """Whether the kernel, or a part of ``Mixed``, has random directions."""
    parts = (kernel.near, kernel.far) if isinstance(kernel, Mixed) else (kernel,)
    return any(isinstance(part, RandomFeatures) for part in parts)


def redrawn(kernel: Kernel) -> Kernel:
    """The same kernel with the next draw of everything random in it."""
    if isinstance(kernel, Mixed):
        return replace(kernel, near=redrawn(kernel.near), far=redrawn(kernel.far))
    return kernel.redraw() if isinstance(kernel, RandomFeatures) else kernel


def draws_of(kernel: Kernel, draws: int) -> list[Kernel]:
    """``draws`` independent kernels, the first of them itself."""
    found = [kernel]
    while len(found) < draws:
        found.append(redrawn(found[-1]))
    return found


def dial(kernel: Kernel) -> Taylor | RandomFeatures | None:
    """The part whose order or number of features can be changed: of ``Mixed`` the far one, which makes its state."""
    part = kernel.far if isinstance(kernel, Mixed) else kernel
    return part if isinstance(part, Taylor | RandomFeatures) else None


def with_order(kernel: Kernel, order: int) -> Kernel:
    """The kernel with another Taylor order."""
    part = dial(kernel)
    assert isinstance(part, Taylor)
    return _with(kernel, replace(part, order=order))


def with_count(kernel: Kernel, count: int) -> Kernel:
    """The kernel with another number of random features, and itself for its own."""
    part = dial(kernel)
    assert isinstance(part, RandomFeatures)
    return kernel if count == part.count else _with(kernel, replace(part, count=count, directions=None))


def _with(kernel: Kernel, part: Kernel) -> Kernel:
    return replace(kernel, far=part) if isinstance(kernel, Mixed) else part
