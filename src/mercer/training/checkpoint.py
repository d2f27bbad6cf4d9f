"""Checkpoints of a run: everything the next step depends on, as safetensors and JSON, complete or absent.

RUN/checkpoints/step-00000200/
    model.safetensors      parameters and buffers, tied ones once
    config.json            the model's config
    optimizer.safetensors  first_moment.NAME and second_moment.NAME of every parameter
    trainer.json           step, unlogged losses, held-out loss, seconds
    tokenizer.json         where the vocabulary is not bytes
"""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mercer.errors import InvalidArgument
from mercer.models.vocabulary import Vocabulary
from mercer.runtime.files import TEMPORARY, new_folder, read_json, write_json

_MOMENTS = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


def folders(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = (run / "checkpoints").glob("step-*")
    return sorted(path for path in found if path.is_dir() and not path.name.endswith(TEMPORARY))


def step_of(folder: Path) -> int:
    """The number of steps done, from the folder's name."""
    return int(folder.name.removeprefix("step-"))


def find(run: Path, which: str = "last") -> Path:
    """A checkpoint by name: "last", "best" (lowest held-out loss) or a step.

    Raises:
        InvalidArgument: there is none, or none of that name.
    """
    there = folders(run)
    if not there:
        raise InvalidArgument(f"{run} has no checkpoint; train first, or name the folder given to mercer train --out")
    if which == "last":
        return there[-1]
    if which == "best":
        return best(there) or there[-1]
    for folder in there:
        if which.isdecimal() and step_of(folder) == int(which):
            return folder
    steps = ", ".join(str(step_of(folder)) for folder in there)
    raise InvalidArgument(f"{run} has no checkpoint {which!r}; there are last, best, {steps}")


def best(there: list[Path]) -> Path | None:
    """The checkpoint with the lowest held-out loss; None if none was evaluated at its step."""
    losses = {folder: read_json(folder / "trainer.json")["held_out_loss"] for folder in there}
    evaluated = [folder for folder in there if losses[folder] is not None]
    return min(evaluated, key=lambda folder: losses[folder], default=None)


def save(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: dict[str, Any],
    config: dict[str, Any],
    vocabulary: Vocabulary,
    keep: int,
) -> Path:
    """Write the checkpoint of ``trainer["step"]``, then delete all but the last ``keep`` and the best.

    Raises:
        StorageError: it cannot be written; the earlier ones are untouched.
    """
    target = run / "checkpoints" / f"step-{trainer['step']:08d}"
    before = [folder for folder in folders(run) if folder != target]
    intact = f"the checkpoint of step {step_of(before[-1])} is intact" if before else "no earlier checkpoint exists"
    with new_folder(target, intact) as folder:
        save_file(_unique(model), folder / "model.safetensors")
        save_file(_moments(model, optimizer), folder / "optimizer.safetensors")
        write_json(folder / "config.json", config)
        vocabulary.save(folder)
        write_json(folder / "trainer.json", trainer)
    _prune(run, keep)
    return target


def _prune(run: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints and the best, and what a kill has left of earlier deletions."""
    there = folders(run)
    spared = {*there[-keep:], best(there)}
    for folder in there:
        if folder not in spared:  # under another name first, so that no half-deleted folder looks like a checkpoint
            folder.rename(folder.with_name(folder.name + TEMPORARY))
    for folder in (run / "checkpoints").glob("*" + TEMPORARY):
        rmtree(folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's tensors into ``model`` and ``optimizer`` in place; returns its ``trainer.json``.

    Raises:
        InvalidArgument: the checkpoint's tensors are not those of this model.
    """
    trainer = read_json(folder / "trainer.json")
    tensors = load_file(folder / "model.safetensors")
    own = _unique(model)
    _same(set(own), set(tensors), folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    stored = load_file(folder / "optimizer.safetensors")
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = {f"{ours}.{names[id(p)]}" for p in parameters for ours in _MOMENTS.values()} if trainer["step"] else set()
    _same(wanted, set(stored), folder / "optimizer.safetensors")
    if trainer["step"]:
        for parameter in parameters:
            # AdamW's fused form keeps its count as a float tensor on the parameter's device; foreach on the CPU.
            where = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
            state: dict[str, torch.Tensor] = {"step": torch.tensor(float(trainer["step"]), device=where)}
            for theirs, ours in _MOMENTS.items():
                state[theirs] = stored[f"{ours}.{names[id(parameter)]}"].to(parameter.device)
            optimizer.state[parameter] = state
    return trainer


def _unique(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and saved buffers by name; a tensor with several names under its first."""
    seen: set[int] = set()
    unique: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor.detach()
    return unique


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{ours}.{name}": optimizer.state[parameter][theirs]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for theirs, ours in _MOMENTS.items()
    }


def _same(wanted: set[str], there: set[str], path: Path) -> None:
    if wanted != there:
        name = min(wanted ^ there)
        raise InvalidArgument(
            f"{path} {'lacks' if name in wanted else 'has an unknown'} tensor {name!r}: it is of another model"
        )
