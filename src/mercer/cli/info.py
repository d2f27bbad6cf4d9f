"""`mercer info`: what a run or a saved model is, how far it came, and what it costs to remember."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mercer.cli.describe import CONTEXTS

STATES = {"features": "features", "pairs": "cache", "mixer": "fixed", None: "none"}
"""What each kind of state is called."""
UNLIMITED = 10_000
"""Columns where no terminal limits them: what is piped to a file is whole."""


def register(app: typer.Typer) -> None:
    app.command()(info)


def info(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run, one checkpoint of it, a model's folder of the hub's format, a GGUF file, or owner/name on the "
            "hub."
        ),
    ],
    checkpoint: Annotated[str, typer.Option(help="Of a run: last, best (held-out loss) or a step.")] = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the model, its attention layer by layer, the bytes of its states against context, and the last metrics.

    Every model that can be read will do: language models, encoders of texts and images, encoder-decoders.
    """
    facts = describe(run, checkpoint)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    _print(facts)


def describe(run: Path, checkpoint: str = "last") -> dict[str, Any]:
    """Everything that `mercer info` prints, as JSON values."""
    from mercer.cli.describe import facts_of
    from mercer.cli.locate import open_any
    from mercer.runtime.files import read_json
    from mercer.training.checkpoint import folders, step_of
    from mercer.training.metrics import read_metrics

    facts = facts_of(open_any(str(run), checkpoint))
    if (run / "run.json").exists():
        record = read_json(run / "run.json")
        events = read_metrics(run)
        facts["train"] = record["train"]
        facts["corpus"] = {key: value for key, value in record["corpus"].items() if key != "split"}
        facts["corpus"]["split"] = record["corpus"]["split"]["by"]
        facts["checkpoints"] = [step_of(path) for path in folders(run)]
        for kind in ("train", "eval"):
            facts[f"last_{kind}"] = next((event for event in reversed(events) if event["event"] == kind), None)
    return facts


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from mercer.runtime.words import count

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = UNLIMITED
    family = "" if facts["family"] == "mercer" else f"{facts['family']}, "
    console.print(f"{facts['folder']}: {family}{facts['parameters']:,} parameters")
    console.print(f"{facts['architecture']} in {_listed(facts['dtypes'])}; {_said(facts)}")
    console.print(_layers(facts))
    model = Table("model", Column("", overflow="fold"), show_header=True)
    for key, value in facts["model"].items():
        if value is not None:
            model.add_row(key, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    console.print(model)
    if "train" not in facts:
        return
    corpus = facts["corpus"]
    console.print(
        f"text: {corpus['train']['bytes']:,} bytes in {count(corpus['train']['files'], 'file')}, held out "
        f"{corpus['held_out']['bytes']:,} in {count(corpus['held_out']['files'], 'file')}; "
        f"vocabulary {corpus['vocabulary']}; sha256 {corpus['sha256'][:16]}"
    )
    kept = ", ".join(map(str, facts["checkpoints"])) or "none yet"
    console.print(f"checkpoints: {kept} of {count(facts['train']['steps'], 'step')}")
    if last := facts["last_train"]:
        console.print(f"training, step {last['step']}: {last['loss']:.4f} nats a token")
    if last := facts["last_eval"]:
        console.print(
            f"held out, step {last['step']}: {last['loss']:.4f} nats a token, {last['bits_per_byte']:.4f} bits a byte"
        )


def _listed(dtypes: dict[str, int]) -> str:
    """The dtype, or several with the share of all but the first."""
    first, *others = dtypes
    return ", ".join((first, *(f"{name} ({dtypes[name]:,} parameters)" for name in others)))


def _said(facts: dict[str, Any]) -> str:
    """Context and tokenizer in words."""
    context = (f"{'any number of' if n is None else f'{n:,}'} {what}" for what, n in facts["context"].items())
    words = [f"context: {', '.join(context)}"]
    if facts.get("endless"):
        words[0] += " in states of bounded size, so that a text is scored as one sequence"
    elif facts["context"].get("tokens", 0) is None and facts.get("scored"):
        grows = " in states that grow with them" if _grows(facts["state_bytes"]) else ""
        words[0] += f"{grows}; a text is scored by windows of {facts['scored']:,}"
    if facts["tokenizer"] is not None:
        words.append(f"tokenizer: {facts['tokenizer']['tokens']:,} tokens")
    elif "no_tokenizer" in facts:
        words.append(f"no tokenizer ({facts['no_tokenizer']})")
    return "; ".join([*words, *(["with a chat template"] if facts["chat"] else [])])


def _grows(sizes: dict[str, int] | None) -> bool:
    return sizes is not None and sizes[str(CONTEXTS[-1])] > sizes[str(CONTEXTS[-2])]


def _layers(facts: dict[str, Any]) -> Any:
    """A table of the layers, and of what the state of each takes where the model has states."""
    from rich.table import Table

    layers = facts["layers"]
    states = any("state" in layer for layer in layers)
    sparse = any(layer["structure"] != "causal" for layer in layers)
    head = (*(("part",) if "part" in layers[0] else ()), "attention", *(("structure",) if sparse else ()))
    if not states:
        table = Table("layer", *head)
        for number, layer in enumerate(layers, 1):
            table.add_row(str(number), *(layer[part] for part in head))
        return table
    contexts = (f"{context:,}" for context in CONTEXTS)
    title = "Size of state against tokens of context"
    table = Table(
        "layer", *head, "state", *contexts, title=f"{title}, without that of the source" if "part" in head else title
    )
    for number, layer in enumerate(layers, 1):
        kind = STATES[layer.get("state")]
        table.add_row(str(number), *(layer[part] for part in head), kind, *_sizes(layer.get("state_bytes")))
    table.add_section()
    table.add_row("all", *("" for _ in head), "", *_sizes(facts["state_bytes"]))
    return table


def _sizes(sizes: dict[str, int] | None) -> list[str]:
    return ["-"] * len(CONTEXTS) if sizes is None else [_bytes(number) for number in sizes.values()]


def _bytes(number: int) -> str:
    """Bytes in three digits: 640 B, 65.5 kB, 16.8 MB."""
    value, unit = float(number), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
