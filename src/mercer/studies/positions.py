"""``mercer study positions``: what happens to a model's loss beyond its trained length, for each position scheme."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mercer.errors import InvalidArgument, NonFinite
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import load_model
from mercer.runtime.device import find_device
from mercer.runtime.files import read_json, write_json
from mercer.runtime.words import count
from mercer.studies.calibration import fitting_steps, seconds_per_step
from mercer.studies.folder import Budget, StudyFolder, check_budget, interruptible, slug
from mercer.studies.orders_summary import ONE_SEED
from mercer.studies.position_arms import parse_position_arms
from mercer.studies.positions_findings import conclude
from mercer.studies.positions_measure import losses, reading
from mercer.studies.positions_summary import INSIDE_MARGIN, MARGIN, Measured, summarize
from mercer.studies.progress import StudyProgress
from mercer.studies.records import Corpus as CorpusRecord
from mercer.studies.records import PositionsRecord, write_record
from mercer.studies.records.orders import Point
from mercer.studies.records.positions import PositionsArm, PositionsMeasurement, PositionsRun
from mercer.studies.report import write_page
from mercer.studies.report.numbers import decimal, duration
from mercer.studies.report.position_marks import position_label as label
from mercer.training.checkpoint import folders
from mercer.training.config import TrainConfig
from mercer.training.data import Corpus, batch, python_library_files, windows
from mercer.training.loop import Progress, TrainResult
from mercer.training.optim import make_optimizer
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


class _Study:
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
        plan = BUDGETS[budget]
        for name, value in (("seeds", seeds), ("steps", steps)):
            if value is not None and value < 1:
                raise InvalidArgument(f"{name} is {value}; it must be at least 1.")
        if learning_rate is not None and not 0 < learning_rate < math.inf:
            raise InvalidArgument(f"learning_rate is {learning_rate}; it must be above 0, such as 0.003.")
        self.recipe = TRAINING | ({} if learning_rate is None else {"learning_rate": learning_rate})
        self.budget, self.out, self.plan, self.device, self.quiet = budget, out, plan, device, quiet
        self.trained = TRAINING["length"]
        self.evaluated, self.bucket = EXTENSION * self.trained, self.trained // BUCKETS
        self.arms = parse_position_arms(positions or ARMS, EXTENSION)
        self.schemes = list(dict.fromkeys(arm.position for arm in self.arms))
        self.seeds = list(range(seeds or plan.seeds))
        find_device(device)
        for arm in self.arms:  # a fault here should not wait until the text is read
            reading(self._model(arm.position, 0, vocabulary=256), arm, self.bucket)
        self.corpus = Corpus.build(
            list(text) or python_library_files(), out / "text", without=[out], length=self.trained + self.evaluated
        )
        self.corpus_name = ", ".join(map(str, text)) or "the source of Python's standard library"
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
        self.calibration: dict[str, float] = {}
        self.steps = self._fixed_steps(steps)
        self.training = TrainConfig(
            **self.recipe,
            steps=self.steps,
            device=device,
            eval_every=max(1, -(-self.steps // EVALUATIONS)),
            checkpoint_every=max(1, self.steps // 4),
        )

    def _work(self, arm: PositionsArm) -> float:
        """What measuring an arm costs, in training steps: a forward pass is about a third of one."""
        read = self.trained * self.evaluated / self.bucket if arm.reading == "restart" else self.evaluated
        return len(self.rows) * read / (TRAINING["batch"] * self.trained) / 3

    def _fixed_steps(self, asked: int | None) -> int:
        """The number of steps, the same for every scheme, decided once for the whole study."""
        if asked is not None:
            return asked
        if self.plan.seconds is None:
            return self.plan.steps
        kept = self.folder.remembered("calibration")
        if kept is None:
            StudyProgress(1, quiet=self.quiet).say("Measuring how long a step takes, to fix one number for all.")
            seconds = {position: self._seconds_per_step(position) for position in self.schemes}
            evaluation = TRAINING["eval_windows"] / TRAINING["batch"] / 3
            measuring = sum(map(self._work, self.arms)) / len(self.schemes)
            steps = fitting_steps(
                seconds,
                runs=len(self.seeds),
                most=self.plan.steps,
                room=self.plan.seconds - self.folder.seconds,
                evaluations=(EVALUATIONS + 2) * evaluation + measuring,
            )
            kept = {"steps": steps, "seconds": seconds}
            self.folder.remember("calibration", kept)
        self.calibration = kept["seconds"]
        return kept["steps"]

    def _seconds_per_step(self, position: str) -> float:
        config = TrainConfig(**self.recipe, steps=5, device=self.device)
        device = find_device(self.device)
        model = DecoderLM(self._model(position, 0)).to(device)
        optimizer, _ = make_optimizer(model, config, device)

        def step(number: int) -> None:
            rows = batch(self.corpus.train, config.length, config.batch, 0, number).to(device)
            model.loss(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.embedding.weight[0, 0].item()  # waits for the device

        return seconds_per_step(step)

    def _model(self, position: str, seed: int, vocabulary: int | None = None) -> ModelConfig:
        return ModelConfig(
            **MODEL, vocab_size=vocabulary or self.corpus.vocabulary.size, position=position, seed=seed,
            max_length=self.trained,
        )  # fmt: skip

    def run(self) -> Path:
        runs: list[PositionsRun] = []
        measured: list[PositionsMeasurement] = []
        order = [(position, seed) for seed in self.seeds for position in self.schemes]
        arms = {position: [arm for arm in self.arms if arm.position == position] for position in self.schemes}
        total = self.steps * len(order) + len(self.seeds) * sum(map(self._work, self.arms))
        done = sum(self.steps for position, seed in order if self._kept_run(position, seed)) + sum(
            self._work(arm) for arm in self.arms for seed in self.seeds if self._kept(arm, seed)
        )
        try:
            with interruptible(self.out), StudyProgress(total, done, quiet=self.quiet) as progress:
                for note in self.corpus.notes:
                    progress.say(f"Note: {note}.")
                progress.say(self._opening(len(order), done > 0))
                page = self._write(runs, measured)
                for place, (position, seed) in enumerate(order):
                    trained = self._kept_run(position, seed)
                    if trained is None:
                        trained = self._train(position, seed, f"{place + 1}/{len(order)}", done, progress)
                        done += self.steps
                    runs.append(trained)
                    for arm in arms[position] if trained.status == "finished" else []:
                        found = self._kept(arm, seed)
                        if found is None:
                            progress.update(done, f"{place + 1}/{len(order)} reading with {label(arm.name)}")
                            found = self._measure(arm, seed)
                            done += self._work(arm)
                        measured.append(found)
                    page = self._write(runs, measured)
        finally:
            self.folder.save_work()
        return page

    def _opening(self, runs: int, continuing: bool) -> str:
        text = f"{count(runs, 'run')} of {count(self.steps, 'step')} and {len(self.arms)} ways to read in {self.out}"
        if continuing:
            return f"Continuing {text}."
        if self.calibration:
            expected = self.steps * sum(self.calibration.values()) * len(self.seeds)
            text += f", about {duration(expected)} of training"
        return text + "."

    def _folder_of(self, position: str, seed: int) -> Path:
        return self.out / "trials" / f"{slug(position)}-seed{seed}"

    def _kept_run(self, position: str, seed: int) -> PositionsRun | None:
        path = self._folder_of(position, seed) / "trial.json"
        return PositionsRun.model_validate(read_json(path)) if path.exists() else None

    def _measured_at(self, arm: PositionsArm, seed: int) -> Path:
        return self._folder_of(arm.position, seed) / f"losses-{slug(arm.name)}.json"

    def _kept(self, arm: PositionsArm, seed: int) -> PositionsMeasurement | None:
        path = self._measured_at(arm, seed)
        return PositionsMeasurement.model_validate(read_json(path)) if path.exists() else None

    def _train(self, position: str, seed: int, place: str, before: float, progress: StudyProgress) -> PositionsRun:
        folder = self._folder_of(position, seed)
        config = self.training.model_copy(update={"seed": seed})
        model = self._model(position, seed)

        def show(at: Progress) -> None:
            for note in at.notes:
                progress.say(f"Note: {note}.")
            if at.phase == "start":
                progress.found_done(at.step)
            words = "" if at.loss is None else f" loss {decimal(at.loss)}"
            held = "" if at.held_out is None else f" held out {decimal(at.held_out)}"
            of_seed = f", seed {seed}" if len(self.seeds) > 1 else ""
            text = f"{place} {label(position)}{of_seed}: step {at.step}/{at.steps}{words}{held}"
            progress.update(before + at.step, text)

        try:
            result = train(model, config, self.corpus, folder, show)
        except NonFinite as error:
            trained = PositionsRun(
                position=position, seed=seed, status="diverged", reason=str(error), steps=0, seconds=0.0,
                heldout_curve=[], parameters=DecoderLM(model).parameter_count,
            )  # fmt: skip
            progress.say(f"{label(position)}, seed {seed} diverged: {error}")
        else:
            trained = _finished(position, seed, result)
            loss, seconds = decimal(trained.loss), duration(trained.seconds)
            progress.say(f"{label(position)}, seed {seed}: loss {loss} in {seconds}")
        write_json(folder / "trial.json", trained.model_dump(mode="json"))
        return trained

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
        measured = PositionsMeasurement(arm=arm.name, seed=seed, losses=found, reason=reason, seconds=seconds)
        write_json(self._measured_at(arm, seed), measured.model_dump(mode="json"))
        return measured

    def _write(self, runs: list[PositionsRun], measurements: list[PositionsMeasurement]) -> Path:
        info = self.corpus.info
        finished = [run for run in runs if run.status == "finished"]
        wanted = sum(sum(arm.position == run.position for arm in self.arms) for run in finished)
        measured = Measured(self.arms, measurements, BUCKETS)
        summaries = summarize(measured, self.bucket)
        record = PositionsRecord(
            finished=len(runs) == len(self.schemes) * len(self.seeds) and len(measurements) == wanted,
            provenance=self.folder.provenance(self.budget, self.seeds, self.device),
            corpus=CorpusRecord(
                name=self.corpus_name,
                sha256=info["sha256"],
                train_files=info["train"]["files"],
                heldout_files=info["held_out"]["files"],
                train_tokens=info["train"]["tokens"],
                heldout_tokens=info["held_out"]["tokens"],
            ),
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


def _finished(position: str, seed: int, result: TrainResult) -> PositionsRun:
    trained = [event for event in result.metrics if event["event"] == "train"]
    measured = [event for event in result.metrics if event["event"] == "eval"]
    speeds = sorted(event["time"]["tokens_per_second"] for event in trained)
    return PositionsRun(
        position=position,
        seed=seed,
        parameters=result.parameters,
        steps=result.steps,
        heldout_curve=[Point(step=event["step"], loss=event["loss"]) for event in measured],
        loss=result.held_out_loss,
        tokens_per_second=speeds[len(speeds) // 2],
        seconds=result.seconds,
    )
