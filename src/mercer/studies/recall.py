"""``mercer study recall``: how many key-value pairs an attention recalls, and what the size of its state predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mercer.errors import NonFinite
from mercer.mixers.names import is_mixer
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.layer_names import expand
from mercer.runtime.device import find_device
from mercer.runtime.words import count
from mercer.studies.calibration import seconds_per_step
from mercer.studies.folder import Budget, StudyFolder, check_budget, slug
from mercer.studies.layers import parse_pattern
from mercer.studies.mqar import Recall
from mercer.studies.progress import StudyProgress
from mercer.studies.recall_summary import capacities, conclude, summarize
from mercer.studies.recall_trial import RecallRun, Setting
from mercer.studies.records import RecallRecord, write_record
from mercer.studies.records.recall import RecallTask, RecallTrial
from mercer.studies.report import write_page
from mercer.studies.report.marks import label
from mercer.studies.report.numbers import duration
from mercer.studies.runner import Study, check_counts
from mercer.training.config import TrainConfig

LAYERS = 2
MODEL = {"position": "alibi", "tie_embeddings": False, "init_std": 0.125}
"""ALiBi's steep heads see the token just before, which is what the first layer has to find here; with rotary positions
no training of this length found it. Weights of 1/sqrt(64) bring the scores out of the flat part of the kernel."""


@dataclass(frozen=True)
class Plan:
    """What a budget buys. ``seconds`` None: the steps are run whatever they take."""

    attentions: tuple[str, ...]
    pairs: tuple[int, ...]
    vocabulary: int
    length_per_pair: int
    dims: tuple[int, ...]
    heads: int
    rates: tuple[float, ...]
    steps: int
    seeds: int
    batch: int = 64
    held_out: int = 256
    seconds: float | None = None


_FEW = ("softmax", "softmax,elu-sum", "softmax,taylor1-l2", "softmax,taylor2-l2")
_MANY = (
    "softmax",
    "exp-l2",
    *(
        f"{first}{name}"
        for first in ("", "softmax,")
        for name in ("elu-sum", "taylor1-l2", "taylor2-l2", "taylor2-sum")
    ),
    "softmax,taylor3-l2",
)
BUDGETS: dict[Budget, Plan] = {
    "quick": Plan(_FEW, (2, 4, 8, 16), 64, 4, (64,), 4, (3e-3, 6e-3), steps=2500, seeds=1, seconds=430),
    "standard": Plan(_MANY, (2, 4, 8, 16, 32, 64), 512, 4, (64, 128), 4, (1e-3, 3e-3, 1e-2), steps=6000, seeds=1),
    "full": Plan(
        _MANY, (4, 8, 16, 32, 64), 8192, 16, (64, 128, 256), 4, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), steps=20000, seeds=3
    ),
}


def run(
    budget: str = "quick",
    out: str | Path = "runs/recall-quick",
    *,
    attentions: Sequence[str] = (),
    layers: int | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    device: str = "auto",
    command: str = "mercer study recall",
    quiet: bool = False,
) -> Path:
    """Run the study in ``out``, or continue the one that was begun there. Returns the path of its page.

    Args:
        budget: "quick" (64 tokens, up to 16 pairs, as many of 2,500 steps as fit), "standard" (512 tokens, 64 pairs),
            "full" (8,192 tokens, the published lengths).
        out: receives recall.json, its schema, recall.html and a folder for each run.
        attentions: names instead of the budget's, of attentions and mixers; "softmax,elu-sum" has softmax in the first
            layer, "7*mamba,softmax" in the last of eight.
        layers: of each model, instead of 2.
        seeds, steps: instead of the budget's. ``steps`` also skips the measurement that the quick budget begins with.
        device, command, quiet: as in ``mercer.studies.orders.run``.

    Raises:
        InvalidArgument: an unknown budget or attention, or a folder begun with other settings.
        Interrupted: stopped by a signal; the same call continues.
    """
    return _Study(check_budget(budget), Path(out), attentions, layers, seeds, steps, device, command, quiet).run()


Part = tuple[str, int, float, int]
"""An attention, a width, a learning rate and a seed."""


class _Study(Study[Part, RecallTrial]):
    def __init__(
        self,
        budget: Budget,
        out: Path,
        attentions: Sequence[str],
        layers: int | None,
        seeds: int | None,
        steps: int | None,
        device: str,
        command: str,
        quiet: bool,
    ) -> None:
        super().__init__(budget, out, device, quiet)
        check_counts(seeds, steps, layers=layers)
        self.plan = plan = BUDGETS[budget]
        self.layers = layers or LAYERS
        self.attentions = list(
            dict.fromkeys(parse_pattern(name, self.layers) for name in attentions or plan.attentions)
        )
        self.seeds = list(range(seeds or plan.seeds))
        self.tasks = tuple(Recall(n, plan.length_per_pair * n, plan.vocabulary) for n in plan.pairs)
        find_device(device)
        asked = {
            "study": "recall",
            "budget": budget,
            "attentions": self.attentions,
            "seeds": len(self.seeds),
            "steps": steps,
        } | ({} if layers is None else {"layers": layers})
        self.folder = StudyFolder(out, asked, command)
        self.steps = self.settle_steps(
            steps, plan.steps, plan.seconds, lambda: {name: self._seconds_per_step(name) for name in self.attentions},
            runs=len(plan.rates) * len(plan.dims) * len(self.seeds),
            evaluations=2 * len(self.tasks) * plan.held_out / plan.batch / 3,
        )  # fmt: skip

    def _seconds_per_step(self, name: str) -> float:
        """The mean over the tasks, which take turns."""
        setting = self._setting(name, self.plan.dims[-1], self.plan.rates[0], 0, len(self.tasks) * 5)
        runner = RecallRun(setting, None)
        size = len(self.tasks)

        def round_of_tasks(number: int) -> None:
            for task in range(size):
                runner.step(number * size + task)

        return seconds_per_step(round_of_tasks) / size

    def _setting(self, name: str, dim: int, rate: float, seed: int, steps: int) -> Setting:
        plan, names = self.plan, expand(name)
        here = {"position": "none"} if all(map(is_mixer, names)) else {}  # a state has no pairs that ALiBi could weigh
        model = ModelConfig(
            **MODEL | here, layers=self.layers, vocab_size=plan.vocabulary, dim=dim, heads=plan.heads, seed=seed,
            attention=names[0] if len(names) == 1 else names, max_length=plan.length_per_pair * max(plan.pairs),
        )  # fmt: skip
        train = TrainConfig(
            steps=steps, batch=plan.batch, length=model.max_length, learning_rate=rate, seed=seed, device=self.device,
            checkpoint_every=max(1, steps // 4),
        )  # fmt: skip
        return Setting(model, train, self.tasks, plan.held_out)

    def parts(self) -> list[Part]:
        plan = self.plan
        return [
            (name, dim, rate, seed)
            for seed in self.seeds
            for dim in plan.dims
            for name in self.attentions
            for rate in plan.rates
        ]

    def work(self, part: Part) -> float:
        return self.steps

    def opening(self) -> str:
        text = f"{count(len(self.parts()), 'run')} of {count(self.steps, 'step')} in {self.out}"
        return f"{text}: {self.done // self.steps:.0f} finished." if self.done else f"{text}."

    def _folder_of(self, name: str, dim: int, rate: float, seed: int) -> Path:
        return self.out / "trials" / f"{slug(name)}-width{dim}-rate{rate:g}-seed{seed}"

    def kept_at(self, part: Part) -> tuple[Path, type[RecallTrial]]:
        return self._folder_of(*part) / "trial.json", RecallTrial

    def line(self, part: Part, result: RecallTrial) -> str:
        return _line(result)

    def measure(self, part: Part, place: str, progress: StudyProgress) -> RecallTrial:
        name, dim, rate, seed = part
        folder = self._folder_of(*part)
        setting = self._setting(name, dim, rate, seed, self.steps)

        def show(done: int, loss: float) -> None:
            text = f"{place} {label(name)}, rate {rate:g}: step {done}/{self.steps} loss {loss:.3f}"
            progress.update(self.done + done, text)

        common = {"attention": name, "dim": dim, "learning_rate": rate, "seed": seed}
        parameters = DecoderLM(setting.model).parameter_count
        runner = RecallRun(setting, folder)
        for note in runner.notes:
            progress.say(f"Note: {note}.")
        progress.found_done(runner.at)
        try:
            seconds = runner.train(show)
            return RecallTrial(
                **common, results=runner.evaluate(), steps=self.steps, seconds=seconds, parameters=parameters
            )
        except NonFinite as error:
            return RecallTrial(
                **common, status="diverged", reason=str(error), results=[], steps=runner.at, seconds=0.0,
                parameters=parameters,
            )  # fmt: skip

    def write(self) -> Path:
        plan, trials = self.plan, self.results
        task = RecallTask(
            vocabulary=plan.vocabulary, pairs=list(plan.pairs), length_per_pair=plan.length_per_pair,
            power=self.tasks[0].power, heldout_sequences=plan.held_out,
        )  # fmt: skip
        head_dims = {dim: dim // plan.heads for dim in plan.dims}
        summaries = summarize(trials, task, plan.heads, head_dims, self.layers)
        setting = self._setting(self.attentions[0], plan.dims[0], plan.rates[0], 0, self.steps)
        rates = {"learning_rates": list(plan.rates)}
        record = RecallRecord(
            finished=len(trials) == len(self.parts()),
            provenance=self.folder.provenance(self.budget, self.seeds, self.device),
            task=task,
            model=setting.model.model_dump(mode="json", exclude={"attention", "dim", "gain", "gain_init", "seed"}),
            training=rates | {k: v for k, v in setting.train.model_dump(mode="json").items() if k in _SHOWN},
            calibration=self.calibration,
            trials=trials,
            summaries=summaries,
            capacities=capacities(summaries, plan.heads, head_dims),
            findings=conclude(summaries, task),
        )
        return write_page(write_record(record, self.out))


_SHOWN = {"steps", "batch", "warmup", "floor", "weight_decay", "beta1", "beta2", "epsilon", "clip", "dtype"}


def _line(trial: RecallTrial) -> str:
    begin = f"{label(trial.attention)}, width {trial.dim}, rate {trial.learning_rate:g}, seed {trial.seed}: "
    if trial.status == "diverged":
        return f"{begin}diverged: {trial.reason}"
    found = ", ".join(f"{r.pairs} pairs {100 * r.accuracy:.0f} %" for r in trial.results)
    return f"{begin}{found} in {duration(trial.seconds)}"
