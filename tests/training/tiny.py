"""A small module with a loss, and text, for tests of the loop that do not depend on the language model."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from mercer.training.config import TrainConfig


class Tiny(nn.Module):
    """Predicts a byte from the mean of the bytes so far: two matrices, a tied output, a gain and a bias."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(256, dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.output = nn.Linear(dim, 256, bias=False)
        self.output.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(2, dim))
        with torch.no_grad():
            for parameter in (self.embedding.weight, self.mix.weight, self.mix.bias):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(1)
        return self.output(torch.tanh(self.mix(torch.cat((x, mean), -1))) * self.gain.sum(0))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())


RECIPE = TrainConfig(
    steps=60, batch=4, length=24, learning_rate=0.01, log_every=7, eval_every=20, eval_windows=4, checkpoint_every=13
)


def write_text(folder: Path) -> Path:
    """Three files of words and numbers, enough for RECIPE."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, start in (("a.txt", 0), ("b.txt", 1000), ("c.txt", 5000)):
        lines = (f"{i} squared is {i * i}, and café {i % 7} stays.\n" for i in range(start, start + 60))
        (folder / name).write_text("".join(lines), encoding="utf-8")
    return folder


def without_time(events: list[dict]) -> list[dict]:
    return [{key: value for key, value in event.items() if key != "time"} for event in events]
