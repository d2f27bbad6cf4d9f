"""Options that the commands on texts share: which model, how it is read, how tokens are chosen."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mercer.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from mercer.checkpoints import Checkpoint
    from mercer.inference.sampler import Sampling

MODEL = "A model: a folder of the hub's format, a GGUF file, owner/name on the hub, or a run."

Model = Annotated[str, typer.Option("--model", "-m", help=MODEL, rich_help_panel="Model")]
CheckpointName = Annotated[
    str, typer.Option(help="Of a run: last, best (held-out loss) or a step.", rich_help_panel="Model")
]
Attention = Annotated[
    str | None,
    typer.Option(
        help="Put this attention in the model's layers: kernel-normaliser, or a pattern over the layers with commas.",
        rich_help_panel="Model",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of the weights: float32, bfloat16, float16 or float64 (as stored).",
        rich_help_panel="Model",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Pack the weights for quick steps on the CPU: as_is, bfloat16, int8 or int4. Needs the extra cpu.",
        rich_help_panel="Model",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel="Model")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", "-j", help="Threads of torch (as it chooses).", rich_help_panel="Model", show_default=False
    ),
]
RopeScaling = Annotated[
    str | None,
    typer.Option(
        help="Read past the trained length with rotary positions scaled: linear=4, ntk=4, dynamic=1, yarn=4, or "
        "a JSON object as in a configuration.",
        rich_help_panel="Model",
        show_default=False,
    ),
]
AllowLonger = Annotated[
    bool,
    typer.Option(
        "--allow-longer", help="Let positions run on past the trained length as they are.", rich_help_panel="Model"
    ),
]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token, 1 the model's distribution.")]
TopK = Annotated[int | None, typer.Option(help="Choose among so many likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this joint share.")]
MinP = Annotated[float | None, typer.Option(help="Choose among tokens at least this share as likely as the likeliest.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Make tokens that were read or written before less likely; 1 does not.")
]
Seed = Annotated[int, typer.Option(help="The same seed writes the same text.")]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End before this text; may be given several times.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but errors on standard error.")]


def sampling_of(
    max_tokens: int,
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float,
) -> "Sampling":
    """How tokens are chosen, after a look at the numbers beside."""
    from mercer.inference.sampler import Sampling

    if max_tokens < 0:
        raise InvalidArgument(f"--max-tokens is {max_tokens}; it is at least 0")
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"--seed is {seed}; it is at least 0 and below 2^63")
    return Sampling(temperature, top_k, top_p, min_p, repetition_penalty)


def opened(
    model: str,
    checkpoint: str,
    attention: str | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    rope_scaling: str | None,
    allow_longer: bool,
    weights: str | None,
    *,
    translating: bool = False,
) -> "tuple[Checkpoint, Any]":
    """What was opened, and its model with the positions and the weights that were asked for.

    translating: take encoder-decoders as well, which have neither to choose.
    """
    from dataclasses import replace

    import torch

    from mercer.cli.locate import open_model

    if threads is not None:
        if threads < 1:
            raise InvalidArgument(f"--threads is {threads}; at least 1 is needed")
        torch.set_num_threads(threads)
    found = open_model(model, checkpoint, device=device, dtype=dtype, attention=attention, translating=translating)
    lm = found.model
    if not hasattr(lm, "with_positions") and (rope_scaling is not None or allow_longer or weights is not None):
        flag = "--weights" if weights is not None else "--rope-scaling and --allow-longer"
        raise Unsupported(f"{model} is an encoder-decoder, which {flag} is not for")
    if rope_scaling is not None or allow_longer:
        scaling = lm.config.rope_scaling if rope_scaling is None else _scaling(rope_scaling)
        lm = lm.with_positions(rope_scaling=scaling, allow_longer=allow_longer)
    if weights is not None:
        from mercer.inference.engine import prepare

        lm = prepare(lm, weights, keep=False)
        found = replace(found, model=lm)
    return found, lm


def text_of(given: str) -> bytes:
    """A text as it was typed; - reads standard input."""
    return sys.stdin.buffer.read() if given == "-" else given.encode("utf-8", "surrogateescape")


def file_of(name: str) -> bytes:
    """The content of a file; - reads standard input."""
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {name}: {(error.strerror or str(error)).lower()}") from error


def _scaling(text: str) -> dict[str, Any]:
    """The dictionary of a scaling given as "yarn=4" or as JSON."""
    import json

    kind, _, factor = text.partition("=")
    try:
        values = json.loads(text) if text.lstrip().startswith("{") else {"rope_type": kind, "factor": float(factor)}
    except ValueError:
        raise InvalidArgument(
            f"--rope-scaling is {text!r}; write a type and a factor, as in yarn=4, or a JSON object"
        ) from None
    return values
