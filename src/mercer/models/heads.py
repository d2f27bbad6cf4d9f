"""What stands on an encoder: scores of tokens, and a pooled first token."""

import torch
from torch import Tensor, nn

from mercer.nn.activations import ACTIVATIONS
from mercer.nn.norms import LayerNorm, RMSNorm


class TokenHead(nn.Module):
    """norm(f(x W^T + b)) E^T + c: scores of all tokens by the embedding E (Devlin et al. 2018)."""

    def __init__(self, dim: int, vocab_size: int, norm: LayerNorm | RMSNorm, activation: str) -> None:
        super().__init__()
        self.dense, self.norm, self.activation = nn.Linear(dim, dim), norm, activation
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x: [..., dim], embedding: [vocab_size, dim]; returns [..., vocab_size]."""
        inner = self.norm(ACTIVATIONS[self.activation].apply(self.dense(x)))
        return nn.functional.linear(inner, embedding, self.bias)


class Pooler(nn.Linear):
    """tanh(W x_0 + b) of each sequence's first real token."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """x: [B, L, dim], padding: bool [B, L], True for real tokens; returns [B, dim]."""
        return torch.tanh(super().forward(first_tokens(x, padding)))


def first_tokens(x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The first real token of each sequence, [B, dim]."""
    if padding is None:
        return x[:, 0]
    return x[torch.arange(len(x), device=x.device), padding.to(torch.uint8).argmax(1)]


def mean_tokens(x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The mean of each sequence's real tokens [B, dim]; zeros where there are none."""
    if padding is None:
        return x.mean(1)
    real = padding.unsqueeze(-1)
    return x.masked_fill(~real, 0).sum(1) / real.sum(1).clamp_min(1)
