"""A cheap look, before anything is computed, whether all processes were asked the same.

Every process tells every other one what it was given, in a message of fixed size. What differs, or what one of them
refused, becomes the same one sentence everywhere, instead of a wait for a message that never comes.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch
from torch import Tensor

from mercer.core.log_weights import Decay
from mercer.core.merged import Merged
from mercer.core.structures import Both, Either, Structure
from mercer.distributed.links import Link, everyone
from mercer.errors import InvalidArgument

SIZE = 2048
"""Bytes of a message."""
LONGEST = 100
"""Characters of a fact that are told; what is longer is cut, and a digest of all of it added."""


def agree(link: Link, facts: dict[str, str], refusal: str | None, device: torch.device) -> None:
    """Raise :class:`~mercer.InvalidArgument` on every process if their facts differ, or if one refused its arguments.

    Args:
        facts: what must be the same everywhere, by name.
        refusal: why this process cannot take part, or None; the caller then raises its own error.
    """
    if link.size == 1:
        return
    told = {"refusal": _short(refusal, 600)} if refusal else {name: _short(text) for name, text in facts.items()}
    text = json.dumps(told).encode()
    if len(text) > SIZE:
        text = json.dumps({"facts": hashlib.blake2b(text, digest_size=16).hexdigest()}).encode()
    content = torch.zeros(SIZE, dtype=torch.uint8)
    content[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everybody = everyone(link, "agreement", content.to(device))
    if refusal:
        return
    answers = [_read(answer) for answer in everybody]
    for rank, answer in enumerate(answers):
        if "refusal" in answer:
            raise InvalidArgument(f"Process {rank} of {link.size} refused its arguments: {answer['refusal']}")
    for rank, answer in enumerate(answers):
        for name in {**answers[0], **answer}:
            if answers[0].get(name) != answer.get(name):
                raise InvalidArgument(
                    f"Processes were asked different things: {name} is {answers[0].get(name, 'missing')} on process 0 "
                    f"and {answer.get(name, 'missing')} on process {rank}; all of them must agree."
                )


def _read(content: Tensor) -> dict[str, Any]:
    return json.loads(bytes(content.cpu().numpy()).rstrip(b"\0"))


def _short(text: str, longest: int = LONGEST) -> str:
    if len(text) <= longest:
        return text
    return f"{text[:longest]}... (digest {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def describe(merged: Merged) -> str:
    """A structure's parts with digests of the numbers that must be the same everywhere; shards of tensors are not."""
    parts = [f"Window({merged.left}, {merged.right})"]
    parts += [_pattern(pattern) for pattern in merged.patterns]
    if merged.documents is not None:
        parts.append(f"Documents({_digest(merged.documents.offsets)})")
    if merged.padding is not None:
        lengths = merged.padding.lengths
        parts.append("Padding(mask)" if lengths is None else f"Padding({_digest(lengths)})")
    if merged.alibi is not None:
        parts.append(f"Alibi({_digest(merged.alibi.slopes)})")
    if merged.relative is not None:
        parts.append(f"{merged.relative} ({_digest(merged.relative.table)})")
    if merged.decay is not None:
        parts.append(_decay(merged.decay))
    return " & ".join(parts)


def _pattern(pattern: Structure) -> str:
    text = re.sub(" at 0x[0-9a-f]+", "", str(pattern))  # addresses of functions
    numbers = [_digest(x) for x in _tensors(pattern)]
    return f"{text} ({', '.join(numbers)})" if numbers else text


def _tensors(pattern: Structure) -> list[Tensor]:
    """What marks the tokens of each row, of a pattern or of those that it is made of."""
    if isinstance(pattern, Either | Both):
        return [x for member in pattern.members for x in _tensors(member)]
    return [x for x in vars(pattern).values() if isinstance(x, Tensor)]


def _decay(decay: Decay) -> str:
    rates = decay.rate if decay.rate is not None else decay.log_rate
    assert rates is not None
    numbers = f"per token of {rates.shape[1]} heads" if decay.per_token else _digest(rates)
    return f"Decay({numbers}{', complement' if decay.complement else ''})"


def _digest(x: Tensor) -> str:
    numbers = x.detach().to("cpu", torch.float64).contiguous().numpy().tobytes()
    return hashlib.blake2b(numbers, digest_size=6).hexdigest()
