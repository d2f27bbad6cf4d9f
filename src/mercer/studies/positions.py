"""``mercer study positions``: what happens to a model's loss beyond its trained length, for each position scheme."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mercer.errors import NonFinite
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import load_model
from mercer.runtime.device import find_device
from mercer.runtime.words import count
from mercer.studies.calibration import seconds_per_step
from mercer.studies.folder import Budget, StudyFolder, check_budget, slug
from mercer.studies.on_text import corpus_record, curve, read_text, shown, tokens_per_second, training_step
from mercer.studies.orders_summary import ONE_SEED
from mercer.studies.position_arms import parse_position_arms
from mercer.studies.positions_findings import conclude
from mercer.studies.positions_measure import losses, reading
from mercer.studies.positions_summary import INSIDE_MARGIN, MARGIN, Measured, summarize
from mercer.studies.progress import StudyProgress
from mercer.studies.records import PositionsRecord, write_record
from mercer.studies.records.positions import PositionsArm, PositionsMeasurement, PositionsRun
from mercer.studies.report import write_page
from mercer.studies.report.numbers import decimal, duration
from mercer.studies.report.position_marks import position_label as label
from mercer.studies.runner import Study, check_counts
from mercer.training.checkpoint import folders
from mercer.training.config import TrainConfig
from mercer.training.data import windows
from mercer.training.trainer import train

ARMS = (
    "none",
    "sinusoidal",
    "learned",
    "rotary",
    "rotary+linear",
    "rotary+ntk",
    "rotary+dynamic",
    "rotary+yarn",
    "rotary+window",
    "alibi",
    "t5",
)


@dataclass(frozen=True)
class Plan:
    """What a budget buys. ``seconds`` None: the steps are run whatever they take."""

    steps: int
    seeds: int
    seconds: float | None = None


BUDGETS: dict[Budget, Plan] = {
    "quick": Plan(steps=1000, seeds=1, seconds=510),
    "standard": Plan(steps=1000, seeds=3),
    "full": Plan(steps=3000, seeds=5),
}
MODEL = {"dim": 96, "layers": 3, "heads": 3}
TRAINING = {"batch": 16, "length": 128, "learning_rate": 3e-3, "eval_windows": 96, "keep": 1}
EXTENSION = 8
"""The evaluated length over the trained one."""
BUCKETS = 4
"""Buckets of positions in the trained length."""
WINDOWS, BLOCKS = 64, 16
EVALUATIONS = 8


def run(
    budget: str = "quick",
    out: str | Path = "runs/positions-quick",
    *,
    text: Sequence[str | Path] = (),
    positions: Sequence[str] = (),
    seeds: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    device: str = "auto",
    command: str = "mercer study positions",
    quiet: bool = False,
) -> Path:
    """Run the study in ``out``, or continue the one that was begun there. Returns the path of its page.

    Args:
        budget: "quick" (one seed, as many of 1,000 steps as fit), "standard" (3 seeds of 1,000 steps), "full" (5 seeds
            of 3,000 steps).
        out: receives positions.json, its schema, positions.html, the tokens and a folder for each run.
        text: files, folders or globs; the Python library's own source if empty.
        positions: names instead of the budget's, such as "alibi" or "rotary+yarn".
        seeds, steps: instead of the budget's. ``steps`` also skips the measurement that the quick budget begins with.
        learning_rate: peak of the schedule, for all; 0.003 if None.
        device: as in training.
        command: what to type to run it again, for the page.
        quiet: no progress.

    Raises:
        InvalidArgument: an unknown budget or scheme, or a folder begun with other settings.
        Interrupted: stopped by a signal; the same call continues.
    """
    study = _Study(
        check_budget(budget), Path(out), text, positions, seeds, steps, learning_rate, device, command, quiet
    )
    return study.run()


Part = tuple[str | PositionsArm, int]
"""A scheme to train with, or an arm to read with, and a seed."""


class _Study(Study[Part, PositionsRun | PositionsMeasurement]):
    def __init__(
        self,
        budget: Budget,
        out: Path,
        text: Sequence[str | Path],
        positions: Sequence[str],
        seeds: int | None,
        steps: int | None,
        learning_rate: float | None,
        device: str,
        command: str,
        quiet: bool,
    ) -> None:
        super().__init__(budget, out, device, quiet)
        plan = BUDGETS[budget]
        check_counts(seeds, steps, learning_rate)
        self.recipe = TRAINING | ({} if learning_rate is None else {"learning_rate": learning_rate})
        self.trained = TRAINING["length"]
        self.evaluated, self.bucket = EXTENSION * self.trained, self.trained // BUCKETS
        self.arms = parse_position_arms(positions or ARMS, EXTENSION)
        self.schemes = list(dict.fromkeys(arm.position for arm in self.arms))
        self.seeds = list(range(seeds or plan.seeds))
        find_device(device)
        for arm in self.arms:  # a fault here should not wait until the text is read
            reading(self._model(arm.position, 0, vocabulary=256), arm, self.bucket)
        self.corpus, self.corpus_name = read_text(text, out, self.trained + self.evaluated)
        self.notes = self.corpus.notes
        self.rows = windows(self.corpus.held_out, self.trained + self.evaluated, WINDOWS)
        asked = {
            "study": "positions",
            "budget": budget,
            "positions": [arm.name for arm in self.arms],
            "seeds": len(self.seeds),
            "steps": steps,
            "learning_rate": self.recipe["learning_rate"],
            "sha256": self.corpus.info["sha256"],
        }
        self.folder = StudyFolder(out, asked, command)
        evaluation = TRAINING["eval_windows"] / TRAINING["batch"] / 3
        measuring = sum(map(self._reading, self.arms)) / len(self.schemes)
        self.steps = self.settle_steps(
            steps, plan.steps, plan.seconds, lambda: {name: self._seconds_per_step(name) for name in self.schemes},
            runs=len(self.seeds), evaluations=(EVALUATIONS + 2) * evaluation + measuring,
        )  # fmt: skip
        self.training = TrainConfig(
            **self.recipe,
            steps=self.steps,
            device=device,
            eval_every=max(1, -(-self.steps // EVALUATIONS)),
            checkpoint_every=max(1, self.steps // 4),
        )

    def _reading(self, arm: PositionsArm) -> float:
        """What measuring an arm costs, in training steps: a forward pass is about a third of one."""
        read = self.trained * self.evaluated / self.bucket if arm.reading == "restart" else self.evaluated
        return len(self.rows) * read / (TRAINING["batch"] * self.trained) / 3

    def _seconds_per_step(self, position: str) -> float:
        return seconds_per_step(training_step(self._model(position, 0), self.recipe, self.corpus, self.device))

    def _model(self, position: str, seed: int, vocabulary: int | None = None) -> ModelConfig:
        return ModelConfig(
            **MODEL, vocab_size=vocabulary or self.corpus.vocabulary.size, position=position, seed=seed,
            max_length=self.trained,
        )  # fmt: skip

    def parts(self) -> list[Part]:
        return [
            (what, seed)
            for seed in self.seeds
            for scheme in self.schemes
            for what in (scheme, *(arm for arm in self.arms if arm.position == scheme))
        ]

    def work(self, part: Part) -> float:
        return self.steps if isinstance(part[0], str) else self._reading(part[0])

    def opening(self) -> str:
        runs = count(len(self.schemes) * len(self.seeds), "run")
        text = f"{runs} of {count(self.steps, 'step')} and {len(self.arms)} ways to read in {self.out}"
        if self.done:
            return f"Continuing {text}."
        if self.calibration:
            expected = self.steps * sum(self.calibration.values()) * len(self.seeds)
            text += f", about {duration(expected)} of training"
        return text + "."

    def _folder_of(self, position: str, seed: int) -> Path:
        return self.out / "trials" / f"{slug(position)}-seed{seed}"

    def kept_at(self, part: Part) -> tuple[Path, type[PositionsRun | PositionsMeasurement]]:
        what, seed = part
        if isinstance(what, str):
            return self._folder_of(what, seed) / "trial.json", PositionsRun
        return self._folder_of(what.position, seed) / f"losses-{slug(what.name)}.json", PositionsMeasurement

    def measure(self, part: Part, place: str, progress: StudyProgress) -> PositionsRun | PositionsMeasurement | None:
        what, seed = part
        if isinstance(what, str):
            return self._train(what, seed, place, progress)
        if any((run.position, run.seed, run.status) == (what.position, seed, "diverged") for run in self._runs()):
            return None
        progress.update(self.done, f"{place} reading with {label(what.name)}")
        return self._measure(what, seed)

    def line(self, part: Part, result: PositionsRun | PositionsMeasurement) -> str | None:
        if isinstance(result, PositionsMeasurement):
            return None
        begin = f"{label(result.position)}, seed {result.seed}"
        if result.status == "diverged":
            return f"{begin} diverged: {result.reason}"
        return f"{begin}: loss {decimal(result.loss)} in {duration(result.seconds)}"

    def _runs(self) -> list[PositionsRun]:
        return [found for found in self.results if isinstance(found, PositionsRun)]

    def _train(self, position: str, seed: int, place: str, progress: StudyProgress) -> PositionsRun:
        folder, model = self._folder_of(position, seed), self._model(position, seed)
        of_seed = f", seed {seed}" if len(self.seeds) > 1 else ""
        show = shown(progress, self.done, f"{place} {label(position)}{of_seed}")
        try:
            result = train(model, self.training.model_copy(update={"seed": seed}), self.corpus, folder, show)
        except NonFinite as error:
            return PositionsRun(
                position=position, seed=seed, status="diverged", reason=str(error), steps=0, seconds=0.0,
                heldout_curve=[], parameters=DecoderLM(model).parameter_count,
            )  # fmt: skip
        return PositionsRun(
            position=position,
            seed=seed,
            parameters=result.parameters,
            steps=result.steps,
            heldout_curve=curve(result, "eval"),
            loss=result.held_out_loss,
            tokens_per_second=tokens_per_second(result),
            seconds=result.seconds,
        )

    def _measure(self, arm: PositionsArm, seed: int) -> PositionsMeasurement:
        began = time.perf_counter()
        trained = load_model(folders(self._folder_of(arm.position, seed))[-1])
        model = DecoderLM(reading(trained.config, arm, self.bucket))
        model.load_state_dict(trained.state_dict())
        model = model.to(find_device(self.device))
        blocks = min(BLOCKS, len(self.rows))
        found, reason = [], None
        try:
            found = losses(model, self.rows, arm, trained=self.trained, bucket=self.bucket, blocks=blocks)
        except NonFinite as error:
            reason = str(error)
        seconds = round(time.perf_counter() - began, 3)
        return PositionsMeasurement(arm=arm.name, seed=seed, losses=found, reason=reason, seconds=seconds)

    def write(self) -> Path:
        runs = self._runs()
        measurements = [found for found in self.results if isinstance(found, PositionsMeasurement)]
        finished = [run for run in runs if run.status == "finished"]
        wanted = sum(sum(arm.position == run.position for arm in self.arms) for run in finished)
        measured = Measured(self.arms, measurements, BUCKETS)
        summaries = summarize(measured, self.bucket)
        record = PositionsRecord(
            finished=len(runs) == len(self.schemes) * len(self.seeds) and len(measurements) == wanted,
            provenance=self.folder.provenance(self.budget, self.seeds, self.device),
            corpus=corpus_record(self.corpus, self.corpus_name),
            model=self._model(self.schemes[0], 0).model_dump(mode="json", exclude={"position", "seed"}),
            training=self.training.model_dump(mode="json", exclude={"seed", "device"}),
            calibration=self.calibration,
            trained_length=self.trained,
            evaluated_length=self.evaluated,
            bucket=self.bucket,
            windows=len(self.rows),
            margin=MARGIN,
            inside_margin=INSIDE_MARGIN,
            seed_allowance=ONE_SEED,
            arms=self.arms,
            runs=runs,
            measurements=measurements,
            summaries=summaries,
            findings=conclude(measured, summaries, runs, self.trained, self.evaluated),
        )
        return write_page(write_record(record, self.out))
