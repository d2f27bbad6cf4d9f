"""`mercer score`: how well a model foresees a text."""

import json
import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mercer.cli import options
from mercer.errors import InvalidArgument


def register(app: typer.Typer) -> None:
    app.command()(score)


def score(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Texts, each scored by itself; - is standard input.")
    ],
    model: options.Model,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window (the whole text for a model whose positions have no end and whose states have a "
            "bounded size, else as many as it reaches or was trained for).",
            show_default=False,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens that each window after the first scores; the others before them are context (half of it).",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    checkpoint: options.CheckpointName = "last",
    attention: options.Attention = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    rope_scaling: options.RopeScaling = None,
    allow_longer: options.AllowLonger = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Score texts: perplexity by token and bits by byte.

    A text longer than the context is read in windows. Each token is scored once, with at least context - stride tokens
    before it where there are so many. Models of recurrent mixers read the whole text as one sequence.
    """
    from mercer.cli.flags import as_typed
    from mercer.inference.score import score as score_text

    texts = [(name, options.file_of(name)) for name in files]
    with as_typed(score):
        found, lm = options.opened(
            model, checkpoint, attention, dtype, device, threads, rope_scaling, allow_longer, weights
        )
        told: list[dict[str, Any]] = []
        for name, text in texts:
            try:
                result = score_text(
                    lm, found.vocabulary, text, context=context, stride=stride, progress=_progress(name, quiet)
                )
            except UnicodeDecodeError as error:
                raise InvalidArgument(f"{name} is not UTF-8, which the model's vocabulary needs") from error
            except InvalidArgument as error:
                raise InvalidArgument(f"{name}: {error}") from error
            told.append({"file": name, **result.to_dict()})
            if not as_json:
                typer.echo(_line(told[-1]))
    total = {key: sum(one[key] for one in told) for key in ("tokens", "bytes")}
    nats = sum(one["loss"] * one["tokens"] for one in told)
    facts = {
        "model": model,
        "attention": sorted(set(lm.config.attentions)),
        **total,
        "loss": nats / total["tokens"],
        "perplexity": math.exp(min(nats / total["tokens"], 700.0)),
        "bits_per_byte": nats / math.log(2) / total["bytes"],
        "files": told,
    }
    if as_json:
        typer.echo(json.dumps(facts))
    elif len(told) > 1:
        typer.echo(_line({"file": "all", **facts}))


def _line(facts: dict[str, Any]) -> str:
    from mercer.runtime.words import count

    windows = f", {count(facts['windows'], 'window')} of {facts['context']:,}" if "windows" in facts else ""
    return (
        f"{facts['file']}: perplexity {facts['perplexity']:,.4g} a token, {facts['bits_per_byte']:.4f} bits a byte; "
        f"{count(facts['tokens'], 'token')}, {count(facts['bytes'], 'byte')}{windows}"
    )


def _progress(name: str, quiet: bool) -> Callable[[int, int], None] | None:
    """A line on standard error every ten seconds."""
    import time

    from mercer.runtime import words

    if quiet:
        return None
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 10:
            last = now
            rate = words.rate(done, now - started)
            typer.echo(f"{name}: {done:,} of {total:,} tokens, {rate} a second", err=True)

    return show
