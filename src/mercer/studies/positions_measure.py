"""The loss of a trained model at each position of long held-out windows, read in one of the ways of the study."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mercer.errors import NonFinite
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.studies.position_arms import SCALINGS
from mercer.studies.records.positions import PositionsArm

ROWS = 16_384
"""Tokens at once, at most: their scores over the vocabulary are held together."""


def reading(config: ModelConfig, arm: PositionsArm, bucket: int) -> ModelConfig:
    """The configuration of a trained model for the arm's way to read. Its weights stay what they are.

    Each token is read as it would be if the text ended with it: dynamic NTK grows with the text, in steps of a bucket.
    """
    changes: dict[str, object] = {"allow_longer": config.position != "learned"}
    if arm.reading == "window":
        changes["window"] = config.max_length
    elif arm.reading in SCALINGS:
        changes["rope_scaling"] = {"rope_type": arm.reading, "factor": arm.factor}
        if arm.reading == "dynamic":
            changes["rope_scaling"] |= {"every": bucket}
    return ModelConfig(**(config.model_dump() | changes))


@torch.no_grad()
def losses(
    model: DecoderLM, rows: Tensor, arm: PositionsArm, *, trained: int, bucket: int, blocks: int
) -> list[list[float]]:
    """Mean nats per token, [block][bucket].

    Args:
        model: configured by :func:`reading`, on its device.
        rows: [n, trained + evaluated + 1] tokens. Losses are those at the last ``evaluated`` places; what stands before
            them is there for "restart", which begins before a token wherever the token stands.
        arm: how to read.
        trained: the trained length.
        bucket: positions of a bucket, a divisor of ``trained`` and ``evaluated``.
        blocks: groups of windows, one after the other; at most n.

    Raises:
        NonFinite: a loss is not finite.
    """
    evaluated = rows.shape[1] - 1 - trained
    buckets = (trained if arm.bounded else evaluated) // bucket
    device = model.embedding.weight.device
    was_training = model.training
    model.eval()
    if arm.reading == "restart":
        each = torch.stack([_newest(model, rows, (b + 1) * bucket, trained, bucket, device) for b in range(buckets)], 1)
    else:
        each = _from_start(model, rows[:, trained : trained + buckets * bucket + 1], device).unflatten(1, (buckets, -1))
    model.train(was_training)
    means = each.mean(2)  # [n, buckets]
    if not means.isfinite().all():
        raise NonFinite(f"the held-out loss of {arm.name} is not finite")
    return [[round(value, 5) for value in part.mean(0).tolist()] for part in means.tensor_split(blocks)]


def _from_start(model: DecoderLM, rows: Tensor, device: torch.device) -> Tensor:
    """The loss of every token after the first, [n, T - 1], float64 on the CPU."""
    return torch.cat([_nats(model, part.to(device)) for part in rows.split(_at_once(rows.shape[1]))])


def _newest(model: DecoderLM, rows: Tensor, start: int, length: int, count: int, device: torch.device) -> Tensor:
    """The loss of the last ``count`` tokens of a context of ``length`` that begins at ``start``."""
    part = rows[:, start : start + length + 1]
    return torch.cat([_nats(model, some.to(device), count) for some in part.split(_at_once(length))])


def _at_once(length: int) -> int:
    return max(1, ROWS // length)


def _nats(model: DecoderLM, tokens: Tensor, count: int | None = None) -> Tensor:
    """Nats of the last ``count`` of the tokens [n, T] (all but the first if None), given those before each."""
    hidden = model.hidden(tokens[:, :-1])
    targets = tokens[:, 1:]
    if count is not None:
        hidden, targets = hidden[:, -count:], targets[:, -count:]
    logits = nn.functional.linear(hidden, model.head_weight).float()
    return (
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        .view_as(targets)
        .double()
        .cpu()
    )
