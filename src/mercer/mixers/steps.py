"""How the time steps and rates of state-space models start."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST, MOST, FLOOR = 1e-3, 1e-1, 1e-4
"""Time steps start log-uniform between the first two, and never below the third (Gu & Dao 2023, arXiv 2312.00752)."""


def draw_step_bias(bias: Tensor, generator: torch.Generator | None) -> None:
    """Set a bias in place, under `torch.no_grad`, so that softplus(bias) is log-uniform from LEAST to MOST."""
    drawn = torch.rand(bias.shape, generator=generator)
    step = torch.exp(drawn * (math.log(MOST) - math.log(LEAST)) + math.log(LEAST)).clamp_min(FLOOR)
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def draw_log_rate(log_rate: Tensor, least: float, most: float, generator: torch.Generator | None) -> None:
    """Set a logarithm in place, under `torch.no_grad`, so that its exponential is uniform from least to most."""
    drawn = torch.rand(log_rate.shape, generator=generator)
    log_rate.copy_((least + (most - least) * drawn).log())
