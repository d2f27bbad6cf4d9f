"""`mercer generate`: a model continues a text, printed as it is written."""

import json
import sys
from typing import Annotated, Any

import typer

from mercer.cli import options
from mercer.errors import Interrupted, InvalidArgument

MANY = 64
"""Tokens from which on it is worth a word that there is a quicker way."""


def register(app: typer.Typer) -> None:
    app.command(context_settings={"allow_extra_args": True})(generate)  # what is too many, is told below


def generate(
    context: typer.Context,
    run_or_prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN | PROMPT]",
            help="With --model the text to continue; without, the folder of a run, or of one checkpoint or model.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="The text to continue; - reads standard input.", show_default=False),
    ] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    echo: Annotated[bool, typer.Option(help="Print the prompt first.")] = True,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: the log-probability of each token, and of so many likeliest ones at its place; of the "
            "prompt's tokens too, unless --no-echo.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help=options.MODEL, rich_help_panel="Model", show_default=False),
    ] = None,
    checkpoint: options.CheckpointName = "last",
    attention: options.Attention = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    rope_scaling: options.RopeScaling = None,
    allow_longer: options.AllowLonger = False,
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Continue a prompt with a model, or let an encoder-decoder answer it. Text goes to standard output as soon as each
    character is whole."""
    import torch

    from mercer.cli.flags import as_typed
    from mercer.inference.generate import Completion, stream
    from mercer.models.seq2seq import Seq2Seq

    if context.args:
        raise InvalidArgument(_too_many(run_or_prompt, context.args, model))
    path, given = _named(run_or_prompt, prompt, model)
    if logprobs is not None and not as_json:
        raise InvalidArgument("--logprobs needs --json, which prints them")
    with as_typed(generate):
        sampling = options.sampling_of(max_tokens, seed, temperature, top_k, top_p, min_p, repetition_penalty)
    text = options.text_of(given)
    if not text:
        raise InvalidArgument("the prompt is empty; give at least one character")
    with as_typed(generate):
        found, lm = options.opened(
            path, checkpoint, attention, dtype, device, threads, rope_scaling, allow_longer, weights, translating=True
        )
        try:
            tokens = found.vocabulary.prompt(text)
        except UnicodeDecodeError as error:
            raise InvalidArgument("the prompt is not UTF-8, which the model's vocabulary needs") from error
        answers = isinstance(found.model, Seq2Seq)
        if answers and not tokens:
            raise InvalidArgument("the prompt has no tokens; give at least one character that the vocabulary knows")
        if answers:  # what it writes is no continuation
            lm, echo = lm.conditioned(torch.tensor([tokens], device=lm.embedding.weight.device)), False
        pieces = stream(  # refuses before anything is printed
            lm,
            [[lm.config.start_token] if answers else tokens],
            max_tokens,
            sampling=sampling,
            seed=seed,
            vocabulary=found.vocabulary,
            stop=stop or (),
            logprobs=logprobs,
            echo=echo and logprobs is not None,
        )
    done = Completion()
    report = _Report(len(tokens))
    if echo and not as_json:
        _write(text.decode("utf-8", "replace"))
    try:
        for piece in pieces:
            done.pieces.append(piece)
            if not as_json:
                _write(piece.text)
    except KeyboardInterrupt:
        raise Interrupted(f"{len(done.tokens)} of {max_tokens} tokens were written") from None
    finally:
        if not as_json:
            _write("\n")
    if as_json:
        facts = {"model": path, "prompt": text.decode("utf-8", "replace"), "text": done.text, "finish": done.finish}
        facts |= report.facts(len(done.tokens))
        if logprobs is not None:
            facts["tokens"] = [_told(piece, found.vocabulary) for piece in done.pieces]
        typer.echo(json.dumps(facts))
    if not quiet:
        typer.echo(report.line(len(done.tokens)), err=True)
        if (
            weights is None
            and not answers
            and len(done.tokens) >= MANY
            and found.model.embedding.weight.device.type == "cpu"
        ):
            typer.echo(
                "On a CPU --weights as_is packs the weights for quicker steps, once they are compiled.", err=True
            )


def _named(run_or_prompt: str | None, prompt: str | None, model: str | None) -> tuple[str, str]:
    """The model's path and the prompt, from the two ways to give them."""
    if model is None:
        if run_or_prompt is None:
            raise InvalidArgument("name the model: --model PATH, or the folder of a run as the first argument")
        if prompt is None:
            raise InvalidArgument("give the text to continue with --prompt, or as the argument after --model PATH")
        return run_or_prompt, prompt
    if (run_or_prompt is None) == (prompt is None):
        raise InvalidArgument("give the text to continue once: as the argument, or with --prompt")
    return model, prompt if run_or_prompt is None else run_or_prompt


def _too_many(first: str | None, others: list[str], model: str | None) -> str:
    """What to write instead of an argument that is one too many."""
    if model is not None:
        return f"there is a second argument, {others[0]!r}; a text of several words is put in quotes"
    from shlex import quote

    text = " ".join(others)
    return f"a model and a text are two arguments; write mercer generate --model {quote(str(first))} {quote(text)}"


def _told(piece: Any, vocabulary: Any) -> dict[str, Any]:
    """A token for JSON. The text of a likely token is that inside a text, and empty for a special one."""

    def text(token: int) -> str:
        return vocabulary.token_bytes(token).decode("utf-8", "replace")

    facts: dict[str, Any] = {"token": piece.token, "text": text(piece.token), "logprob": piece.logprob}
    top = [{"token": token, "text": text(token), "logprob": logprob} for token, logprob in piece.top]
    return facts | {"top": top, "prompt": piece.prompt}


class _Report:
    """How much was read and written, and how fast."""

    def __init__(self, read: int) -> None:
        import time

        self._read, self._clock = read, time.perf_counter
        self._started = self._clock()
        self._seconds: float | None = None

    def facts(self, written: int) -> dict[str, Any]:
        if self._seconds is None:
            self._seconds = self._clock() - self._started
        return {"tokens_read": self._read, "tokens_written": written, "seconds": round(self._seconds, 4)}

    def line(self, written: int) -> str:
        from mercer.runtime import words

        seconds = self.facts(written)["seconds"]
        return (
            f"{words.count(self._read, 'token')} read, {written} written in {seconds:.2f} s, "
            f"{words.rate(written, seconds)} a second"
        )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
