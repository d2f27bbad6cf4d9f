"""Modules with initial values that no general rule gives: decays, rates, kernels of short convolutions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn


class HasStart(nn.Module, ABC):
    """A module that sets initial values of its own parameters itself.

    `start` is called at the end of its `__init__` and again by a model once its linear layers are drawn, with a
    generator of the model's seed and the module's name. What it does to parameters of `nn.Linear` inside stays.
    """

    undecayed: ClassVar[tuple[str, ...]] = ()
    """Names of own parameters that weight decay leaves alone, although they may have two dimensions or more."""

    @abstractmethod
    def start(self, generator: torch.Generator | None = None) -> None:
        """Set the initial values in place, under `torch.no_grad`. generator: None draws from torch's own."""
