"""The training loop: resumable from its folder to the last digit, whatever the moment it was stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mercer.errors import Interrupted, InvalidArgument, NonFinite
from mercer.runtime.device import find_device
from mercer.runtime.environment import environment
from mercer.training import checkpoint
from mercer.training.config import TrainConfig
from mercer.training.data import Corpus, batch, windows
from mercer.training.evaluate import evaluate
from mercer.training.interrupt import Interrupts
from mercer.training.metrics import Metrics, lacking, read_metrics
from mercer.training.optim import learning_rate, make_optimizer
from mercer.training.run import Reader, begin, hold, require_same


@dataclass(frozen=True)
class Progress:
    """Where a run is, for whoever watches it.

    Attributes:
        phase: what has just happened: "start", "step", "eval" or "checkpoint".
        step, steps: steps done, of how many.
        loss: training loss last logged, nats per token; None before the first.
        held_out: held-out loss last measured, likewise.
        tokens_per_second: over the steps of this process, its first step excepted.
        seconds_left: what the rest takes at the pace so far; None before a pace is known.
        notes: sentences for the user.
    """

    phase: Literal["start", "step", "eval", "checkpoint"]
    step: int
    steps: int
    loss: float | None = None
    held_out: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
        folder: where it is.
        steps: optimiser steps done.
        loss: mean training loss of the last logging interval, nats per token.
        held_out_loss, bits_per_byte: after the last step.
        parameters: trainable numbers, tied ones once.
        seconds: time in the loop over all its processes, up to their last checkpoints.
        metrics: every event of ``metrics.jsonl``.
        notes: sentences for the user, as `Progress` told them: what is not quite as it was when the run was begun.
    """

    folder: Path
    steps: int
    loss: float
    held_out_loss: float
    bits_per_byte: float
    parameters: int
    seconds: float
    metrics: list[dict[str, Any]]
    notes: tuple[str, ...] = ()


def fit(
    build: Callable[[], nn.Module],
    description: dict[str, Any],
    config: TrainConfig,
    corpus: Corpus,
    folder: str | Path,
    progress: Callable[[Progress], None] | None = None,
    *,
    restart: bool = False,
    tensorboard: bool = False,
    read_description: Reader | None = None,
) -> TrainResult:
    """Train any module whose ``loss(tokens [B, T], targets [B, T])`` gives mean nats per token; see `trainer.train`.

    Args:
        build: makes the model, the same one every time; its gradients must reach every trainable parameter.
        description: the model as JSON values: kept as config.json, compared when a run is continued.
        read_description: gives a description that an earlier version wrote as this one writes it, or raises
            InvalidArgument. Default: as it is.
    """
    folder = Path(folder)
    device = find_device(config.device)
    for side, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(tokens) <= config.length:
            raise InvalidArgument(
                f"the {side} text has {len(tokens)} tokens, but a window of length={config.length} needs "
                f"{config.length + 1}: give more text, another split or a smaller length"
            )
    record = {
        "model": description,
        "train": config.model_dump(mode="json"),
        "corpus": corpus.info,
        "environment": environment() | {"device": _device_name(device)},
    }
    with hold(folder):
        begun, notes = begin(folder, record, restart, read_description)
        loop = _Loop(build().to(device).train(), begun, config, corpus, folder, device, progress)
        return loop.run(notes, tensorboard)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


class _Loop:
    """The state of a run in memory: everything here is either rebuilt from the config or saved in a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        record: dict[str, Any],
        config: TrainConfig,
        corpus: Corpus,
        folder: Path,
        device: torch.device,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.model, self.record, self.config, self.corpus = model, record, config, corpus
        self.folder, self.device, self.progress = folder, device, progress
        self.bfloat16 = config.dtype == "bfloat16"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.form = make_optimizer(model, config, device)
        self.rows = windows(corpus.held_out, config.length, config.eval_windows)
        self.step = 0
        self.pending: list[torch.Tensor] = []  # [2]: loss and gradient norm of each step since the last logged line
        self.loss: float | None = None
        self.held_out: dict[str, float] | None = None
        self.held_out_step: int | None = None
        self.seconds_before = 0.0

    def run(self, notes: list[str], tensorboard: bool) -> TrainResult:
        resumed, more = self._resume()
        told = (*notes, *more)
        metrics = Metrics(self.folder, self.step if resumed else None, tensorboard)
        try:
            with Interrupts() as interrupts:
                self._loop(metrics, interrupts, resumed, told)
        finally:
            metrics.close()
        assert self.loss is not None  # the last step is logged and evaluated, and its checkpoint has both
        assert self.held_out is not None
        return TrainResult(
            folder=self.folder,
            steps=self.step,
            loss=self.loss,
            held_out_loss=self.held_out["loss"],
            bits_per_byte=self.held_out["bits_per_byte"],
            parameters=sum(p.numel() for p in self.parameters),
            seconds=self._seconds(),
            metrics=read_metrics(self.folder),
            notes=told,
        )

    def _loop(self, metrics: Metrics, interrupts: Interrupts, resumed: bool, notes: tuple[str, ...]) -> None:
        config = self.config
        self.began = time.perf_counter()
        self.first: tuple[float, int] | None = None
        self._tell("start", notes)
        if not resumed:
            self._evaluate(metrics)
        logged = (time.perf_counter(), self.step)
        saved = self.step if resumed else -1
        while self.step < config.steps and not interrupts.caught:
            self._step()
            done = self.step == config.steps
            if self.step % config.log_every == 0 or done:
                logged = self._log(metrics, logged)
            self._tell("step")
            if self.step % config.eval_every == 0 or done:
                self._evaluate(metrics)
            if done or (config.checkpoint_every and self.step % config.checkpoint_every == 0):
                self._save(metrics)
                saved = self.step
        if interrupts.caught and self.step < config.steps:
            if saved != self.step:
                self._save(metrics)
            raise Interrupted(
                f"stopped by {interrupts.caught.name} after step {self.step} of {config.steps}, which is saved; "
                f"run the same command again to continue in {self.folder}"
            )

    def _step(self) -> None:
        config = self.config
        rows = batch(self.corpus.train, config.length, config.batch, config.seed, self.step)
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, config)
        total = torch.zeros((), device=self.device)
        for part in rows.chunk(config.accumulate):
            # Under autocast parameters stay float32, and so do their gradients and moments.
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
                loss = self.model.loss(part[:, :-1], part[:, 1:]) / config.accumulate  # pyright: ignore[reportCallIssue]
            loss.backward()
            total += loss.detach()
        if self.step == 0:
            self._require_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, math.inf if config.clip is None else config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.pending.append(torch.stack((total, norm.to(total.dtype))))
        self.step += 1
        if self.first is None:
            self.first = (time.perf_counter(), self.step)

    def _require_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise InvalidArgument(f"parameter {name!r} gets no gradient from the loss; remove it or freeze it")

    def _check(self) -> torch.Tensor:
        """[n, 2] pending losses and norms on the CPU, after making sure that all are finite."""
        values = torch.stack(self.pending).double().cpu()
        bad = (~values.isfinite()).any(1).nonzero()
        if len(bad):
            index = int(bad[0])
            step = self.step - len(values) + index + 1
            loss, norm = values[index].tolist()
            raise NonFinite(
                f"step {step}: the loss is {loss} and the gradient norm {norm}; {self._kept()}; "
                "try a smaller learning rate, a longer warm-up or float32"
            )
        return values

    def _kept(self) -> str:
        there = checkpoint.folders(self.folder)
        return (
            f"the checkpoint of step {checkpoint.step_of(there[-1])} is kept" if there else "no checkpoint was due yet"
        )

    def _log(self, metrics: Metrics, since: tuple[float, int]) -> tuple[float, int]:
        values = self._check()
        self.pending.clear()
        loss, norm = values.mean(0).tolist()
        now = time.perf_counter()
        rate = (self.step - since[1]) * self.config.batch * self.config.length / (now - since[0])
        self.loss = loss
        metrics.write(
            {
                "event": "train",
                "step": self.step,
                "loss": loss,
                "learning_rate": learning_rate(self.step - 1, self.config),
                "gradient_norm": norm,
                "tokens": self.step * self.config.batch * self.config.length,
                "time": {"seconds": round(self._seconds(), 3), "tokens_per_second": round(rate, 1)},
            }
        )
        return now, self.step

    def _evaluate(self, metrics: Metrics) -> None:
        result = evaluate(
            self.model,
            self.rows,
            self.corpus.vocabulary.byte_lengths,
            max(1, self.config.batch // self.config.accumulate),
            self.device,
            self.bfloat16,
        )
        if not all(map(math.isfinite, result.values())):
            raise NonFinite(
                f"step {self.step}: the held-out loss is {result['loss']}; {self._kept()}; try a smaller learning rate"
            )
        self.held_out, self.held_out_step = result, self.step
        metrics.write({"event": "eval", "step": self.step, **result, "time": {"seconds": round(self._seconds(), 3)}})
        self._tell("eval")

    def _save(self, metrics: Metrics) -> None:
        if self.pending:
            self._check()
        metrics.sync()
        evaluated = self.held_out if self.held_out_step == self.step else None
        trainer = {
            "step": self.step,
            "pending": [value.double().tolist() for value in self.pending],
            "loss": self.loss,
            "held_out_loss": evaluated["loss"] if evaluated else None,
            "bits_per_byte": evaluated["bits_per_byte"] if evaluated else None,
            "optimizer": f"adamw-{self.form}",
            "seconds": self._seconds(),
            "run": self.record,
        }
        model, vocabulary, keep = self.record["model"], self.corpus.vocabulary, self.config.keep
        checkpoint.save(self.folder, self.model, self.optimizer, trainer, model, vocabulary, keep)
        self._tell("checkpoint")

    def _resume(self) -> tuple[bool, list[str]]:
        """Whether there was a checkpoint to continue from, and sentences about what is damaged or lost."""

        def accept(trainer: dict[str, Any]) -> None:
            require_same(self.folder, trainer.get("run"), self.record)

        found = checkpoint.resume(self.folder, self.model, self.optimizer, accept)
        if found is None:
            return False, []
        trainer, notes = found
        self.step = trainer["step"]
        self.pending = [torch.tensor(value, dtype=torch.float32, device=self.device) for value in trainer["pending"]]
        self.seconds_before = trainer["seconds"]
        self.loss = trainer["loss"]
        if trainer["held_out_loss"] is not None:
            self.held_out = {"loss": trainer["held_out_loss"], "bits_per_byte": trainer["bits_per_byte"]}
            self.held_out_step = self.step
        hole = lacking(read_metrics(self.folder), self.step, self.config)
        return True, notes if hole is None else [*notes, hole]

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _tell(self, phase: Literal["start", "step", "eval", "checkpoint"], notes: tuple[str, ...] = ()) -> None:
        if self.progress is None:
            return
        rate = left = None
        if self.first is not None and self.step > self.first[1]:
            pace = (time.perf_counter() - self.first[0]) / (self.step - self.first[1])
            rate, left = self.config.batch * self.config.length / pace, pace * (self.config.steps - self.step)
        held = self.held_out["loss"] if self.held_out else None
        self.progress(Progress(phase, self.step, self.config.steps, self.loss, held, rate, left, notes))
