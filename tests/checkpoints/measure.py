"""How far a loaded model is from the model of transformers that wrote it, in every way that it can be asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.checkpoints.zoo import DECODERS, make, tokens
from torch import Tensor, nn

from mercer import checkpoints
from mercer.checkpoints.family import find_family

BOUND = 1e-5
"""Of the largest number of what is compared, in float32."""


def error(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """The largest difference over the largest number."""
    assert found.shape == wanted.shape, f"{list(found.shape)} for {list(wanted.shape)}"
    assert bool(wanted.isfinite().all())
    return float((found - wanted).abs().max() / max(float(wanted.abs().max()), floor, 1e-30))


def decoder(name: str, folder: Path) -> dict[str, float]:
    """Errors of a decoder language model, one for each way of asking."""
    theirs = make(*DECODERS[name], folder)
    ours = checkpoints.load(folder)
    ids = tokens()
    with torch.no_grad():
        wanted = theirs(ids, output_hidden_states=True)
        errors = {"logits": error(ours(ids), wanted.logits)}
        errors["hidden"] = hidden_error(lambda: ours(ids), ours.blocks, wanted.hidden_states)
        errors["cached"] = error(stepwise(ours, ids, (20, 1, 1, 7, 1)), wanted.logits)
        for side in ("left", "right"):
            errors[side] = error(padded(ours, ids, side), wanted.logits)
    errors["written"] = written_error(ours, theirs, folder, lambda model: model(ids).logits)
    errors["gradients"] = gradient_error(ours, theirs, ids, folder)
    return errors


def hidden_error(call: Callable[[], Any], blocks: nn.ModuleList, wanted: tuple[Tensor, ...]) -> float:
    """Of what every block gives; the last of theirs has gone through the final norm and is left out."""
    found: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: found.append(out)) for block in blocks]
    call()
    for hook in hooks:
        hook.remove()
    return max(error(f, w) for f, w in zip(found[:-1], wanted[1:-1], strict=True))


def stepwise(model: Any, ids: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """Logits of tokens read in pieces, each continuing the states of the one before."""
    states, logits, at = None, [], 0
    for size in (*pieces, ids.shape[1]):
        piece = ids[:, at : at + size]
        at += piece.shape[1]
        if piece.shape[1]:
            out, states = model(piece, states=states, return_states=True)
            logits.append(out)
    return torch.cat(logits, 1)


def padded(model: Any, ids: Tensor, side: str, width: int = 5) -> Tensor:
    """Logits of the real tokens of a batch with padding that has other token ids."""
    filler = torch.full((ids.shape[0], width), 3)
    real = torch.ones_like(ids, dtype=torch.bool)
    parts = ((filler, torch.zeros_like(filler, dtype=torch.bool)), (ids, real))
    if side == "right":
        parts = parts[::-1]
    both, mask = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    logits = model(both, padding=mask)
    return logits[:, width:] if side == "left" else logits[:, : ids.shape[1]]


def gradient_error(ours: Any, theirs: Any, ids: Tensor, folder: Path) -> float:
    """Of the gradients of every tensor on disk, under the cross entropy of each next token.

    What is nearly nothing beside the largest gradient is compared with a hundredth of that: biases of keys have none at
    all under softmax, and what is found there is rounding. Their model is used up.
    """
    targets = ids[:, 1:]
    for model, logits in ((ours, ours(ids)), (theirs, theirs(ids).logits)):
        model.zero_grad()
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()).backward()
    found = written_gradients(ours, theirs.config.model_type)
    wanted = saved_gradients(theirs, folder.with_name(folder.name + "-gradients"))
    floor = 0.01 * max(float(g.abs().max()) for g in wanted.values())
    assert found.keys() == wanted.keys()
    return max(error(found[name], grad, floor) for name, grad in wanted.items())


def written_gradients(model: Any, family: str) -> dict[str, Tensor]:
    """Our gradients under the names, and in the layouts, of the tensors on disk."""
    parameters = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for rule in find_family(family).names(model.config).rules:
        grad = parameters[rule.ours].grad
        found |= dict(zip(rule.theirs, rule.write(grad), strict=True))
    return found


def saved_gradients(model: Any, folder: Path) -> dict[str, Tensor]:
    """Their gradients under the names and in the layouts of what they save: saved in place of the parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def written_error(ours: Any, theirs: Any, folder: Path, call: Callable[[Any], Tensor]) -> float:
    """Of what transformers computes with the checkpoint that we write."""
    again = folder.with_name(folder.name + "-written")
    checkpoints.save(ours, again, family=theirs.config.model_type)
    back = type(theirs).from_pretrained(again).eval()
    with torch.no_grad():
        return error(call(back), call(theirs))
