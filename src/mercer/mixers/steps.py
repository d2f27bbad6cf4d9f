"""How the time steps and rates of recurrences start, and what they are where they have grown out of all bounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mercer.core.log_weights import GONE

LEAST, MOST, FLOOR = 1e-3, 1e-1, 1e-4
"""Time steps start log-uniform between the first two, and never below the third (Gu & Dao 2023, arXiv 2312.00752)."""

FASTEST = 40.0
"""Logarithms of rates above it are taken for it. With any step of more than 1e-13 nothing is left of a state either
way, and what such a rate was made of has a gradient of 0 instead of 0 times infinity."""


def draw_step_bias(bias: Tensor, generator: torch.Generator | None) -> None:
    """Set a bias in place, under `torch.no_grad`, so that softplus(bias) is log-uniform from LEAST to MOST."""
    drawn = torch.rand(bias.shape, generator=generator)
    step = torch.exp(drawn * (math.log(MOST) - math.log(LEAST)) + math.log(LEAST)).clamp_min(FLOOR)
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def draw_log_rate(log_rate: Tensor, least: float, most: float, generator: torch.Generator | None) -> None:
    """Set a logarithm in place, under `torch.no_grad`, so that its exponential is uniform from least to most."""
    drawn = torch.rand(log_rate.shape, generator=generator)
    log_rate.copy_((least + (most - least) * drawn).log())


def rates(log_rate: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(log_rate) in a dtype, and exp(FASTEST) where it is more."""
    return log_rate.to(dtype).clamp_max(FASTEST).exp()


def decay_of(rate: Tensor) -> Tensor:
    """-rate, the logarithm of a decay, and -GONE where it is less."""
    return -rate.clamp_max(GONE)
