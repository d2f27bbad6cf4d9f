"""AdamW on the parameters that should decay and on those that should not, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import nn

from mercer.nn.start import HasStart
from mercer.training.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of the step numbered from 0: linear warm-up, then a half cosine to the floor.

    With w = warmup, S = steps and peak r: r (step + 1) / w while step < w, else
    r (f + (1 - f) (1 + cos(pi x)) / 2) with x = (step - w) / (S - 1 - w), so the last step has exactly f r.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    span = config.steps - 1 - warmup
    done = (step - warmup) / span if span > 0 else 1.0
    return config.learning_rate * (config.floor + (1 - config.floor) * (1 + math.cos(math.pi * done)) / 2)


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: matrices, but not gains and shifts, which are vectors even where each channel has
    one of its own, not T5's biases by distance, and not a kernel's learned map, which 0 would make constant: all pairs
    of tokens equally similar.
    """
    path = name.split(".")
    kept = path[-1] in ("gain", "shift") or "kernel_tensors" in path or path[-2:] == ["relative", "weight"]
    return parameter.ndim >= 2 and not kept


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> tuple[torch.optim.AdamW, str]:
    """AdamW over the trainable parameters (tied ones once), in torch's fused form where the device has it.

    Returns:
        The optimiser and the name of the form that runs, "fused" or "foreach".
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    spared = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if isinstance(module, HasStart)
        for name in module.undecayed
    }
    decayed = {name for name, p in named if decays(name, p) and name not in spared}
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    form = "fused" if device.type in {"cpu", "cuda", "mps", "xpu"} else "foreach"
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=form == "fused",
        foreach=form == "foreach",
    )
    return optimizer, form
