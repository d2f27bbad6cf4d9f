"""What the layers of a study's model are, by name: one attention or mixer for all, or a pattern over the layers.

softmax    mamba    softmax,elu-sum    7*mamba,softmax
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from mercer.core.names import attention_name, parse_attention
from mercer.errors import InvalidArgument
from mercer.mixers.names import is_mixer, mixer_names
from mercer.models.config import causal_attention
from mercer.runtime.words import count

_ITEM = re.compile(r"(?:([1-9]\d{0,3})\*)?([^*,]+)")


def parse_pattern(text: str, layers: int | None = None) -> str:
    """The one way to write a pattern: names separated by commas, ``N*NAME`` where a name stands N times in a row, and
    the name alone where all are the same.

    Raises:
        InvalidArgument: an unknown name, an attention that cannot be computed, or more names than layers.
    """
    names: list[str] = []
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise InvalidArgument(
                f"attention {text!r}: write names separated by commas, each with how often it stands there if more "
                "than once, as in 'softmax,elu-sum' or '7*mamba,softmax'."
            )
        names += [_canonical(found[2].strip())] * int(found[1] or 1)
    if layers is not None and len(names) > layers:
        raise InvalidArgument(
            f"attention {text!r} names {count(len(names), 'layer')}; the models of this study have {layers}."
        )
    return names[0] if len(set(names)) == 1 else _written(names)


def names_of(pattern: str) -> tuple[str, ...]:
    """The names of a pattern that `parse_pattern` wrote, before they are repeated over the layers."""
    parts = [_ITEM.fullmatch(item) for item in pattern.split(",")]
    return tuple(name for part in parts if part is not None for name in [part[2]] * int(part[1] or 1))


def layers_of(pattern: str, layers: int) -> tuple[str, ...]:
    """The name of each layer."""
    names = names_of(pattern)
    return tuple(names[layer % len(names)] for layer in range(layers))


def finite_attention(name: str) -> bool:
    """Whether a name is an attention that has a feature map, and so a state of fixed size."""
    return not is_mixer(name) and parse_attention(name)[0].feature_dim(2) is not None


def _written(names: Sequence[str]) -> str:
    runs = [(name, sum(1 for _ in run)) for name, run in groupby(names)]
    return ",".join(name if times == 1 else f"{times}*{name}" for name, times in runs)


def _canonical(name: str) -> str:
    if is_mixer(name):
        return name
    try:
        return attention_name(*causal_attention(name))
    except InvalidArgument as error:
        if "-" in name or "@" in name:
            raise
        raise InvalidArgument(f"{error} Mixers are {', '.join(mixer_names())}.") from error
