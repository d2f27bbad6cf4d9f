"""``mercer study orders``: what kernel and normaliser do to the loss of the same language model on the same text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mercer.errors import InvalidArgument, NonFinite
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.runtime.device import find_device
from mercer.runtime.files import read_json, write_json
from mercer.runtime.words import count
from mercer.studies.arms import parse_arms
from mercer.studies.calibration import fitting_steps, seconds_per_step
from mercer.studies.folder import Budget, StudyFolder, check_budget, interruptible, slug
from mercer.studies.orders_summary import MARGIN, ONE_SEED, conclude, summarize
from mercer.studies.progress import StudyProgress
from mercer.studies.records import Corpus as CorpusRecord
from mercer.studies.records import OrdersRecord, write_record
from mercer.studies.records.orders import Arm, OrdersTrial, Point
from mercer.studies.report import write_page
from mercer.studies.report.marks import label
from mercer.studies.report.numbers import decimal, duration
from mercer.training.checkpoint import folders
from mercer.training.config import TrainConfig
from mercer.training.data import Corpus, batch, python_library_files, windows
from mercer.training.loop import Progress, TrainResult
from mercer.training.optim import make_optimizer
from mercer.training.trainer import train

QUICK = ("softmax", "exp-l2", "exp-l2+gain", "taylor1-l2", "taylor2-l2", "taylor3-l2", "taylor4-l2", "taylor2-sum")
ALL = (
    "softmax",
    "exp-l2",
    "exp-l2+gain",
    "exp-rms",
    "exp-rms+gain",
    "elu-sum",
    *(f"taylor{order}-l2" for order in range(1, 7)),
    *(f"taylor{order}-sum" for order in (2, 4, 6)),
)


@dataclass(frozen=True)
class Plan:
    """What a budget buys. ``seconds`` None: the steps are run whatever they take."""

    arms: tuple[str, ...]
    steps: int
    seeds: int
    seconds: float | None = None


BUDGETS: dict[Budget, Plan] = {
    "quick": Plan(QUICK, steps=300, seeds=1, seconds=510),
    "standard": Plan(ALL, steps=300, seeds=3),
    "full": Plan(ALL, steps=1200, seeds=5),
}
MODEL = {"dim": 128, "layers": 4, "heads": 8}
TRAINING = {"batch": 16, "length": 256, "learning_rate": 3e-3, "eval_windows": 96, "keep": 1}
EVALUATIONS = 8


def run(
    budget: str = "quick",
    out: str | Path = "runs/orders-quick",
    *,
    text: Sequence[str | Path] = (),
    attentions: Sequence[str] = (),
    seeds: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    device: str = "auto",
    command: str = "mercer study orders",
    quiet: bool = False,
) -> Path:
    """Run the study in ``out``, or continue the one that was begun there. Returns the path of its page.

    Args:
        budget: "quick" (one seed, a telling subset, as many of 300 steps as fit), "standard" (3 seeds), "full" (5 seeds
            of 1,200 steps).
        out: receives orders.json, its schema, orders.html, the tokens and a folder for each run.
        text: files, folders or globs; the Python library's own source if empty.
        attentions: names instead of the budget's, such as "taylor4-l2" or "exp-l2+gain".
        seeds, steps: instead of the budget's. ``steps`` also skips the measurement that the quick budget begins with.
        learning_rate: peak of the schedule, for all arms; 0.003 if None.
        device: as in training.
        command: what to type to run it again, for the page.
        quiet: no progress.

    Raises:
        InvalidArgument: an unknown budget or attention, or a folder begun with other settings.
        Interrupted: stopped by a signal; the same call continues.
    """
    study = _Study(
        check_budget(budget), Path(out), text, attentions, seeds, steps, learning_rate, device, command, quiet
    )
    return study.run()


class _Study:
    def __init__(
        self,
        budget: Budget,
        out: Path,
        text: Sequence[str | Path],
        attentions: Sequence[str],
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
        self.arms = parse_arms(attentions or plan.arms)
        self.seeds = list(range(seeds or plan.seeds))
        find_device(device)
        for arm in self.arms:
            self._model(arm, 0, vocabulary=256)  # a fault here should not wait until the text is read
        self.corpus = Corpus.build(
            list(text) or python_library_files(), out / "text", without=[out], length=TRAINING["length"]
        )
        self.corpus_name = ", ".join(map(str, text)) or "the source of Python's standard library"
        asked = {
            "study": "orders",
            "budget": budget,
            "attentions": [arm.name for arm in self.arms],
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

    def _fixed_steps(self, asked: int | None) -> int:
        """The number of steps, the same for every arm, decided once for the whole study."""
        if asked is not None:
            return asked
        if self.plan.seconds is None:
            return self.plan.steps
        kept = self.folder.remembered("calibration")
        if kept is None:
            StudyProgress(1, quiet=self.quiet).say("Measuring how long a step takes, to fix one number for all.")
            seconds = {arm.name: self._seconds_per_step(arm) for arm in self.arms}
            # an evaluation is a forward pass over its windows, about a third of as many training sequences
            evaluation = TRAINING["eval_windows"] / TRAINING["batch"] / 3
            steps = fitting_steps(
                seconds,
                runs=len(self.seeds),
                most=self.plan.steps,
                room=self.plan.seconds - self.folder.seconds,
                evaluations=(EVALUATIONS + 2) * evaluation,
            )
            kept = {"steps": steps, "seconds": seconds}
            self.folder.remember("calibration", kept)
        self.calibration = kept["seconds"]
        return kept["steps"]

    def _seconds_per_step(self, arm: Arm) -> float:
        config = TrainConfig(**self.recipe, steps=5, device=self.device)
        device = find_device(self.device)
        model = DecoderLM(self._model(arm, 0)).to(device)
        optimizer, _ = make_optimizer(model, config, device)

        def step(number: int) -> None:
            rows = batch(self.corpus.train, config.length, config.batch, 0, number).to(device)
            model.loss(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.embedding.weight[0, 0].item()  # waits for the device

        return seconds_per_step(step)

    def _model(self, arm: Arm, seed: int, vocabulary: int | None = None) -> ModelConfig:
        gain = {} if arm.gain_init is None else {"gain": "head", "gain_init": arm.gain_init}
        return ModelConfig(
            **MODEL, **gain, vocab_size=vocabulary or self.corpus.vocabulary.size, attention=arm.attention, seed=seed,
            max_length=TRAINING["length"],
        )  # fmt: skip

    def run(self) -> Path:
        trials: list[OrdersTrial] = []
        order = [(arm, seed) for seed in self.seeds for arm in self.arms]
        done = {(arm.name, seed): self._kept(arm, seed) for arm, seed in order}
        before = sum(self.steps for trial in done.values() if trial)
        try:
            with interruptible(self.out), StudyProgress(self.steps * len(order), before, quiet=self.quiet) as progress:
                for note in self.corpus.notes:
                    progress.say(f"Note: {note}.")
                progress.say(self._opening(len(order), before))
                page = self._write(trials)
                for place, (arm, seed) in enumerate(order):
                    trial = done[arm.name, seed]
                    if trial is None:
                        trial = self._trial(arm, seed, f"{place + 1}/{len(order)}", before, progress)
                        before += self.steps
                        final = f"loss {decimal(trial.loss)}" if trial.loss is not None else f"diverged: {trial.reason}"
                        progress.say(f"{label(arm.name)}, seed {seed}: {final} in {duration(trial.seconds)}")
                    trials.append(trial)
                    page = self._write(trials)
        finally:
            self.folder.save_work()
        return page

    def _opening(self, runs: int, before: int) -> str:
        text = f"{count(runs, 'run')} of {count(self.steps, 'step')} in {self.out}"
        if before:
            return f"Continuing {text}: {before // self.steps} finished."
        if self.calibration:
            expected = self.steps * sum(self.calibration.values()) * len(self.seeds)
            text += f", about {duration(expected)} of training"
        return text + "."

    def _folder_of(self, arm: Arm, seed: int) -> Path:
        return self.out / "trials" / f"{slug(arm.name)}-seed{seed}"

    def _kept(self, arm: Arm, seed: int) -> OrdersTrial | None:
        path = self._folder_of(arm, seed) / "trial.json"
        return OrdersTrial.model_validate(read_json(path)) if path.exists() else None

    def _trial(self, arm: Arm, seed: int, place: str, before: int, progress: StudyProgress) -> OrdersTrial:
        folder = self._folder_of(arm, seed)
        config = self.training.model_copy(update={"seed": seed})
        model = self._model(arm, seed)

        def show(at: Progress) -> None:
            for note in at.notes:
                progress.say(f"Note: {note}.")
            if at.phase == "start":
                progress.found_done(at.step)
            words = "" if at.loss is None else f" loss {decimal(at.loss)}"
            held = "" if at.held_out is None else f" held out {decimal(at.held_out)}"
            of_seed = f", seed {seed}" if len(self.seeds) > 1 else ""
            text = f"{place} {label(arm.name)}{of_seed}: step {at.step}/{at.steps}{words}{held}"
            progress.update(before + at.step, text)

        try:
            result = train(model, config, self.corpus, folder, show)
        except NonFinite as error:
            trial = OrdersTrial(
                arm=arm.name, seed=seed, status="diverged", reason=str(error), steps=0, seconds=0.0, train_curve=[],
                heldout_curve=[], parameters=DecoderLM(model).parameter_count,
            )  # fmt: skip
        else:
            trial = self._finished(arm, seed, result)
        write_json(folder / "trial.json", trial.model_dump(mode="json"))
        return trial

    def _finished(self, arm: Arm, seed: int, result: TrainResult) -> OrdersTrial:
        trained = [event for event in result.metrics if event["event"] == "train"]
        measured = [event for event in result.metrics if event["event"] == "eval"]
        speeds = sorted(event["time"]["tokens_per_second"] for event in trained)
        return OrdersTrial(
            arm=arm.name,
            seed=seed,
            parameters=result.parameters,
            steps=result.steps,
            train_curve=[Point(step=event["step"], loss=event["loss"]) for event in trained],
            heldout_curve=[Point(step=event["step"], loss=event["loss"]) for event in measured],
            heldout_blocks=self._blocks(result.folder),
            loss=result.held_out_loss,
            bits_per_byte=result.bits_per_byte,
            tokens_per_second=speeds[len(speeds) // 2],
            seconds=result.seconds,
        )

    @torch.no_grad()
    def _blocks(self, folder: Path) -> list[float]:
        """The final loss of each held-out window by itself; their mean is the held-out loss."""
        from mercer.models.io import load_model

        model = load_model(folders(folder)[-1]).eval()
        rows = windows(self.corpus.held_out, self.training.length, self.training.eval_windows)
        return [round(model.loss(row[None, :-1], row[None, 1:]).item(), 6) for row in rows]

    def _write(self, trials: list[OrdersTrial]) -> Path:
        info = self.corpus.info
        shown = {"seed", "device"}
        record = OrdersRecord(
            finished=len(trials) == len(self.arms) * len(self.seeds),
            provenance=self.folder.provenance(self.budget, self.seeds, self.device),
            corpus=CorpusRecord(
                name=self.corpus_name,
                sha256=info["sha256"],
                train_files=info["train"]["files"],
                heldout_files=info["held_out"]["files"],
                train_tokens=info["train"]["tokens"],
                heldout_tokens=info["held_out"]["tokens"],
            ),
            model=self._model(self.arms[0], 0).model_dump(
                mode="json", exclude={"attention", "gain", "gain_init", "seed"}
            ),
            training=self.training.model_dump(mode="json", exclude=shown),
            calibration=self.calibration,
            equivalence_margin=MARGIN,
            seed_allowance=ONE_SEED,
            arms=self.arms,
            trials=trials,
            summaries=summarize(trials, self.arms),
            findings=conclude(trials, self.arms),
        )
        return write_page(write_record(record, self.out))
