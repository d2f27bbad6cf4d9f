"""`mercer study`: a question asked of this machine, answered in JSON and in a page rendered from it."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from mercer.cli.flags import as_typed
from mercer.cli.locate import model_folder

Budget = Annotated[str, typer.Option(help="quick (about ten minutes on two cores), standard or full.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The study's folder (runs/STUDY-BUDGET); again to continue.")
]
Attentions = Annotated[
    list[str] | None,
    typer.Option("--attention", "-a", help="Instead of the budget's; may be repeated: taylor4-l2, exp-l2, elu-sum."),
]
Pattern = Annotated[
    list[str] | None,
    typer.Option(
        "--pattern", "-p", help="Layers by name, repeated over the model; may be repeated: '7*mamba,softmax'."
    ),
]
Layers = Annotated[int | None, typer.Option(help="Of each model, instead of the study's own.")]
Seeds = Annotated[int | None, typer.Option(help="Runs of each, instead of the budget's.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Run a study: JSON with a schema, and one self-contained page.", no_args_is_help=True)
    group.command()(orders)
    group.command()(recall)
    group.command()(cost)
    group.command()(approximation)
    group.command()(positions)
    app.add_typer(group, name="study")


def orders(
    budget: Budget = "quick",
    out: Out = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Files, folders or globs to learn from; may be repeated (the Python library's source)."),
    ] = None,
    attention: Attentions = None,
    pattern: Pattern = None,
    layers: Layers = None,
    seeds: Seeds = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of each run; quick otherwise measures how many fit.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", help="Peak of the schedule, for all (0.003).")
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """What do kernel and normaliser do to a language model's loss?

    The same decoder with softmax, its exponential under a norm, linear attention and Taylor series of growing order,
    trained on the same text. An attention may end in '+gain', a gain learned per head after the norm, or
    '+gain=1', its start (0.1). A recurrent mixer (mamba, rwkv7, gla, ...) may stand for an attention, and a pattern
    mixes both. Each is compared with softmax, or where that is none of them with the first, attentions before patterns.
    Stopped at any moment, the same command continues.
    """
    command = _command()
    from mercer.studies.orders import run

    with as_typed(orders):
        page = run(
            budget, out or Path(f"runs/orders-{budget}"), text=text or (), attentions=_models(attention, pattern),
            layers=layers, seeds=seeds, steps=steps, learning_rate=learning_rate, device=device, command=command,
            quiet=quiet,
        )  # fmt: skip
    typer.echo(page)


def recall(
    budget: Budget = "quick",
    out: Out = None,
    attention: Attentions = None,
    pattern: Pattern = None,
    layers: Layers = None,
    seeds: Seeds = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run, instead of the budget's.")] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """How many pairs can an attention remember?

    Multi-query associative recall with two layers: accuracy against the number of pairs and the size of the state, and
    what a linear memory of that size would recall. A recurrent mixer (mamba, rwkv7, gla, ...) may stand for an
    attention, and a pattern mixes both. Stopped at any moment, the same command continues.
    """
    command = _command()
    from mercer.studies.recall import run

    with as_typed(recall):
        page = run(
            budget, out or Path(f"runs/recall-{budget}"), attentions=_models(attention, pattern), layers=layers,
            seeds=seeds, steps=steps, device=device, command=command, quiet=quiet,
        )  # fmt: skip
    typer.echo(page)


def cost(
    budget: Budget = "quick",
    out: Out = None,
    attention: Attentions = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """Where does one attention become cheaper than another?

    Time per token and bytes of state against the context length, reading a context and writing after it, for each form
    and beside its plan. Leave the machine alone meanwhile. Stopped at any moment, the same command continues.
    """
    command = _command()
    from mercer.studies.cost import run

    with as_typed(cost):
        page = run(
            budget, out or Path(f"runs/cost-{budget}"), attentions=attention or (), device=device, command=command,
            quiet=quiet,
        )  # fmt: skip
    typer.echo(page)


def approximation(
    budget: Annotated[str, typer.Option(help="quick (a few minutes on two cores), standard or full.")] = "quick",
    out: Out = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A run, checkpoint or model to take queries, keys and values from (one is trained here)."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Files, folders or globs to read; may be repeated (the Python library's source)."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            "--attention",
            "-a",
            help="Instead of the budget's; may be repeated: taylor4-sum, favor256-sum, trig64-signed-sum, elu-sum.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of the model; quick otherwise measures how many fit.")
    ] = None,
    target: Annotated[float, typer.Option(help="Relative error that orders and numbers of features are for.")] = 0.1,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """How far is each kernel from softmax attention?

    And what order, or how many random features, does a wanted error need? On random queries and keys of growing scores,
    and on those of a trained model, layer by layer and head by head. Random features may end in '+independent'
    (directions that are not orthogonal) or '+sqrt' (norms that are all sqrt(D)). Stopped at any moment, the same
    command continues.
    """
    command = _command()
    from mercer.studies.approximation import run

    with as_typed(approximation):
        page = run(
            budget, out or Path(f"runs/approximation-{budget}"), model=None if model is None else model_folder(model),
            text=text or (), attentions=attention or (), steps=steps, target=target, device=device, command=command,
            quiet=quiet,
        )  # fmt: skip
    typer.echo(page)


def positions(
    budget: Budget = "quick",
    out: Out = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Files, folders or globs to learn from; may be repeated (the Python library's source)."),
    ] = None,
    position: Annotated[
        list[str] | None,
        typer.Option(
            "--position",
            "-p",
            help="Instead of the budget's; may be repeated: none, sinusoidal, learned, rotary, alibi, t5, rotary+yarn.",
        ),
    ] = None,
    seeds: Seeds = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of each run; quick otherwise measures how many fit.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", help="Peak of the schedule, for all (0.003).")
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
) -> None:
    """What happens to a model's loss beyond its trained length?

    The same decoder with each position scheme, trained on short sequences of the same text and read to eight times
    their length. After a scheme may stand how to read: '+restart' (the context begins anew), '+window', and for rotary
    '+linear', '+ntk', '+dynamic' or '+yarn', with a factor if wanted, as in 'rotary+yarn=4'. Stopped at any moment,
    the same command continues.
    """
    command = _command()
    from mercer.studies.positions import run

    with as_typed(positions):
        page = run(
            budget, out or Path(f"runs/positions-{budget}"), text=text or (), positions=position or (), seeds=seeds,
            steps=steps, learning_rate=learning_rate, device=device, command=command, quiet=quiet,
        )  # fmt: skip
    typer.echo(page)


def _models(attentions: list[str] | None, patterns: list[str] | None) -> list[str]:
    return [*(attentions or ()), *(patterns or ())]


def _command() -> str:
    """The line that was typed. Called before torch is imported, it also keeps torch's threads from spinning while they
    wait: with another process on the same cores, a spinning thread takes the time that the working one needs."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return shlex.join(["mercer", *sys.argv[1:]])
