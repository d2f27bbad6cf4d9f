"""`mercer train`: a language model from text files, resumable at any moment."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mercer.cli.flags import as_typed
from mercer.errors import InvalidArgument

SECTIONS = ("text", "held_out_text", "vocabulary", "held_out", "model", "train")


def register(app: typer.Typer) -> None:
    app.command()(train)


def _option(help_text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)


def train(
    more: Annotated[list[str] | None, typer.Argument(metavar="[PATH]...", help="More text, as after --text.")] = None,
    text: Annotated[list[str] | None, _option("Files, folders or globs to learn from.", "Text", "--text")] = None,
    held_out_text: Annotated[
        list[str] | None,
        _option("Files, folders or globs to measure on instead of a share.", "Text", "--held-out-text"),
    ] = None,
    held_out: Annotated[
        float | None,
        _option(
            "Share of the bytes held out, by whole files, of one file its tail; above 0 and below 1 (0.05).",
            "Text",
            "--held-out",
        ),
    ] = None,
    vocabulary: Annotated[
        str | None, _option("'bytes', or 'bpe:N': N tokens learned from the text ('bytes').", "Text", "--vocabulary")
    ] = None,
    cache: Annotated[Path | None, _option("Where the tokens are kept (OUT/text).", "Text", "--cache")] = None,
    out: Annotated[Path | None, _option("The run's folder, required; again to continue.", "Run", "--out", "-o")] = None,
    config: Annotated[
        Path | None,
        _option(
            f"A JSON file with any of: {', '.join(SECTIONS)}; flags win over it. docs/training.md has an example.",
            "Run",
            "--config",
        ),
    ] = None,
    restart: Annotated[bool, _option("Delete the run in OUT and begin anew.", "Run", "--restart")] = False,
    tensorboard: Annotated[
        bool, _option("Also write TensorBoard files; needs the track extra.", "Run", "--tensorboard")
    ] = False,
    threads: Annotated[int | None, _option("Threads of torch (as it chooses).", "Run", "--threads", "-j")] = None,
    device: Annotated[str | None, _option("'auto', 'cpu', 'cuda', 'cuda:1' ('auto').", "Run", "--device")] = None,
    quiet: Annotated[bool, _option("No progress on standard error.", "Run", "--quiet", "-q")] = False,
    as_json: Annotated[bool, _option("Print the result as one JSON object.", "Run", "--json")] = False,
    attention: Annotated[
        str | None,
        _option(
            "Kernel-normaliser, a recurrent mixer, or a pattern over the layers: 'taylor4-l2', 'mamba', "
            "'7*mamba,softmax' ('softmax').",
            "Model",
        ),
    ] = None,
    gain: Annotated[
        str | None, _option("Learned gain after L2, RMS or layernorm: none, head or channel (none).", "Model")
    ] = None,
    gain_init: Annotated[float | None, _option("Where the gains start (1).", "Model")] = None,
    attention_scale: Annotated[float | None, _option("Factor of q.k (the kernel's own).", "Model")] = None,
    dim: Annotated[int | None, _option("Channels (128).", "Model")] = None,
    layers: Annotated[int | None, _option("Blocks (4).", "Model")] = None,
    heads: Annotated[int | None, _option("Query heads (8).", "Model")] = None,
    kv_heads: Annotated[int | None, _option("Key and value heads (as many as heads).", "Model")] = None,
    head_dim: Annotated[int | None, _option("Channels of a head (dim / heads).", "Model")] = None,
    position: Annotated[
        str | None, _option("rotary, sinusoidal, learned, alibi, t5 or none (rotary).", "Model", "--position")
    ] = None,
    window: Annotated[int | None, _option("Tokens a token sees, itself included (all).", "Model")] = None,
    structure: Annotated[
        str | None,
        _option(
            "Which of them it sees, or a pattern over the layers: 'strided(16)', 'window(64) | global(first=4),causal' "
            "('causal').",
            "Model",
        ),
    ] = None,
    norm: Annotated[str | None, _option("rms or layer (rms).", "Model")] = None,
    norm_position: Annotated[str | None, _option("pre, post or both (pre).", "Model")] = None,
    feedforward: Annotated[
        str | None,
        _option(
            "swiglu, geglu, geglu_tanh, reglu, gelu, gelu_tanh, relu or silu; with mixers in all layers also none, "
            "rwkv4 or rwkv7 (swiglu).",
            "Model",
        ),
    ] = None,
    hidden: Annotated[int | None, _option("Channels inside the feed-forward (4 dim; swiglu 8/3 dim).", "Model")] = None,
    steps: Annotated[int | None, _option("Optimiser steps (1000).", "Recipe")] = None,
    batch: Annotated[int | None, _option("Sequences a step (16).", "Recipe")] = None,
    length: Annotated[int | None, _option("Tokens a sequence (256).", "Recipe")] = None,
    accumulate: Annotated[int | None, _option("Micro-batches a step, to save memory (1).", "Recipe")] = None,
    learning_rate: Annotated[
        float | None, _option("Peak of the schedule (0.003).", "Recipe", "--learning-rate", "--lr")
    ] = None,
    warmup: Annotated[int | None, _option("Steps of warm-up (a tenth, at most 100).", "Recipe")] = None,
    floor: Annotated[float | None, _option("Last learning rate as a share of the peak (0.1).", "Recipe")] = None,
    weight_decay: Annotated[float | None, _option("AdamW's, on matrices (0.1).", "Recipe")] = None,
    clip: Annotated[float | None, _option("Largest gradient norm (1).", "Recipe")] = None,
    dtype: Annotated[str | None, _option("float32 or bfloat16 (float32).", "Recipe")] = None,
    seed: Annotated[int | None, _option("Of the weights and of the data order (0).", "Recipe")] = None,
    log_every: Annotated[int | None, _option("Steps between lines of metrics.jsonl (10).", "Recipe")] = None,
    eval_every: Annotated[int | None, _option("Steps between evaluations (100).", "Recipe")] = None,
    eval_windows: Annotated[int | None, _option("Held-out sequences of an evaluation (64).", "Recipe")] = None,
    checkpoint_every: Annotated[int | None, _option("Steps between checkpoints (100).", "Recipe")] = None,
    keep: Annotated[int | None, _option("Checkpoints kept, and the best besides (2).", "Recipe")] = None,
) -> None:
    """Train a language model on text files. Stopped at any moment, the same command continues where it was.

    OUT receives run.json, metrics.jsonl, checkpoints/ and the tokens. Options not given come from --config, else from
    the value in parentheses.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    plan = _read(config) if config else {}
    for name in ("held_out_text", "vocabulary", "held_out"):
        if given.get(name, []) != []:
            plan[name] = given[name]
    if paths := [*(text or ()), *(more or ())]:
        plan["text"] = paths
    if out is None:
        raise InvalidArgument("name the run's folder with --out")
    if not plan.get("text"):
        raise InvalidArgument("name the text to learn from: --text with files, folders or globs")
    with as_typed(train):
        _run(plan, given, out, cache or out / "text")


def _read(path: Path) -> dict[str, Any]:
    """The sections of a configuration file."""
    from mercer.runtime.files import read_json

    plan = read_json(path)
    if not isinstance(plan, dict):
        raise InvalidArgument(f"{path} must hold a JSON object with any of the keys {', '.join(SECTIONS)}")
    if unknown := sorted(plan.keys() - set(SECTIONS)):
        raise InvalidArgument(f"{path} has the unknown key {unknown[0]!r}; known are {', '.join(SECTIONS)}")
    for section, kind in (("model", dict), ("train", dict), ("text", list), ("held_out_text", list)):
        if not isinstance(plan.get(section, kind()), kind):
            raise InvalidArgument(f"{path}: {section} must be a JSON {'object' if kind is dict else 'array'}")
    if not all(isinstance(name, str) for section in ("text", "held_out_text") for name in plan.get(section, ())):
        raise InvalidArgument(f"{path}: text and held_out_text are arrays of strings")
    if not isinstance(plan.get("vocabulary", ""), str):
        raise InvalidArgument(f"{path}: vocabulary must be a JSON string")
    share = plan.get("held_out", 0.05)
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise InvalidArgument(f"{path}: held_out must be a JSON number")
    return plan


def _run(plan: dict[str, Any], given: dict[str, Any], out: Path, cache: Path) -> None:
    import torch

    from mercer.cli.watch import watch_training
    from mercer.core.structure_names import split_structures
    from mercer.models.config import ModelConfig
    from mercer.runtime.device import find_device
    from mercer.training.config import TrainConfig
    from mercer.training.data import Corpus
    from mercer.training.trainer import train as run

    if "threads" in given:
        if given["threads"] < 1:
            raise InvalidArgument(f"--threads is {given['threads']}; at least 1 is needed")
        torch.set_num_threads(given["threads"])
    recipe = TrainConfig(**plan.get("train", {}) | {k: v for k, v in given.items() if k in TrainConfig.model_fields})
    model = plan.get("model", {}) | {k: v for k, v in given.items() if k in ModelConfig.model_fields}
    if "structure" in given:
        structures = split_structures(given["structure"])
        model["structure"] = structures if len(structures) > 1 else structures[0]
    model.setdefault("max_length", max(ModelConfig.model_fields["max_length"].default, recipe.length))
    first = ModelConfig(**{"vocab_size": 256} | model)  # a fault here should not wait until the text is read
    find_device(recipe.device)
    corpus = Corpus.build(
        plan["text"],
        cache,
        vocabulary=plan.get("vocabulary", "bytes"),
        held_out=plan.get("held_out", 0.05),
        held_out_text=plan.get("held_out_text", ()),
        without=[out],
        length=recipe.length,
    )
    for note in (
        () if given["quiet"] else [*corpus.notes, *([] if first.refuses_states is None else [first.refuses_states])]
    ):
        typer.echo(f"Note: {note}.", err=True)
    model_config = ModelConfig(**{"vocab_size": corpus.vocabulary.size} | model)
    with watch_training(given["quiet"]) as progress:
        result = run(
            model_config, recipe, corpus, out, progress, restart=given["restart"], tensorboard=given["tensorboard"]
        )
    _report(result, given["as_json"])


def _report(result: Any, as_json: bool) -> None:
    import json

    from mercer.runtime.words import count

    values = {
        "folder": str(result.folder),
        "steps": result.steps,
        "loss": result.loss,
        "held_out_loss": result.held_out_loss,
        "bits_per_byte": result.bits_per_byte,
        "parameters": result.parameters,
        "seconds": round(result.seconds, 3),
    }
    if as_json:
        typer.echo(json.dumps(values))
        return
    typer.echo(
        f"{result.folder}: {count(result.steps, 'step')}, {result.parameters:,} parameters, {result.seconds:.1f} s; "
        f"held-out {result.held_out_loss:.4f} nats a token, {result.bits_per_byte:.4f} bits a byte"
    )
