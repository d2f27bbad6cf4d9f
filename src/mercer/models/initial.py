"""Initial weights that depend on the seed and a parameter's own name, and on nothing else."""

import hashlib

import torch
from torch import Tensor, nn

from mercer.nn.experts import ExpertLinear
from mercer.nn.positions import LearnedPositions
from mercer.nn.start import HasStart
from mercer.nn.t5 import T5Bias


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator seeded by SHA-256 of the seed and the name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def undrawn_embedding(count: int, dim: int) -> nn.Embedding:
    """An embedding whose numbers `initialise` draws or a file gives. torch's own draws them first, in a model without
    values too, where that alone imports torch's compiler.
    """
    return nn.Embedding.from_pretrained(torch.empty(count, dim), freeze=False)


def draw(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    """N(0, std^2) in float32 from a generator of its own."""
    return torch.randn(shape, generator=generator_of(seed, name)) * std


@torch.no_grad()
def initialise(model: nn.Module, *, std: float, seed: int, residual_outputs: int) -> None:
    """Draw every matrix of linear layers, convolutions, experts, embeddings, learned positions and T5's biases; biases
    of layers become 0, norms, gains and the tensors of kernels stay (those were drawn, from the same seed, when the
    kernel was bound).

    Linear layers named "output" write into the residual stream and get std / sqrt(residual_outputs) (GPT-2's rule), so
    that the stream's variance does not grow with depth. Modules with a start of their own set it after that.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding | ExpertLinear | LearnedPositions | T5Bias):
            continue
        if module.weight.is_meta:  # shapes alone are built, to be filled from a file
            continue
        narrow = path.rpartition(".")[2] == "output"
        name = f"{path}.weight"
        module.weight.copy_(draw(module.weight.shape, std / residual_outputs**0.5 if narrow else std, seed, name))
        if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
            module.bias.zero_()
    for path, module in model.named_modules():
        if isinstance(module, HasStart) and not any(p.is_meta for p in module.parameters()):
            module.start(generator_of(seed, f"{path}.start"))
