"""A linear map of low rank."""

from torch import Tensor, nn


class LowRank(nn.Module):
    """x -> W_up W_down x, from dim to outputs channels through `rank` of them: an adapter (Hu et al. 2021, arXiv
    2106.09685) where it is added to a linear layer.
    """

    def __init__(self, dim: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., outputs]."""
        return self.up(self.down(x))
