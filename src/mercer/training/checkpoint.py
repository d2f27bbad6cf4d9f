"""Checkpoints of a run: everything the next step depends on, as safetensors and JSON, complete or absent.

RUN/checkpoints/step-00000200/
    model.safetensors      parameters and buffers, tied ones once
    config.json            the model's config
    optimizer.safetensors  first_moment.NAME and second_moment.NAME of every parameter
    trainer.json           step, unlogged losses, losses last measured, seconds, and what run.json says of the run
    tokenizer.json         where the vocabulary is not bytes
    sha256.json            of every other file, checked before a run is continued
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mercer.errors import InvalidArgument, StorageError
from mercer.models.vocabulary import Vocabulary
from mercer.runtime.files import TEMPORARY, new_folder, read_json, storage_error, write_json
from mercer.training.integrity import Damaged, seal, verify

_MOMENTS = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


def folders(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; folders of other names are not looked at."""
    found = (run / "checkpoints").glob("step-*")
    ours = (path for path in found if re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})", path.name) and path.is_dir())
    return sorted(ours, key=step_of)


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
    losses = {folder: _held_out_loss(folder) for folder in there}
    evaluated = [folder for folder in there if losses[folder] is not None]
    return min(evaluated, key=lambda folder: losses[folder], default=None)


def _held_out_loss(folder: Path) -> float | None:
    """None also where a damaged checkpoint does not say: that one is then nobody's best."""
    try:
        trainer = read_json(folder / "trainer.json")
    except StorageError:
        return None
    loss = trainer.get("held_out_loss") if isinstance(trainer, dict) else None
    return loss if isinstance(loss, float) else None


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
        seal(folder)
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


Accept = Callable[[dict[str, Any]], None]


def resume(
    run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, accept: Accept | None = None
) -> tuple[dict[str, Any], list[str]] | None:
    """Load the newest checkpoint that is not damaged; damaged newer ones are renamed to end in ".damaged".

    Args:
        accept: called with ``trainer.json`` before anything is changed; raises what speaks against it.

    Returns:
        ``trainer.json``, and a sentence for each damaged one. None: the run has no checkpoint.

    Raises:
        StorageError: every checkpoint is damaged.
        InvalidArgument: the checkpoint is of another model.
    """
    faults: list[Damaged] = []
    for folder in reversed(folders(run)):
        try:
            trainer = load(folder, model, optimizer, accept)
        except Damaged as fault:
            faults.append(fault)
        else:
            return trainer, [_set_aside(fault, trainer["step"]) for fault in faults]
    if faults:
        raise StorageError(
            f"no checkpoint of {run} is whole ({faults[0]}); put back a copy of it, or delete {run / 'checkpoints'} "
            "to begin anew"
        )
    return None


def _set_aside(fault: Damaged, step: int) -> str:
    target = fault.folder.with_name(fault.folder.name + ".damaged")
    try:
        if target.exists():
            rmtree(target)
        fault.folder.rename(target)
    except OSError as error:
        raise storage_error(error, target) from error
    return (
        f"the checkpoint of step {step_of(fault.folder)} is damaged ({fault.fault}) and now called {target.name}: "
        f"the run continues from step {step}"
    )


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, accept: Accept | None = None
) -> dict[str, Any]:
    """Put a checkpoint's tensors into ``model`` and ``optimizer`` in place; returns its ``trainer.json``.

    Raises:
        Damaged: a file is missing or not what was written; nothing was changed.
        InvalidArgument: the checkpoint's tensors are not those of this model; nothing was changed.
    """
    verify(folder)
    trainer = read_json(folder / "trainer.json")
    if accept is not None:
        accept(trainer)
    tensors, own = load_file(folder / "model.safetensors"), _unique(model)
    _same(own, tensors, folder / "model.safetensors")
    stored = load_file(folder / "optimizer.safetensors")
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    wanted = {f"{ours}.{names[id(p)]}": p for p in parameters for ours in _MOMENTS.values()} if trainer["step"] else {}
    _same(wanted, stored, folder / "optimizer.safetensors")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
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


def _same(wanted: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor], path: Path) -> None:
    """Names, shapes and dtypes must agree: copying would broadcast or round what does not."""
    if wanted.keys() != there.keys():
        name = min(wanted.keys() ^ there.keys())
        raise InvalidArgument(
            f"{path} {'lacks' if name in wanted else 'has an unknown'} tensor {name!r}: it is of another model"
        )
    for name, tensor in wanted.items():
        if (tensor.shape, tensor.dtype) != (there[name].shape, there[name].dtype):
            raise InvalidArgument(
                f"{path}: tensor {name!r} is {_kind(there[name])}, but the model's is {_kind(tensor)}: "
                "it is of another model"
            )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
