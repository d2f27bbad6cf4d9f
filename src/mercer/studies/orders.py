"""``mercer study orders``: what kernel and normaliser do to the loss of the same language model on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mercer.errors import NonFinite
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.layer_names import expand
from mercer.runtime.device import find_device
from mercer.runtime.words import count
from mercer.studies.arms import parse_arms
from mercer.studies.calibration import seconds_per_step
from mercer.studies.folder import Budget, StudyFolder, check_budget, slug
from mercer.studies.on_text import corpus_record, curve, read_text, shown, tokens_per_second, training_step
from mercer.studies.orders_summary import MARGIN, ONE_SEED, conclude, reference, summarize
from mercer.studies.progress import StudyProgress
from mercer.studies.records import OrdersRecord, write_record
from mercer.studies.records.orders import Arm, OrdersTrial
from mercer.studies.report import write_page
from mercer.studies.report.marks import label
from mercer.studies.report.numbers import decimal, duration
from mercer.studies.runner import Study, check_counts
from mercer.training.checkpoint import folders
from mercer.training.config import TrainConfig
from mercer.training.data import windows
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
    layers: int | None = None,
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
        attentions: names instead of the budget's, such as "taylor4-l2" or "exp-l2+gain", a mixer such as "mamba", or a
            pattern over the layers such as "3*mamba,softmax". Each is compared with softmax, or with the first where
            softmax is none of them.
        layers: of each model, instead of 4.
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
        check_budget(budget), Path(out), text, attentions, layers, seeds, steps, learning_rate, device, command, quiet
    )
    return study.run()


class _Study(Study[tuple[Arm, int], OrdersTrial]):
    def __init__(
        self,
        budget: Budget,
        out: Path,
        text: Sequence[str | Path],
        attentions: Sequence[str],
        layers: int | None,
        seeds: int | None,
        steps: int | None,
        learning_rate: float | None,
        device: str,
        command: str,
        quiet: bool,
    ) -> None:
        super().__init__(budget, out, device, quiet)
        plan = BUDGETS[budget]
        check_counts(seeds, steps, learning_rate, layers)
        self.layers = layers or MODEL["layers"]
        self.recipe = TRAINING | ({} if learning_rate is None else {"learning_rate": learning_rate})
        self.arms = parse_arms(attentions or plan.arms, self.layers)
        self.seeds = list(range(seeds or plan.seeds))
        find_device(device)
        for arm in self.arms:
            self._model(arm, 0, vocabulary=256)  # a fault here should not wait until the text is read
        self.corpus, self.corpus_name = read_text(text, out, TRAINING["length"])
        self.notes = self.corpus.notes
        asked = {
            "study": "orders",
            "budget": budget,
            "attentions": [arm.name for arm in self.arms],
            "seeds": len(self.seeds),
            "steps": steps,
            "learning_rate": self.recipe["learning_rate"],
            "sha256": self.corpus.info["sha256"],
        } | ({} if layers is None else {"layers": layers})
        self.folder = StudyFolder(out, asked, command)
        # an evaluation is a forward pass over its windows, about a third of as many training sequences
        evaluation = TRAINING["eval_windows"] / TRAINING["batch"] / 3
        self.steps = self.settle_steps(
            steps, plan.steps, plan.seconds, lambda: {arm.name: self._seconds_per_step(arm) for arm in self.arms},
            runs=len(self.seeds), evaluations=(EVALUATIONS + 2) * evaluation,
        )  # fmt: skip
        self.training = TrainConfig(
            **self.recipe,
            steps=self.steps,
            device=device,
            eval_every=max(1, -(-self.steps // EVALUATIONS)),
            checkpoint_every=max(1, self.steps // 4),
        )

    def _seconds_per_step(self, arm: Arm) -> float:
        return seconds_per_step(training_step(self._model(arm, 0), self.recipe, self.corpus, self.device))

    def _model(self, arm: Arm, seed: int, vocabulary: int | None = None) -> ModelConfig:
        gain = {} if arm.gain_init is None else {"gain": "head", "gain_init": arm.gain_init}
        names = expand(arm.attention)
        return ModelConfig(
            **MODEL | gain | {"layers": self.layers}, vocab_size=vocabulary or self.corpus.vocabulary.size, seed=seed,
            attention=names[0] if len(names) == 1 else names, max_length=TRAINING["length"],
        )  # fmt: skip

    def parts(self) -> list[tuple[Arm, int]]:
        return [(arm, seed) for seed in self.seeds for arm in self.arms]

    def work(self, part: tuple[Arm, int]) -> float:
        return self.steps

    def opening(self) -> str:
        text = f"{count(len(self.parts()), 'run')} of {count(self.steps, 'step')} in {self.out}"
        if self.done:
            return f"Continuing {text}: {self.done // self.steps:.0f} finished."
        if self.calibration:
            expected = self.steps * sum(self.calibration.values()) * len(self.seeds)
            text += f", about {duration(expected)} of training"
        return text + "."

    def _folder_of(self, arm: Arm, seed: int) -> Path:
        return self.out / "trials" / f"{slug(arm.name)}-seed{seed}"

    def kept_at(self, part: tuple[Arm, int]) -> tuple[Path, type[OrdersTrial]]:
        return self._folder_of(*part) / "trial.json", OrdersTrial

    def measure(self, part: tuple[Arm, int], place: str, progress: StudyProgress) -> OrdersTrial:
        return self._trial(*part, place, progress)

    def line(self, part: tuple[Arm, int], result: OrdersTrial) -> str:
        final = f"loss {decimal(result.loss)}" if result.loss is not None else f"diverged: {result.reason}"
        return f"{label(result.arm)}, seed {result.seed}: {final} in {duration(result.seconds)}"

    def _trial(self, arm: Arm, seed: int, place: str, progress: StudyProgress) -> OrdersTrial:
        folder, model = self._folder_of(arm, seed), self._model(arm, seed)
        of_seed = f", seed {seed}" if len(self.seeds) > 1 else ""
        show = shown(progress, self.done, f"{place} {label(arm.name)}{of_seed}")
        try:
            result = train(model, self.training.model_copy(update={"seed": seed}), self.corpus, folder, show)
        except NonFinite as error:
            return OrdersTrial(
                arm=arm.name, seed=seed, status="diverged", reason=str(error), steps=0, seconds=0.0, train_curve=[],
                heldout_curve=[], parameters=DecoderLM(model).parameter_count,
            )  # fmt: skip
        return OrdersTrial(
            arm=arm.name,
            seed=seed,
            parameters=result.parameters,
            steps=result.steps,
            train_curve=curve(result, "train"),
            heldout_curve=curve(result, "eval"),
            heldout_blocks=self._blocks(result.folder),
            loss=result.held_out_loss,
            bits_per_byte=result.bits_per_byte,
            tokens_per_second=tokens_per_second(result),
            seconds=result.seconds,
        )

    @torch.no_grad()
    def _blocks(self, folder: Path) -> list[float]:
        """The final loss of each held-out window by itself; their mean is the held-out loss."""
        from mercer.models.io import load_model

        model = load_model(folders(folder)[-1]).eval()
        rows = windows(self.corpus.held_out, self.training.length, self.training.eval_windows)
        return [round(model.loss(row[None, :-1], row[None, 1:]).item(), 6) for row in rows]

    def write(self) -> Path:
        trials, shown_apart = self.results, {"seed", "device"}
        record = OrdersRecord(
            finished=len(trials) == len(self.parts()),
            provenance=self.folder.provenance(self.budget, self.seeds, self.device),
            corpus=corpus_record(self.corpus, self.corpus_name),
            model=self._model(self.arms[0], 0).model_dump(
                mode="json", exclude={"attention", "gain", "gain_init", "seed"}
            ),
            training=self.training.model_dump(mode="json", exclude=shown_apart),
            calibration=self.calibration,
            equivalence_margin=MARGIN,
            seed_allowance=ONE_SEED,
            reference=reference(self.arms),
            arms=self.arms,
            trials=trials,
            summaries=summarize(trials, self.arms),
            findings=conclude(trials, self.arms),
        )
        return write_page(write_record(record, self.out))
