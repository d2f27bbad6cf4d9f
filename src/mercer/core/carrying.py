"""Kernels that carry tensors: drawn directions or learned weights. What makes two of them the same, and their names.

Two such kernels are equal if their settings are and their tensors hold the same numbers. A feature state is tagged by a
checksum of those numbers, so that it is never continued by other features in silence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mercer.core.kernels import Kernel


@dataclass(frozen=True, eq=False)
class CarryingKernel(Kernel):
    """Base of kernels with tensors in fields that are marked ``repr=False``; everything else is a setting."""

    def settings(self) -> dict[str, Any]:
        """What was chosen when the kernel was made: every field but the tensors."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.repr}

    def __repr__(self) -> str:
        """As it would be written, defaults left out; a checksum stands for the tensors."""
        usual = {f.name: f.default for f in fields(self) if f.kw_only}
        parts = [f"{n}={v!r}" for n, v in self.settings().items() if n not in usual or v != usual[n]]
        if self.tensors():
            parts.append(f"numbers={self.checksum()}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, CarryingKernel)
        mine, theirs = self.tensors(), other.tensors()
        return (
            self.settings() == other.settings()
            and mine.keys() == theirs.keys()
            and all(torch.equal(mine[n].cpu(), theirs[n].to("cpu", mine[n].dtype)) for n in mine)
        )

    def __hash__(self) -> int:
        return hash((type(self), *self.settings().values()))

    def checksum(self) -> str:
        """Eight hexadecimal digits of a hash over the tensors' numbers as float32."""
        total = hashlib.blake2b(digest_size=4)
        for name, tensor in sorted(self.tensors().items()):
            total.update(name.encode() + _digest(tensor))
        return total.hexdigest()


_DIGESTS = WeakTensorKeyDictionary()
"""Digest of each tensor and the version of it that was read: a state is tagged at every step of a generation."""


def _digest(tensor: Tensor) -> bytes:
    version = None if tensor.is_inference() else tensor._version  # an inference tensor keeps no count of changes
    found: tuple[int, bytes] | None = None if version is None else _DIGESTS.get(tensor)
    if found is not None and found[0] == version:
        return found[1]
    numbers = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    digest = hashlib.blake2b(numbers.tobytes() + repr(list(tensor.shape)).encode(), digest_size=16).digest()
    if version is not None:
        _DIGESTS[tensor] = (version, digest)
    return digest
