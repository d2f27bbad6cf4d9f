"""`mercer generate`: a trained model continues a text, printed as it is written."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from mercer.errors import Interrupted, InvalidArgument


def register(app: typer.Typer) -> None:
    app.command()(generate)


def generate(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or of one checkpoint or model.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue; - reads standard input.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to write.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 the model's distribution.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among so many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this joint share.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="last, best (held-out loss) or a step.")] = "last",
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            help="Read past the trained length with rotary positions scaled: linear=4, ntk=4, dynamic=1, yarn=4, or "
            "a JSON object as in a configuration.",
            show_default=False,
        ),
    ] = None,
    allow_longer: Annotated[
        bool, typer.Option("--allow-longer", help="Let positions run on past the trained length as they are.")
    ] = False,
    echo: Annotated[bool, typer.Option(help="Print the prompt first.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary on standard error.")] = False,
) -> None:
    """Continue a prompt with a trained model. Text goes to standard output as soon as each character is whole."""
    import time

    from mercer.cli.flags import as_typed
    from mercer.cli.locate import open_model
    from mercer.inference.generate import generate as continue_text
    from mercer.inference.sampler import Sampling
    from mercer.runtime import words

    with as_typed(generate):
        sampling = Sampling(temperature, top_k, top_p)
    if max_tokens < 0:
        raise InvalidArgument(f"--max-tokens is {max_tokens}; it is at least 0")
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"--seed is {seed}; it is at least 0 and below 2^63")
    text = sys.stdin.buffer.read() if prompt == "-" else prompt.encode("utf-8", "surrogateescape")
    if not text:
        raise InvalidArgument("the prompt is empty; give at least one character")
    model, vocabulary = open_model(run, checkpoint, device)
    if rope_scaling is not None or allow_longer:
        with as_typed(generate):
            scaling = model.config.rope_scaling if rope_scaling is None else _scaling(rope_scaling)
            model = model.with_positions(rope_scaling=scaling, allow_longer=allow_longer)
    try:
        tokens = vocabulary.encode(text).tolist()
    except UnicodeDecodeError as error:
        raise InvalidArgument("the prompt is not UTF-8, which the model's vocabulary needs") from error
    with as_typed(generate):
        continuation = continue_text(model, tokens, max_tokens, sampling, seed)  # refuses before anything is printed
    if echo:
        _write(text.decode("utf-8", "replace"))
    started, count = time.perf_counter(), 0

    def counted() -> Iterator[int]:
        nonlocal count
        for token in continuation:
            count += 1
            yield token

    try:
        for piece in vocabulary.stream(counted()):
            _write(piece)
    except KeyboardInterrupt:
        raise Interrupted(f"{count} of {max_tokens} tokens were written") from None
    finally:
        _write("\n")
    if not quiet:
        seconds = time.perf_counter() - started
        typer.echo(
            f"{words.count(len(tokens), 'token')} read, {count} written in {seconds:.2f} s, "
            f"{count / seconds:.0f} a second",
            err=True,
        )


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


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
