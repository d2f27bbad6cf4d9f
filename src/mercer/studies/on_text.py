"""What studies share that train language models on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.runtime.device import find_device
from mercer.studies.progress import StudyProgress
from mercer.studies.records import Corpus as CorpusRecord
from mercer.studies.records.orders import Point
from mercer.studies.report.numbers import decimal
from mercer.training.config import TrainConfig
from mercer.training.data import Corpus, batch, python_library_files
from mercer.training.loop import Progress, TrainResult
from mercer.training.optim import make_optimizer


def read_text(text: Sequence[str | Path], out: Path, length: int) -> tuple[Corpus, str]:
    """The tokens of a study's text, kept in its folder, and what the text is called.

    Args:
        text: files, folders or globs; the Python library's own source if empty.
        out: the study's folder.
        length: of the windows that both sides need.
    """
    corpus = Corpus.build(list(text) or python_library_files(), out / "text", without=[out], length=length)
    return corpus, ", ".join(map(str, text)) or "the source of Python's standard library"


def corpus_record(corpus: Corpus, name: str) -> CorpusRecord:
    """The text in a study's record."""
    info = corpus.info
    return CorpusRecord(
        name=name,
        sha256=info["sha256"],
        train_files=info["train"]["files"],
        heldout_files=info["held_out"]["files"],
        train_tokens=info["train"]["tokens"],
        heldout_tokens=info["held_out"]["tokens"],
    )


def training_step(model: ModelConfig, recipe: dict[str, Any], corpus: Corpus, device: str) -> Callable[[int], None]:
    """A function that does the n-th training step of a new model, for timing; it returns when the device is done."""
    where, config = find_device(device), TrainConfig(**recipe, steps=5, device=device)
    trained = DecoderLM(model).to(where)
    optimizer, _ = make_optimizer(trained, config, where)

    def step(number: int) -> None:
        rows = batch(corpus.train, config.length, config.batch, 0, number).to(where)
        trained.loss(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trained.embedding.weight[0, 0].item()  # waits for the device

    return step


def shown(progress: StudyProgress, done: float, name: str) -> Callable[[Progress], None]:
    """Shows a training's progress.

    Args:
        progress: of the study, whose units are steps.
        done: units of the parts that are finished.
        name: of the part at work.
    """

    def show(at: Progress) -> None:
        for note in at.notes:
            progress.say(f"Note: {note}.")
        if at.phase == "start":
            progress.found_done(at.step)
        words = "" if at.loss is None else f" loss {decimal(at.loss)}"
        held = "" if at.held_out is None else f" held out {decimal(at.held_out)}"
        progress.update(done + at.step, f"{name}: step {at.step}/{at.steps}{words}{held}")

    return show


def curve(result: TrainResult, event: str) -> list[Point]:
    """The losses of a training's events, "train" or "eval", by step."""
    return [Point(step=found["step"], loss=found["loss"]) for found in result.metrics if found["event"] == event]


def tokens_per_second(result: TrainResult) -> float:
    """The middle of a training's speeds."""
    speeds = sorted(found["time"]["tokens_per_second"] for found in result.metrics if found["event"] == "train")
    return speeds[len(speeds) // 2]
