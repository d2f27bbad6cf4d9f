"""`mercer info`: what a run or a saved model is, how far it came, and what it costs to remember."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

CONTEXTS = (256, 1024, 4096, 16384, 65536)
UNLIMITED = 10_000
"""Columns where no terminal limits them: what is piped to a file is whole."""


def register(app: typer.Typer) -> None:
    app.command()(info)


def info(
    run: Annotated[
        Path, typer.Argument(help="A run, one checkpoint of it, a model's folder of the hub's format, or a GGUF file.")
    ],
    checkpoint: Annotated[str, typer.Option(help="Of a run: last, best (held-out loss) or a step.")] = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the model, its attention layer by layer, the bytes of its states against context, and the last metrics."""
    facts = describe(run, checkpoint)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    _print(facts)


def describe(run: Path, checkpoint: str = "last") -> dict[str, Any]:
    """Everything that `mercer info` prints, as JSON values."""
    from mercer.cli.locate import open_model
    from mercer.runtime.files import read_json
    from mercer.training.checkpoint import folders, step_of
    from mercer.training.metrics import read_metrics

    opened = open_model(str(run), checkpoint)
    model = opened.model
    facts: dict[str, Any] = {
        "folder": str(opened.folder),
        "family": opened.family,
        "model": model.config.model_dump(mode="json"),
        "parameters": model.parameter_count,
        "layers": [
            _layer(name, structure, block.attention, model.relative)
            for name, structure, block in zip(
                model.config.attentions, model.config.structures, model.blocks, strict=True
            )
        ],
    }
    whole = all(layer["state_bytes"] is not None for layer in facts["layers"])
    facts["state_bytes"] = (
        {str(context): sum(layer["state_bytes"][str(context)] for layer in facts["layers"]) for context in CONTEXTS}
        if whole
        else None
    )
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


def _layer(name: str, structure: str, attention: Any, relative: Any) -> dict[str, Any]:
    """An attention layer's names and the bytes of the state that one sequence leaves in it; None without a state."""
    import torch

    from mercer.core.cost import cache_bytes
    from mercer.core.merged import merge
    from mercer.core.support import Sizes
    from mercer.models.visibility import ending
    from mercer.ops import plan

    names = {"attention": name, "structure": structure}
    if ending(attention.structure) is not None:
        return names | {"state": None, "state_bytes": None}
    merged = merge(attention.structure)
    if merged.patterns:  # a cache, whatever the kernel; a plan would lay out the tiles of every context for the same
        heads, size = (attention.heads, attention.kv_heads), attention.head_dim
        bytes_ = {str(n): cache_bytes(merged, Sizes(1, *heads, n, n, size, size)) for n in CONTEXTS}
        return names | {"state": "pairs", "state_bytes": bytes_}
    by_length = attention.rotary is not None and attention.rotary.by_length  # keeps keys, to turn them anew
    sizes = {}
    for context in CONTEXTS:
        q, k = (
            torch.empty(1, heads, context, attention.head_dim, device="meta")
            for heads in (attention.heads, attention.kv_heads)
        )
        chosen = plan(
            q,
            k,
            k,
            kernel=attention.kernel,
            normalizer=attention.normalizer,
            structure=attention.structure if relative is None else attention.structure & relative(),
            return_state=True,
            form=attention.form,
            path="pairs" if by_length else attention.path,
        )
        sizes[str(context)] = chosen.state_bytes
    return names | {"state": chosen.path, "state_bytes": sizes}


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from mercer.runtime.words import count

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = UNLIMITED
    family = "" if facts["family"] == "mercer" else f"{facts['family']}, "
    console.print(f"{facts['folder']}: {family}{facts['parameters']:,} parameters")
    contexts = (f"{context:,}" for context in CONTEXTS)
    sparse = any(layer["structure"] != "causal" for layer in facts["layers"])
    head = ("attention", "structure") if sparse else ("attention",)
    table = Table("layer", *head, "state", *contexts, title="Size of state against tokens of context")
    for number, layer in enumerate(facts["layers"], 1):
        kind = {"features": "features", "pairs": "cache", None: "none"}[layer["state"]]
        table.add_row(str(number), *(layer[part] for part in head), kind, *_sizes(layer["state_bytes"]))
    table.add_section()
    table.add_row("all", *("" for _ in head), "", *_sizes(facts["state_bytes"]))
    console.print(table)
    model = Table("model", Column("", overflow="fold"), show_header=True)
    for key, value in facts["model"].items():
        if value is not None:
            model.add_row(key, ", ".join(value) if isinstance(value, list) else str(value))
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
