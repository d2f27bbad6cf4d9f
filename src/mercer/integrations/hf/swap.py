"""Swapping the attention of a model that is loaded."""

import inspect
import json
from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from mercer.core.kernels import Exp, Kernel
from mercer.core.names import parse_attention
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.structures import Structure
from mercer.errors import InvalidArgument, StorageError, Unsupported
from mercer.integrations.hf.attention import AttentionFunction, Parts
from mercer.integrations.hf.kernels import Recorder, Site, bind, holders, missing, unbind
from mercer.integrations.hf.masks import mask_function
from mercer.integrations.hf.registry import PREFIX, check, register

_NUMBERS = count(1)
_PROBE = f"{PREFIX}probe"


def swap_attention(
    model: PreTrainedModel,
    attention: str | None = None,
    *,
    kernel: Kernel | None = None,
    normalizer: Normalizer | None = None,
    structure: Structure | None = None,
    layers: Collection[int] | None = None,
    leave_out_dropout: bool = False,
    seed: int = 0,
    inputs: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Have a loaded model attend with other parts, in place; returns the model. Its weights stay as they are.

    Args:
        attention: a name of the grammar of `mercer.parse_attention`, or
        kernel, normalizer: parts, `Exp()` and `Sum()` where one is left out.
        structure: composed with the one that the model asks for.
        layers: numbers of the layers (`module.layer_idx`) to swap; the others keep exact softmax, computed by mercer.
        leave_out_dropout: run without the dropout of attention weights that the model asks for while training, which
            is refused otherwise. Dropout elsewhere stays.
        seed: draws the tensors of a kernel that carries some (random features, learned maps), others in every layer:
            the same seed gives the same ones.
        inputs: arguments of a forward pass, by which the attention modules and the sizes of their heads are found; only
            for kernels that carry tensors, where the model's own `dummy_inputs` will not do.

    The tensors of a kernel are a submodule, `mercer_kernel`, of every attention module: parameters if they are learned,
    buffers otherwise, part of the model's `state_dict`, and saved by `save_pretrained`. `from_pretrained` does not know
    them: swap again after loading, and for learned ones call :func:`load_kernel_tensors`.

    `model.set_attn_implementation("sdpa")` goes back.

    Raises:
        InvalidArgument: a name or an argument that is wrong in itself.
        Unsupported: parts that cannot be combined, or a model that does not let its attention be chosen.
    """
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(
            f"swap_attention: model must be a transformers PreTrainedModel, not {type(model).__name__}."
        )
    if attention is None and kernel is None and normalizer is None and structure is None:
        raise InvalidArgument("swap_attention: give a name such as 'taylor4-l2', or kernel= and normalizer=.")
    if attention is not None and (kernel is not None or normalizer is not None):
        raise InvalidArgument("swap_attention: give either a name or kernel= and normalizer=, not both.")
    if attention is not None and not isinstance(attention, str):
        raise InvalidArgument(
            f"swap_attention: attention is a name such as 'taylor4-l2', not {attention!r}; parts are given as kernel= "
            "and normalizer=."
        )
    if layers is not None and not (isinstance(layers, Collection) and all(isinstance(one, int) for one in layers)):
        raise InvalidArgument(f"swap_attention: layers are the numbers of some layers, such as [0, 1], not {layers!r}.")
    named = (Exp(), Sum()) if attention is None else parse_attention(attention.removeprefix(PREFIX))
    parts = Parts(named[0] if kernel is None else kernel, named[1] if normalizer is None else normalizer, structure)
    check(parts)
    _refuse_deaf(model)
    sites = _sites(model, inputs) if missing(parts.kernel) else []
    numbers = None if layers is None else frozenset(layers)
    if numbers is not None:
        found = {getattr(m, "layer_idx", None) for m in model.modules()} - {None}
        if not numbers <= found:
            raise InvalidArgument(
                f"swap_attention: the model has layers {sorted(found)}, not {sorted(numbers - found)}."
            )
        sites = [site for site in sites if site.module.layer_idx in numbers]
    if attention is not None and structure is None and numbers is None and not leave_out_dropout:
        name = register(attention)
    else:
        name = f"{PREFIX}swapped-{next(_NUMBERS)}"
        AttentionInterface.register(name, AttentionFunction(name, parts, numbers, leave_out_dropout))
        AttentionMaskInterface.register(name, mask_function)
    unbind(model)
    bind(parts.kernel, sites, seed)
    model.set_attn_implementation(name)
    return model


def load_kernel_tensors(model: PreTrainedModel, folder: str | Path) -> None:
    """Read back the tensors of a swapped model's kernels from what `save_pretrained` wrote.

    Raises:
        InvalidArgument: the model has no such tensors: call :func:`swap_attention` first.
        StorageError: the folder does not hold all of them, in their shapes.
    """
    wanted = {f"{name}.{tensor}": value for name, held in holders(model) for tensor, value in held.state_dict().items()}
    if not wanted:
        raise InvalidArgument("load_kernel_tensors: this model has no kernel tensors; call swap_attention first.")
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    found: dict[str, Tensor] = {}
    for file in files:
        if not (folder / file).exists():
            raise StorageError(f"{folder} has no {file}.")
        with safe_open(folder / file, "pt") as opened:
            held = opened.keys()
            found |= {name: opened.get_tensor(name) for name in held if name in wanted}
    wrong = [n for n, value in wanted.items() if n not in found or found[n].shape != value.shape]
    if wrong:
        raise StorageError(f"{folder} does not hold {wrong[0]} {list(wanted[wrong[0]].shape)} of this model's kernels.")
    model.load_state_dict(found, strict=False)


def _refuse_deaf(model: PreTrainedModel) -> None:
    """Where attention cannot be chosen, transformers warns and goes on with the model's own; here it is an error."""
    deaf = {
        type(m).__name__
        for m in model.modules()
        if isinstance(m, PreTrainedModel) and not m._can_set_attn_implementation()
    }
    if deaf:
        raise Unsupported(
            f"This model computes its attention itself ({', '.join(sorted(deaf))}) and does not let it be chosen: use "
            "a model of transformers that supports attn_implementation."
        )

    kinds = {type(module) for module in model.modules()}
    if not any("ALL_ATTENTION_FUNCTIONS" in _source(kind) for kind in kinds):
        raise Unsupported(f"{type(model).__name__} has no attention to swap.")


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # defined where there is no file, such as a prompt
        return "ALL_ATTENTION_FUNCTIONS"


def _sites(model: PreTrainedModel, inputs: dict[str, Any] | None) -> list[Site]:
    """The attention modules of a model, in the order in which a forward pass calls them."""
    given = model.dummy_inputs if inputs is None else inputs
    given = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in given.items()}
    before = model.config._attn_implementation
    recorder = Recorder(AttentionFunction(_PROBE, Parts(Exp(), Sum())))
    AttentionInterface.register(_PROBE, recorder)
    AttentionMaskInterface.register(_PROBE, mask_function)
    training = [module for module in model.modules() if module.training]
    try:
        model.set_attn_implementation(_PROBE)
        model.eval()
        with torch.no_grad():
            model(**given)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        if isinstance(error, InvalidArgument | Unsupported):
            raise
        raise InvalidArgument(
            f"swap_attention: the model does not run on {sorted(given)} ({error}): pass inputs=, the arguments of one "
            "forward pass, so that its attention modules can be found."
        ) from error
    finally:
        model.set_attn_implementation(before)
        for module in training:
            module.training = True
    return list(recorder.sites.values())
