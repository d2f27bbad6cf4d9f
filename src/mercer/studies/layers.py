"""What the layers of a study's model are, by name: one attention or mixer for all, or a pattern over the layers.

softmax    mamba    softmax,elu-sum    7*mamba,softmax
"""

from __future__ import annotations

from mercer.core.names import attention_name, parse_attention
from mercer.errors import InvalidArgument
from mercer.mixers.names import is_mixer
from mercer.models.config import layer_attention
from mercer.models.layer_names import expand, shorten
from mercer.runtime.words import count


def parse_pattern(text: str, layers: int | None = None) -> str:
    """The one way to write a pattern: names separated by commas, ``N*NAME`` where a name stands N times in a row, and
    the name alone where all are the same.

    Raises:
        InvalidArgument: an unknown name, an attention that cannot be computed, or more names than layers.
    """
    names = [_canonical(name) for name in expand(text)]
    if layers is not None and len(names) > layers:
        raise InvalidArgument(
            f"attention {text!r} names {count(len(names), 'layer')}; the models of this study have {layers}; "
            f"name at most one a layer, or give --layers {len(names)}."
        )
    return shorten(names)


def layers_of(pattern: str, layers: int) -> tuple[str, ...]:
    """The name of each layer."""
    names = expand(pattern)
    return tuple(names[layer % len(names)] for layer in range(layers))


def finite_attention(name: str) -> bool:
    """Whether a name is an attention that has a feature map, and so a state of fixed size."""
    return not is_mixer(name) and parse_attention(name)[0].feature_dim(2) is not None


def _canonical(name: str) -> str:
    return name if is_mixer(name) else attention_name(*layer_attention(name))
