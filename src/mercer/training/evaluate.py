"""The loss on held-out text."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: torch.Tensor, byte_lengths: np.ndarray, batch: int, device: torch.device, bfloat16: bool
) -> dict[str, float]:
    """Mean loss over windows, in nats per token and in bits per byte.

    bits per byte = sum of nats / (ln 2 x bytes that the predicted tokens stand for), so vocabularies can be compared.

    Args:
        model: its ``loss(tokens, targets)`` gives mean nats per token.
        rows: [n, T+1] tokens, as `data.windows` gives them.
        byte_lengths: [vocabulary] bytes a token.
        batch: rows at once.

    Returns:
        ``loss`` and ``bits_per_byte``; not finite if the model's loss is not.
    """
    training = model.training
    model.eval()
    nats = 0.0
    for part in rows.split(batch):
        moved = part.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            loss = model.loss(moved[:, :-1], moved[:, 1:])  # pyright: ignore[reportCallIssue]
        nats += loss.item() * moved[:, 1:].numel()
    model.train(training)
    targets = rows[:, 1:].numpy()
    count = int(byte_lengths[targets].sum())
    return {"loss": nats / targets.size, "bits_per_byte": nats / (math.log(2) * count)}
