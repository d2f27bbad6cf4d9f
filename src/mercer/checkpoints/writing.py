"""From a model to a folder of the hub's format, which `transformers` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from mercer.checkpoints.family import Family, config_values, family_of, find_family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.reading import CONFIG, stored
from mercer.checkpoints.source import INDEX, SINGLE
from mercer.errors import InvalidArgument, Unsupported
from mercer.runtime.files import new_folder, write_json

SHARD = 5 * 10**9
METADATA = {"format": "pt"}


def save(
    model: nn.Module,
    path: str | Path,
    *,
    family: str | None = None,
    shard_bytes: int = SHARD,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors, or shards with an index.

    path: a folder that does not exist, or is empty. family: the model type, "llama"; None: the first that can say the
    model. shard_bytes: the size from which on there are several files. extra: further keys of config.json that change
    no logit, such as `Checkpoint.ignored` and bos_token_id.

    Raises:
        Unsupported: the architecture has no way to say the model, as with most attentions but softmax;
            `mercer.models.io.save_model` keeps any.
        InvalidArgument: the folder has content, or `extra` a key that the configuration has, that would change what is
            computed, or that `load` does not know, or no JSON.
        StorageError: a file could not be written; nothing is left behind.
    """
    folder = Path(path)
    config = getattr(model, "config", None)
    chosen = family_of(config) if family is None else find_family(family)
    if not isinstance(config, chosen.config):
        raise Unsupported(f"{chosen.name} is made of a {chosen.config.__name__}, not of a {type(config).__name__}")
    values = dict(config_values(chosen, config))
    for key in sorted(values.keys() & (extra or {}).keys() - {"architectures", "model_type"}):
        if (extra or {})[key] != values[key]:
            raise InvalidArgument(
                f"extra has {key} = {(extra or {})[key]!r}, and the model's configuration says {values[key]!r}"
            )
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"extra has what JSON cannot say: {error}") from error
    if extra:
        _check_extra(chosen, values, extra)
    if shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes}; it is at least 1")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(f"{folder} is not an empty folder; name a new one")
    parameters = stored(model, chosen.names(config))
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})
    values = {**(extra or {}), **values}
    values["dtype"] = dtypes[0] if len(dtypes) == 1 else "float32"
    tensors: dict[str, Tensor] = {}
    for rule in chosen.names(config).rules:
        pieces = rule.write(parameters[rule.ours].detach())
        tensors |= {name: piece.contiguous().cpu() for name, piece in zip(rule.theirs, pieces, strict=True)}
    with new_folder(folder) as temporary:
        _write_shards(temporary, tensors, shard_bytes)
        write_json(temporary / CONFIG, json.loads(json.dumps(values, sort_keys=True)))


def _check_extra(family: Family, values: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Refuse keys with which the configuration would not be read, or not as it is."""
    architecture: str = values["architectures"][0]
    plain = family.read_config(Keys(values, "the configuration"), architecture)
    keys = Keys({**extra, **values}, "extra")
    config = family.read_config(keys, architecture)
    keys.finish()
    if config != plain:
        raise InvalidArgument(
            f"extra has a key that changes what is computed, among {', '.join(sorted(extra))}; give those that change "
            "no logit, such as Checkpoint.ignored"
        )


def _write_shards(folder: Path, tensors: dict[str, Tensor], limit: int) -> None:
    shards = list(_shards(tensors, limit))
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata=METADATA)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata=METADATA)
        where |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})


def _shards(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Runs of tensors of at most `limit` bytes, a larger tensor alone."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
