"""How far a loaded model is from the model of transformers that wrote it, in every way that it can be asked."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.checkpoints.zoo import DECODERS, ENCODERS, SEQ2SEQ, frames, make, tokens
from torch import Tensor, nn

from mercer import checkpoints
from mercer.checkpoints.family import find_family
from mercer.checkpoints.reading import stored

BOUND = 1e-5
"""Of the largest number of what is compared, in float32."""
ENDS_ONLY = ("mamba", "mamba2", "falcon_mamba", "rwkv")
"""Model types whose hidden states are what each block gives and what the final norm gives, without the embedding."""


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
        hidden = wanted.hidden_states
        if theirs.config.model_type in ENDS_ONLY:
            hidden = (hidden[0], *hidden[:-2], hidden[-1])
        errors["hidden"] = hidden_error(lambda: ours(ids), ours.blocks, hidden)
        errors["cached"] = error(stepwise(ours, ids, (20, 1, 1, 7, 1)), wanted.logits)
        for side in ("left", "right"):
            errors[side] = error(padded(ours, ids, side), wanted.logits)
    errors["written"] = written_error(ours, theirs, folder, lambda model: model(ids).logits)
    errors["gradients"] = gradient_error(ours, theirs, lambda model: model(ids).logits, (ids,), folder)
    return errors


def encoder(name: str, folder: Path) -> dict[str, float]:
    """Errors of an encoder of tokens."""
    theirs = make(*ENCODERS[name], folder)
    ours = checkpoints.load(folder)
    ids = tokens(length=41)
    real = torch.ones_like(ids)
    there = {"input_ids": ids, "attention_mask": real}  # some models take no mask to be one that hides their pad token

    def output(result: Any) -> Tensor:
        return result.logits if "logits" in result else result.last_hidden_state

    with torch.no_grad():
        answer = theirs(**there, output_hidden_states=True)
        wanted = output(answer)
        errors = {"logits": error(ours(ids), wanted)}
        errors["hidden"] = hidden_error(lambda: ours(ids), ours.blocks, answer.hidden_states)
        for side in ("left", "right"):
            errors[side] = error(padded(ours, ids, side), wanted)
    errors["written"] = written_error(ours, theirs, folder, lambda model: output(model(**there)))
    errors["gradients"] = gradient_error(ours, theirs, lambda model: output(model(**there)), (ids,), folder)
    return errors


def seq2seq(name: str, folder: Path) -> dict[str, float]:
    """Errors of an encoder-decoder."""
    theirs = make(*SEQ2SEQ[name], folder)
    ours = checkpoints.load(folder)
    speech = name.startswith("whisper")
    source, ids = frames() if speech else tokens(length=29), tokens(length=19, seed=2)
    there = {"input_features" if speech else "input_ids": source, "decoder_input_ids": ids}
    if not speech:
        there["attention_mask"] = torch.ones_like(source)

    def answer(model: Any) -> Tensor:
        return model(**there).logits

    with torch.no_grad():
        result = theirs(**there, output_hidden_states=True)
        wanted = result.logits
        errors = {"logits": error(ours(source, ids), wanted)}
        errors["hidden"] = max(
            hidden_error(lambda: ours(source, ids), ours.encoder.blocks, result.encoder_hidden_states),
            hidden_error(lambda: ours(source, ids), ours.decoder.blocks, result.decoder_hidden_states),
        )
        decoder = ours.conditioned(source)
        if "full" not in name:  # how many tokens an expert takes is counted by call
            errors["cached"] = error(stepwise(decoder, ids, (7, 1, 1, 3, 1)), wanted)
        for side in ("left", "right"):
            errors[side] = error(padded(decoder, ids, side), wanted)
            if not speech:
                memory = padded_source(ours, source, side)
                errors[side] = max(errors[side], error(memory(ids), wanted))
    errors["written"] = written_error(ours, theirs, folder, answer)
    errors["gradients"] = gradient_error(ours, theirs, answer, (source, ids), folder)
    return errors


def padded_source(model: Any, source: Tensor, side: str, width: int = 5) -> Any:
    """A decoder that looks at a source with padding."""
    filler, real = torch.full((source.shape[0], width), 3), torch.ones_like(source, dtype=torch.bool)
    parts = [(filler, torch.zeros_like(filler, dtype=torch.bool)), (source, real)]
    both, mask = (torch.cat(each, 1) for each in zip(*(parts if side == "left" else parts[::-1]), strict=True))
    return model.conditioned(both, padding=mask)


def hidden_error(call: Callable[[], Any], blocks: nn.ModuleList, wanted: tuple[Tensor, ...]) -> float:
    """Of what every block gives; the last of theirs has gone through the final norm and is left out."""
    found: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, out: Any) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)

    hooks = [block.register_forward_hook(note) for block in blocks]
    call()
    for hook in hooks:
        hook.remove()
    length = found[0].shape[1]  # some of theirs pad what comes in
    pairs = zip(found[:-1], wanted[1:-1], strict=True)
    return max((error(f, w[:, :length]) for f, w in pairs), default=0.0)


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
    if logits.dim() == 2:  # one answer a sequence
        return logits
    return logits[:, width:] if side == "left" else logits[:, : ids.shape[1]]


def gradient_error(
    ours: Any, theirs: Any, call: Callable[[Any], Tensor], given: tuple[Tensor, ...], folder: Path
) -> float:
    """Of the gradients of every tensor on disk, under the square of what comes out beside fixed numbers.

    What is nearly nothing beside the largest gradient is compared with a tenth of that: biases of keys have none at
    all under softmax, and what is found there is rounding. Their model is used up.
    """
    target: Tensor | None = None
    for model, out in ((ours, ours(*given)), (theirs, call(theirs))):
        if target is None:
            target = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
        model.zero_grad()
        (out - target).square().mean().backward()
    wanted = saved_gradients(theirs, ours, folder.with_name(folder.name + "-gradients"))
    found = written_gradients(ours, theirs.config.model_type)
    used = {name: grad for name, grad in wanted.items() if bool(grad.any())}
    assert used.keys() <= found.keys()
    assert not any(bool(grad.any()) for name, grad in found.items() if name not in used)
    floor = 0.1 * max(float(grad.abs().max()) for grad in used.values())
    return max(error(found[name], grad, floor) for name, grad in used.items())


def written_gradients(model: Any, family: str) -> dict[str, Tensor]:
    """Our gradients under the names, and in the layouts, of the tensors on disk."""
    names = find_family(family).names(model.config)
    parameters = stored(model, names)
    found: dict[str, Tensor] = {}
    for rule in names.rules:
        parameter = parameters[rule.ours]
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found |= dict(zip(rule.theirs, rule.write(grad), strict=True))
    return found


def saved_gradients(model: Any, ours: Any, folder: Path) -> dict[str, Tensor]:
    """Their gradients under the names and in the layouts of what they save: saved in place of the parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    family = find_family(model.config.model_type)
    saved = load_file(folder / "model.safetensors")
    saved = {name if family.renamed is None else family.renamed(name): tensor for name, tensor in saved.items()}
    if family.prefix and not any(name.startswith(family.prefix) for name in saved):  # a bare body
        saved = {family.prefix + name: tensor for name, tensor in saved.items()}
    buffers = re.compile("|".join(family.names(ours.config).without_meaning) or "(?!)")
    return {name: tensor for name, tensor in saved.items() if buffers.fullmatch(name) is None}


def written_error(ours: Any, theirs: Any, folder: Path, call: Callable[[Any], Tensor]) -> float:
    """Of what transformers computes with the checkpoint that we write."""
    again = folder.with_name(folder.name + "-written")
    extra = checkpoints.open_checkpoint(folder).ignored
    checkpoints.save(ours, again, family=theirs.config.model_type, extra=extra)
    back = type(theirs).from_pretrained(again).eval()
    with torch.no_grad():
        return error(call(back), call(theirs))
