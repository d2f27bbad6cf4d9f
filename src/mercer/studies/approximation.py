"""``mercer study approximation``: how far each kernel is from softmax attention, and what a wanted error needs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import WEIGHTS, load_model
from mercer.models.vocabulary import load_vocabulary
from mercer.runtime.device import find_device
from mercer.runtime.words import count
from mercer.studies.approximation_arms import parse_arms
from mercer.studies.approximation_inputs import (
    Inputs,
    check_layers,
    model_inputs,
    random_inputs,
    text_windows,
)
from mercer.studies.approximation_measure import Cell, Sizes, measure
from mercer.studies.approximation_summary import conclude
from mercer.studies.calibration import fitting_steps, seconds_per_step
from mercer.studies.folder import Budget, StudyFolder, check_budget, interruptible
from mercer.studies.on_text import corpus_record, read_text, training_step
from mercer.studies.progress import StudyProgress
from mercer.studies.records import ApproximationRecord, write_record
from mercer.studies.report import write_page
from mercer.studies.report.approximation import inputs_label
from mercer.studies.report.marks import label
from mercer.studies.report.numbers import decimal
from mercer.studies.runner import check_counts
from mercer.training.checkpoint import folders
from mercer.training.config import TrainConfig
from mercer.training.loop import Progress
from mercer.training.trainer import train

MODEL = {"dim": 128, "layers": 4, "heads": 8}
TRAINING = {"batch": 16, "length": 256, "learning_rate": 3e-3, "eval_windows": 32, "keep": 1}
TARGET = 0.1
TRAINING_SHARE = 4
"""Training counts like so many inputs in the progress."""


@dataclass(frozen=True)
class Plan:
    """What a budget measures. ``seconds``: the training steps that fit, at most ``steps``; None: all of them."""

    attentions: tuple[str, ...]
    dims: tuple[int, ...]
    spreads: tuple[float, ...]
    sizes: Sizes
    steps: int
    seconds: float | None = None


def _names(counts: Sequence[int]) -> tuple[str, ...]:
    taylor = [f"taylor{order}{'-signed' if order % 2 else ''}-sum" for order in range(1, 9)]
    kinds = ("favor{}-sum", "favor{}-sum+independent", "favor{}-sum+sqrt", "hyperbolic{}-sum", "trig{}-signed-sum")
    drawn = [kind.format(number) for kind in kinds for number in counts]
    return (*taylor, *drawn, "elu-sum", "relu-sum", "dpfp1-sum", "expfeatures-sum", "exp@32:taylor2-sum")


BUDGETS: dict[Budget, Plan] = {
    "quick": Plan(
        _names([2**p for p in range(4, 11)]), (16, 64), (0.1, 0.5, 1.0, 2.0, 4.0),
        Sizes(length=128, heads=4, rows=128, draws=8, windows=2), steps=400, seconds=90,
    ),
    "standard": Plan(
        _names([2**p for p in range(4, 13)]), (16, 32, 64), (0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        Sizes(length=1024, heads=4, rows=128, draws=16, windows=4), steps=1500,
    ),
    "full": Plan(
        _names([2**p for p in range(4, 14)]), (16, 32, 64, 128), (0.1, 0.25, 0.5, 1.0, 2.0, 4.0),
        Sizes(length=4096, heads=8, rows=256, draws=32, windows=8), steps=6000,
    ),
}  # fmt: skip


def run(
    budget: str = "quick",
    out: str | Path = "runs/approximation-quick",
    *,
    model: str | Path | None = None,
    text: Sequence[str | Path] = (),
    attentions: Sequence[str] = (),
    steps: int | None = None,
    target: float = TARGET,
    device: str = "auto",
    command: str = "mercer study approximation",
    quiet: bool = False,
) -> Path:
    """Run the study in ``out``, or continue the one that was begun there. Returns the path of its page.

    Args:
        budget: "quick" (128 random tokens, up to 1,024 features, 8 draws), "standard" (1,024 tokens, 4,096 features),
            "full" (4,096 tokens, 8,192 features).
        out: receives approximation.json, its schema, approximation.html, the tokens and the model trained here.
        model: the folder of a saved :class:`~mercer.models.decoder.DecoderLM` to take queries, keys and values from; by
            default a small one with softmax is trained here first.
        text: files, folders or globs to train on and to take held-out windows from; the Python library's own source if
            empty.
        attentions: names instead of the budget's; random features may end in ``+independent`` or ``+sqrt``.
        steps: training steps instead of the budget's; the quick budget otherwise measures how many fit.
        target: relative error that orders and numbers of features are sought for.
        device, command, quiet: as in ``mercer.studies.orders.run``.

    Raises:
        InvalidArgument: an unknown budget or attention, a target out of range, a folder without a model, or one begun
            with other settings.
        Interrupted: stopped by a signal; the same call continues.
    """
    return _Study(check_budget(budget), Path(out), model, text, attentions, steps, target, device, command, quiet).run()


class _Study:
    def __init__(
        self,
        budget: Budget,
        out: Path,
        model: str | Path | None,
        text: Sequence[str | Path],
        attentions: Sequence[str],
        steps: int | None,
        target: float,
        device: str,
        command: str,
        quiet: bool,
    ) -> None:
        check_counts(steps=steps)
        if not 0 < target < 1:
            raise InvalidArgument(f"target is {target}; it must be between 0 and 1, such as 0.1.")
        if model is not None and steps is not None:
            raise InvalidArgument("steps is for the model that is trained here; a given model is taken as it is.")
        self.budget, self.out, self.device, self.quiet = budget, out, device, quiet
        self.plan, self.target = BUDGETS[budget], target
        self.where = find_device(device)
        self.arms = parse_arms(attentions or self.plan.attentions)
        self.given = None if model is None else load_model(model)
        if self.given is not None:
            check_layers(self.given, self.arms)  # a fault here should not wait until the text is read
        self.source = "trained here" if model is None else Path(model).name
        self.length = (
            TRAINING["length"] if self.given is None else min(TRAINING["length"], self.given.config.max_length)
        )
        self.corpus, self.corpus_name = read_text(text, out, self.length)
        self.vocabulary = self.corpus.vocabulary
        if self.given is not None:
            self.vocabulary = load_vocabulary(Path(str(model)), self.given.config.vocab_size)
        weights = None if model is None else hashlib.sha256((Path(model) / WEIGHTS).read_bytes()).hexdigest()
        asked = {
            "study": "approximation",
            "budget": budget,
            "attentions": [arm.record.name for arm in self.arms],
            "model": weights,
            "steps": steps,
            "target": target,
            "device": device,
            "sha256": self.corpus.info["sha256"],
        }
        self.folder = StudyFolder(out, asked, command)
        self.training: TrainConfig | None = None
        if self.given is None:
            fixed = self._fixed_steps(steps)
            self.training = TrainConfig(
                **TRAINING, steps=fixed, device=device, eval_every=fixed, checkpoint_every=max(1, fixed // 4)
            )
        self.loss: float | None = None

    def _config(self) -> ModelConfig:
        if self.given is not None:
            return self.given.config
        return ModelConfig(**MODEL, vocab_size=self.corpus.vocabulary.size, max_length=TRAINING["length"])

    def _fixed_steps(self, asked: int | None) -> int:
        """The number of training steps, decided once for the whole study."""
        if asked is not None or self.plan.seconds is None:
            return asked or self.plan.steps
        kept = self.folder.remembered("calibration")
        if kept is None:
            StudyProgress(1, quiet=self.quiet).say("Measuring how long a training step takes, to fix their number.")
            seconds = self._seconds_per_step()
            steps = fitting_steps(
                {"softmax": seconds}, runs=1, most=self.plan.steps, room=self.plan.seconds, evaluations=4
            )
            kept = {"steps": steps, "seconds": {"softmax": seconds}}
            self.folder.remember("calibration", kept)
        return kept["steps"]

    def _seconds_per_step(self) -> float:
        return seconds_per_step(training_step(self._config(), TRAINING, self.corpus, self.device))

    def run(self) -> Path:
        sizes, cells = self.plan.sizes, list[Cell]()
        random = [
            random_inputs(dim, spread, sizes.length, sizes.heads, seed=0)
            for dim in self.plan.dims
            for spread in self.plan.spreads
        ]
        layers = self._config().layers
        share = 0 if self.training is None else TRAINING_SHARE
        total = len(random) + layers + share
        try:
            with interruptible(self.out), StudyProgress(total, quiet=self.quiet) as progress:
                for note in self.corpus.notes:
                    progress.say(f"Note: {note}.")
                progress.say(
                    f"{count(len(self.arms), 'attention')} on {count(len(random), 'random input')} and "
                    f"{count(layers, 'layer')} of a model, in {self.out}."
                )
                page = self._write(cells, total - share)
                for inputs in random:
                    page = self._add(cells, inputs, 0, total - share, progress)
                model = self._model(len(cells), progress).to(self.where).eval()
                tokens = text_windows(self.corpus.held_out, self.vocabulary, self.length, sizes.windows)
                for inputs in model_inputs(model, tokens.to(self.where)):
                    page = self._add(cells, inputs, share, total - share, progress)
        finally:
            self.folder.save_work()
        return page

    def _add(self, cells: list[Cell], inputs: Inputs, before: int, total: int, progress: StudyProgress) -> Path:
        """One cell more, measured or as it was kept by a former call; returns the page with it."""
        done = before + len(cells)
        kept = self.folder.remembered(f"points-{inputs.name}")
        if kept is None:

            def show(place: int, name: str) -> None:
                progress.update(done + place / len(self.arms), f"{inputs_label(inputs.name)}: {label(name)}")

            cell = measure(inputs, self.arms, self.plan.sizes, self.target, self.where, show)
            self.folder.remember(f"points-{inputs.name}", cell.model_dump(mode="json"))
        else:
            cell = Cell.model_validate(kept)
            progress.found_done(1)
        cells.append(cell)
        progress.update(done + 1, inputs_label(inputs.name))
        return self._write(cells, total)

    def _model(self, done: int, progress: StudyProgress) -> DecoderLM:
        if self.given is not None:
            return self.given
        assert self.training is not None
        folder = self.out / "trials" / "model"

        def show(at: Progress) -> None:
            for note in at.notes:
                progress.say(f"Note: {note}.")
            words = "" if at.loss is None else f" loss {decimal(at.loss)}"
            progress.update(done + TRAINING_SHARE * at.step / at.steps, f"training: step {at.step}/{at.steps}{words}")

        result = train(self._config(), self.training, self.corpus, folder, show)
        self.loss = result.held_out_loss
        return load_model(folders(folder)[-1])

    def _write(self, cells: Sequence[Cell], wanted: int) -> Path:
        training = dict[str, Any]()
        if self.training is not None:
            training = self.training.model_dump(mode="json", exclude={"seed", "device"})
        arms, inputs = [arm.record for arm in self.arms], [cell.inputs for cell in cells]
        points = [point for cell in cells for point in cell.points]
        needs = [need for cell in cells for need in cell.needs]
        record = ApproximationRecord(
            finished=len(cells) == wanted,
            provenance=self.folder.provenance(self.budget, [0], self.device),
            corpus=corpus_record(self.corpus, self.corpus_name),
            model=self._config().model_dump(mode="json"),
            training=training,
            model_source=self.source,
            heldout_loss=self.loss,
            target=self.target,
            draws=self.plan.sizes.draws,
            arms=arms,
            inputs=inputs,
            points=points,
            needs=needs,
            findings=conclude(
                arms, inputs, points, needs, self.target, None if self.training is None else self.training.steps
            ),
        )
        return write_page(write_record(record, self.out))
