"""`mercer chat`: turn by turn with a model, which keeps what it has read."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mercer.cli import options
from mercer.errors import Interrupted, InvalidArgument

if TYPE_CHECKING:
    from mercer.inference.conversation import Conversation

EXIT, RESET = "/exit", "/reset"
INTERRUPTED = 130  # as in mercer.cli.main, which imports this module


def register(app: typer.Typer) -> None:
    app.command()(chat)


def chat(
    model: options.Model,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="What the model is told before the chat.", show_default=False)
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(help="A file with a Jinja template, instead of the model's own.", show_default=False),
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option(
            "--variable",
            help="NAME=VALUE for the template, a value of JSON or a text: enable_thinking=false.",
            show_default=False,
        ),
    ] = None,
    literal: Annotated[
        bool,
        typer.Option(
            help="Read names of special tokens in messages as they are spelt, and refuse plain text that would end a "
            "message's turn, as with Llama 2; or take both for what they look like."
        ),
    ] = True,
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one JSON object on a line.")] = False,
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
    """Chat with a model. Each line of standard input is a message; answers go to standard output.

    /reset begins anew and /exit, or the end of the input, ends. On a terminal Ctrl-C breaks an answer off. Of each turn
    only what is new is read: the model keeps the state of what it has read before.
    """
    from mercer.cli.flags import as_typed
    from mercer.inference.conversation import Conversation

    with as_typed(chat):
        sampling = options.sampling_of(max_tokens, seed, temperature, top_k, top_p, min_p, repetition_penalty)
        variables = dict(_variable(text) for text in variable or ())
        found, lm = options.opened(
            model, checkpoint, attention, dtype, device, threads, rope_scaling, allow_longer, weights
        )
        conversation = Conversation(
            lm,
            found.vocabulary,
            found.chat if template is None else _template(template, found.vocabulary),
            system=system,
            sampling=sampling,
            seed=seed,
            max_tokens=max_tokens,
            stop=stop or (),
            variables=variables,
            literal=literal,
        )
    terminal = sys.stdin.isatty()
    if terminal:
        signal.signal(signal.SIGTERM, _end)  # elsewhere it interrupts, which here would break an answer off alone
    if terminal and not quiet:
        typer.echo(f"{RESET} begins anew, {EXIT} ends, Ctrl-C breaks an answer off.", err=True)
    for content in _lines(terminal):
        if content == RESET:
            conversation.reset()
            continue
        if terminal:
            _answer_a_person(conversation, content, quiet)
        else:
            _answer(conversation, content, as_json, quiet)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(INTERRUPTED)


def _lines(terminal: bool) -> Iterator[str]:
    """What is typed, without empty lines, up to /exit."""
    while True:
        if terminal:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line or line.strip() == EXIT:
            return
        if line.strip():
            yield line.strip() if line.strip() == RESET else line.rstrip("\r\n")


def _answer_a_person(conversation: "Conversation", content: str, quiet: bool) -> None:
    """An answer on a terminal: what goes wrong with it does not end the chat."""
    try:
        _answer(conversation, content, as_json=False, quiet=quiet)
    except InvalidArgument as error:
        typer.echo(f"Error: {error}.", err=True)
    except Interrupted:
        typer.echo("(broken off)", err=True)


def _answer(conversation: "Conversation", content: str, as_json: bool, quiet: bool) -> None:
    import time

    from mercer.cli.flags import as_typed

    started, begun = time.perf_counter(), False
    answer = conversation.answer(content)
    try:
        with as_typed(chat):
            for piece in answer:
                begun = True
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        answer.close()
        written = conversation.turn.written if begun else 0
        raise Interrupted(f"{written} tokens of the answer were written") from None
    finally:
        if begun and not as_json:
            sys.stdout.write("\n")
            sys.stdout.flush()
    turn, seconds = conversation.turn, time.perf_counter() - started
    if as_json:
        facts: dict[str, Any] = {"text": turn.text, "finish": turn.finish, "tokens": turn.tokens}
        facts |= {"tokens_read": turn.read, "tokens_written": turn.written, "seconds": round(seconds, 4)}
        typer.echo(json.dumps(facts))
    elif not begun:
        sys.stdout.write("\n")  # an empty answer is a line too
        sys.stdout.flush()
    if not quiet:
        typer.echo(f"({turn.read} of {turn.tokens} tokens read, {turn.written} written in {seconds:.2f} s)", err=True)


def _variable(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidArgument(f"--variable is {text!r}; write a name and a value, as in enable_thinking=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _template(path: Path, vocabulary: Any) -> Any:
    from mercer.models.chat import ChatTemplate

    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}") from error
    return ChatTemplate(source, getattr(vocabulary, "names", {}), where=str(path))
