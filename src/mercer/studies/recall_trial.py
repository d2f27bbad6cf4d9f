"""One training run of the recall study, continued from its checkpoint after a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mercer.errors import Interrupted, NonFinite
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.vocabulary import Bytes
from mercer.studies.mqar import NO_LABEL, Recall
from mercer.studies.records.recall import RecallResult
from mercer.training import checkpoint
from mercer.training.config import TrainConfig
from mercer.training.interrupt import Interrupts
from mercer.training.optim import learning_rate, make_optimizer

HELD_OUT_BATCH = 64


@dataclass(frozen=True)
class Setting:
    """A model, a recipe and the tasks it is trained on in turn: step s asks for ``tasks[s % len(tasks)].pairs``."""

    model: ModelConfig
    train: TrainConfig
    tasks: tuple[Recall, ...]
    held_out: int


class RecallRun:
    """A model in training. ``folder`` None: nothing is kept, as for measuring what a step takes. ``notes``: sentences
    about damaged checkpoints."""

    def __init__(self, setting: Setting, folder: Path | None) -> None:
        self.setting, self.folder = setting, folder
        name = setting.train.device
        cuda = name == "auto" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu" if name == "auto" else name)
        self.model = DecoderLM(setting.model).to(self.device)
        self.optimizer, _ = make_optimizer(self.model, setting.train, self.device)
        self.at, self.before = 0, 0.0
        self.notes: list[str] = []
        if folder is not None and (found := checkpoint.resume(folder, self.model, self.optimizer)):
            kept, self.notes = found
            self.at, self.before = kept["step"], kept["seconds"]

    def step(self, number: int) -> float:
        """One optimiser step; returns the loss in nats per query."""
        train, tasks = self.setting.train, self.setting.tasks
        rows = tasks[number % len(tasks)].batch(train.batch, train.seed, number)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, train)
        loss = self.model.loss(rows.tokens.to(self.device), rows.targets.to(self.device))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip or math.inf)
        value = loss.item()
        if not (math.isfinite(value) and math.isfinite(norm.item())):
            raise NonFinite(f"step {number + 1}: the loss is {value} and the gradient norm {norm.item()}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def train(self, show: Callable[[int, float], None]) -> float:
        """Run the steps that are left, calling ``show(steps done, loss)`` after each; returns the seconds of all calls.

        Raises:
            Interrupted: a signal; what is done so far is saved.
            NonFinite: the loss or the gradient left float32.
        """
        config = self.setting.train
        began = time.perf_counter()
        with Interrupts() as interrupts:
            while self.at < config.steps:
                loss = self.step(self.at)
                self.at += 1
                show(self.at, loss)
                due = config.checkpoint_every is not None and self.at % config.checkpoint_every == 0
                if due or interrupts.caught or self.at == config.steps:
                    self._save(self.before + time.perf_counter() - began)
                if interrupts.caught and self.at < config.steps:
                    raise Interrupted(
                        f"stopped by {interrupts.caught.name} after step {self.at} of {config.steps}, which is saved; "
                        "run the same command again to continue"
                    )
        return self.before + time.perf_counter() - began

    def _save(self, seconds: float) -> None:
        if self.folder is not None:
            state = {"step": self.at, "held_out_loss": None, "seconds": seconds}
            described = self.setting.model.model_dump(mode="json")
            checkpoint.save(self.folder, self.model, self.optimizer, state, described, Bytes(), 1)

    @torch.no_grad()
    def evaluate(self) -> list[RecallResult]:
        """Recall on held-out sequences, the same for every model, at each number of pairs."""
        return [self._evaluate(task) for task in self.setting.tasks]

    def _evaluate(self, task: Recall) -> RecallResult:
        right = asked = 0
        nats = 0.0
        sizes = _parts(self.setting.held_out)
        for number, size in enumerate(sizes):
            rows = task.batch(size, 0, number, held_out=True)
            tokens, targets = rows.tokens.to(self.device), rows.targets.to(self.device)
            known = targets != NO_LABEL
            logits = self.model(tokens)[known]
            wanted = targets[known]
            right += int((logits.argmax(-1) == wanted).sum())
            nats += float(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))
            asked += wanted.numel()
        return RecallResult(pairs=task.pairs, accuracy=right / asked, loss=nats / asked)


def _parts(count: int) -> Sequence[int]:
    whole, rest = divmod(count, HELD_OUT_BATCH)
    return [HELD_OUT_BATCH] * whole + ([rest] if rest else [])
