"""Rotary positions from the dictionaries of model configurations (`rope_parameters`, before 2025 `rope_scaling`).

One closed list of types and keys: the names of the Hugging Face hub, and the type "ntk", which is ours. What a type
does not know is refused, since a key that is read over changes a model in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from mercer.errors import InvalidArgument
from mercer.nn.rope_bands import Llama3, LongRoPE, YaRN
from mercer.nn.rope_scaling import NTK, DynamicNTK, LinearScaling, Proportional, RopeScaling
from mercer.nn.rotary import Rotary

TRAINED = "original_max_position_embeddings"

_KEYS: dict[str, tuple[type[RopeScaling], dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    "ntk": (NTK, {"factor": "factor"}),
    "dynamic": (DynamicNTK, {"factor": "factor", TRAINED: "trained", "per_token": "per_token", "every": "every"}),
    "proportional": (Proportional, {"partial_rotary_factor": "share", "factor": "factor"}),
    "yarn": (
        YaRN,
        {TRAINED: "trained"}
        | {
            name: name
            for name in (
                "factor",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            )
        },
    ),
    "llama3": (
        Llama3,
        {"factor": "factor", TRAINED: "trained", "low_freq_factor": "low", "high_freq_factor": "high"},
    ),
    "longrope": (
        LongRoPE,
        {
            "short_factor": "short",
            "long_factor": "long",
            TRAINED: "trained",
            "factor": "factor",
            "attention_factor": "attention_factor",
            "per_token": "per_token",
        },
    ),
}
"""Of each type the class and the field that each key sets."""

ROPE_TYPES = ("default", *_KEYS)
_OLD_TYPES = {"su": "longrope"}
_REQUIRED = {
    "yarn": (TRAINED,),
    "llama3": ("factor", TRAINED, "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", TRAINED),
}


def scaling_from_dict(parameters: Mapping[str, Any], *, max_length: int | None = None) -> RopeScaling | None:
    """The scaling that a dictionary with "rope_type" describes; None for "default".

    max_length: the model's context; it stands for a missing `original_max_position_embeddings`, and for a missing
    factor of "yarn" and "longrope" the factor is max_length / original_max_position_embeddings. Where both are missing
    "yarn" is refused, as by `transformers`, and "longrope" has the factor 1.

    Raises:
        InvalidArgument: an unknown type or key, a missing or impossible value.
    """
    values = {key: value for key, value in parameters.items() if value is not None}
    kinds = [values.pop(key) for key in ("rope_type", "type") if key in values]
    if any(not isinstance(kind, str) for kind in kinds) or len({_OLD_TYPES.get(kind, kind) for kind in kinds}) > 1:
        raise InvalidArgument(f"rope_type must be one of {', '.join(ROPE_TYPES)}, not {kinds}")
    kind = _OLD_TYPES.get(kinds[0], kinds[0]) if kinds else "default"
    if kind not in ROPE_TYPES:
        raise InvalidArgument(f"rope_type must be one of {', '.join(ROPE_TYPES)}, not {kind!r}")
    if kind == "default":
        _known(kind, values, ())
        return None
    maker, names = _KEYS[kind]
    _known(kind, values, names)
    told = TRAINED in values
    if TRAINED in names and max_length is not None:
        values.setdefault(TRAINED, max_length)
    derived = kind == "longrope" or (kind == "yarn" and told)  # YaRN by a factor of 1 would change nothing
    if derived and "factor" not in values and max_length is not None and TRAINED in values:
        count = values[TRAINED]
        values["factor"] = max_length / count if isinstance(count, int) and count > 0 else 1.0
    needed = {key for key in names if key in _REQUIRED.get(kind, ()) or _has_no_default(maker, names[key])}
    if missing := sorted(needed - values.keys()):
        raise InvalidArgument(f"rope_type {kind!r} needs {', '.join(missing)}")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            values[key] = tuple(values[key]) if isinstance(values[key], list | tuple) else values[key]
    return maker(**{names[key]: value for key, value in values.items()})


def scaling_to_dict(scaling: RopeScaling) -> dict[str, Any]:
    """What :func:`scaling_from_dict` reads, with nothing left out but what is None."""
    for kind, (maker, names) in _KEYS.items():
        if type(scaling) is maker:
            given = {key: getattr(scaling, field) for key, field in names.items()}
            plain = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
            return {"rope_type": kind} | {key: value for key, value in plain.items() if value is not None}
    raise InvalidArgument(f"{scaling!r} is not a scaling with a name; those are {', '.join(_KEYS)}")


def rope_from_config(
    parameters: Mapping[str, Any] | None,
    *,
    head_dim: int,
    max_length: int | None = None,
    base: float = 10000.0,
    turned: float = 1.0,
    pairing: str = "half",
    per_token: bool = False,
    allow_longer: bool = False,
) -> Rotary:
    """Rotary positions as a hub configuration describes them.

    Args:
        parameters: `rope_parameters`, or the older `rope_scaling` (None: no scaling): "rope_type" or "type", one of
            :data:`ROPE_TYPES`; "rope_theta"; "partial_rotary_factor"; and the keys of the type.
        head_dim: channels of a head.
        max_length: `max_position_embeddings`. "dynamic" counts it as the trained length.
        base: `rope_theta` where it stands outside of the dictionary; default 10000.
        turned: `partial_rotary_factor` (GPT-NeoX: `rotary_pct`) where it stands outside: the share of a head's channels
            that is turned; default 1.
        pairing: "half" (default) as nearly all models of the hub, "interleaved" as GPT-J and CodeGen.
        per_token: the choice of :class:`LengthScaling`; default False, as `transformers` computes.
        allow_longer: read longer sequences than the model is meant for without complaint.

    Raises:
        InvalidArgument: an unknown type or key, a missing or impossible value.
    """
    values = {key: value for key, value in (parameters or {}).items() if value is not None}
    theta = values.pop("rope_theta", base)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "dynamic" and max_length is not None and values.get(TRAINED, max_length) != max_length:
        raise InvalidArgument(
            f'rope_type "dynamic" grows from max_length={max_length}, but {TRAINED} is {values[TRAINED]}: '
            "pass the length that the model was trained for as max_length, and leave the other out"
        )
    if kind == "proportional":
        values.setdefault("partial_rotary_factor", turned)
        share = 1.0
    else:
        share = values.pop("partial_rotary_factor", turned)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidArgument(f"partial_rotary_factor must be above 0 and at most 1, not {share!r}")
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise InvalidArgument(f"rope_theta must be a number, not {theta!r}")
    if kind in ("dynamic", "longrope", "su"):
        values.setdefault("per_token", per_token)
    scaling = scaling_from_dict(values, max_length=max_length)
    return Rotary(
        head_dim,
        base=float(theta),
        pairing=pairing,
        turned=int(head_dim * share),
        scaling=scaling,
        max_length=max_length,
        allow_longer=allow_longer,
    )


def _known(kind: str, values: Mapping[str, Any], names: Mapping[str, str] | tuple[str, ...]) -> None:
    unknown = sorted(values.keys() - set(names))
    if unknown:
        allowed = f"its keys are {', '.join(names)}" if names else "it has no keys"
        raise InvalidArgument(f"rope_type {kind!r} does not know {', '.join(unknown)}; {allowed}")


def _has_no_default(maker: Callable[..., RopeScaling], name: str) -> bool:
    return any(f.name == name and f.default is MISSING for f in fields(maker))  # pyright: ignore[reportArgumentType]
