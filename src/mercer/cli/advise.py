"""`mercer advise`: which attention costs least at some sizes, and from which context length on."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """Of queries, keys, values and the cache."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def register(app: typer.Typer) -> None:
    app.command()(advise)


def advise(
    dim: Annotated[int, typer.Option(help="Head dimension of queries and keys.")],
    heads: Annotated[int, typer.Option(help="Query heads.")],
    context: Annotated[int, typer.Option(help="Tokens of context.")],
    value_dim: Annotated[int | None, typer.Option(help="Head dimension of values; default that of keys.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads, a divisor of --heads; default as many.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of queries, keys, values and the cache.")] = Dtype.float32,
    attention: Annotated[
        list[str] | None,
        typer.Option("--attention", "-a", help="What to compare, such as softmax or taylor2-l2; may be repeated."),
    ] = None,
    structure: Annotated[
        str, typer.Option(help="Which of the tokens before it a token sees: window(512), strided(128), ...")
    ] = "causal",
    training: Annotated[
        bool, typer.Option("--training", help="Forward and backward instead of reading a context.")
    ] = False,
    device: Annotated[str, typer.Option(help="What it would run on; needs numbers of such a device.")] = "cpu",
    machine: Annotated[
        Path | None, typer.Option(help="A JSON file with the numbers of a machine; with --measure it is written.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the numbers of this machine first; some ten seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Compare what attentions cost by a model of the machine: reading a context, a further token, the state's bytes;
    and from which context length each costs less than softmax."""
    import torch

    from mercer.advice import advise as compare
    from mercer.advice import measure_machine
    from mercer.core.machine import Machine
    from mercer.errors import InvalidArgument
    from mercer.runtime.files import read_json, write_file

    numbers = None
    if measure:
        numbers = measure_machine(device)
        if machine is not None:
            write_file(machine, numbers.to_json())
    elif machine is not None:
        try:
            numbers = Machine.from_json(json.dumps(read_json(machine)))
        except InvalidArgument as error:
            raise InvalidArgument(f"{machine}: {error}") from error
    found = compare(
        dim=dim,
        heads=heads,
        context=context,
        value_dim=value_dim,
        kv_heads=kv_heads,
        dtype=getattr(torch, dtype.value),
        batch=batch,
        kernels=attention or None,
        device=device,
        machine=numbers,
        training=training,
        structure=structure,
    )
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else str(found))
