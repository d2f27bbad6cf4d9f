"""What an architecture of the hub is made of here: a configuration read and written, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names
from mercer.checkpoints.source import Source
from mercer.errors import InvalidArgument, Unsupported
from mercer.runtime.words import listed


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    name: the model type. architectures: the classes of the hub that are read; the first of them is written.
    read_config: from the keys and the architecture to a configuration here. write_config: the keys of a configuration;
    Unsupported where the architecture has no way to say it. build: the model of a configuration. names: the rules of
    its tensors. config: the configuration's class. prefix: what a bare body's tensors lack on disk ("transformer.").
    renamed: the current name of a tensor for that of an older file. settled: the configuration as the tensors have it,
    where the file's own leaves something to them.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[Keys, str], Any]
    write_config: Callable[[Any], dict[str, Any]]
    build: Callable[[Any], nn.Module]
    names: Callable[[Any], Names]
    config: type
    prefix: str = ""
    renamed: Callable[[str], str] | None = None
    settled: Callable[[Any, Keys, Source], Any] | None = None


class Unsayable(Unsupported):
    """Fields of a configuration for which a family has no keys, each as ``name = value``."""

    def __init__(self, family: str, fields: Sequence[str]) -> None:
        super().__init__(f"{family} has no way to say {listed(fields)}")
        self.fields = fields


_HOMES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "mixtral",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "recurrent_gemma": "recurrent_gemma",
    "bloom": "bloom",
    "marian": "marian",
    "t5": "t5",
    "switch_transformers": "t5",
    "whisper": "whisper",
    "bert": "bert",
    "big_bird": "bert",
    "longformer": "longformer",
    "esm": "esm",
    "vit": "vit",
    "decision_transformer": "decision_transformer",
    "gptj": "gptj",
    "gpt_neox": "gpt_neox",
    "rwkv": "rwkv4",
    "rwkv7": "rwkv7",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "jamba": "jamba",
    "zamba": "zamba",
    "zamba2": "zamba2",
}
"""Of each model type the module of `mercer.checkpoints.families` that has it."""


def families() -> tuple[str, ...]:
    """The model types that can be read."""
    return tuple(_HOMES)


def find_family(name: object) -> Family:
    """The family of a model type.

    Raises:
        InvalidArgument: there is none; the message lists those that there are.
    """
    if not isinstance(name, str) or name not in _HOMES:
        raise InvalidArgument(f"there is no architecture {name!r} here; there are {', '.join(families())}")
    module = import_module(f"mercer.checkpoints.families.{_HOMES[name]}")
    return next(family for family in module.FAMILIES if family.name == name)


def family_of(config: Any) -> Family:
    """The first family that can say a configuration.

    Raises:
        Unsupported: none can; the message names those that come closest, and what the first of them lacks.
    """
    lacking: list[tuple[int, str, str]] = []
    for name in families():
        family = find_family(name)
        if not isinstance(config, family.config):
            continue
        try:
            family.write_config(config)
        except Unsupported as error:
            lacking.append((len(error.fields) if isinstance(error, Unsayable) else 1, name, str(error)))
        else:
            return family
    if not lacking:
        raise Unsupported(f"no architecture of the hub is made of a {type(config).__name__}")
    least = min(lacking)[0]
    closest = [name for count, name, _ in lacking if count == least]
    why = next(message for count, _, message in lacking if count == least)
    raise Unsupported(
        f"no architecture of the hub is this model, the closest being {listed(closest[:3])}: {why}; "
        "mercer.models.io.save_model keeps the model as it is, and family=... tells what another architecture lacks"
    )


def config_values(family: Family, config: Any) -> Mapping[str, Any]:
    """A whole config.json."""
    return {"architectures": [family.architectures[0]], "model_type": family.name} | family.write_config(config)
