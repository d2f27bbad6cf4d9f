"""Structured state spaces: HiPPO's matrix for each channel, as a diagonal one minus one of rank one."""

from __future__ import annotations

import torch
from torch import nn

from mercer.mixers.head_sizes import conjugate_pairs
from mercer.mixers.hippo import normal_and_low_rank
from mercer.mixers.low_rank_system import LowRankSystem
from mercer.mixers.state_space import StateSpace
from mercer.mixers.steps import rates


class S4(StateSpace):
    """For each channel a state x of N numbers that starts as HiPPO-LegS, a memory of all of its past input,

        x' = A x + B u,   s = C x + D u   in steps of dt by the bilinear rule,      y = glu(W gelu(s) + b)

    with A = V (diag(rates) - p p*) V*, V unitary and fixed: x is kept, and A learned, in its basis. A token takes O(N)
    by Woodbury's identity; a kernel of L tokens comes from Cauchy matrices at roots of unity, by the same identity.

    dim: channels of x and y. state: N, an even number; one of each pair of conjugate numbers is kept. step_least,
    step_most: dt starts log-uniform between them; C and D come from N(0, 1). glu: whether W makes twice as many
    channels, of which half gate the others. form: see `mercer.mixers.state_space`.

    The rates are learned as -exp(log_rate) + i frequency. With that, and one p on both sides, A is stable whatever is
    learned (Goel et al. 2022, arXiv 2202.09729); the first S4 learned two, and could leave what is stable.

    State: `state` [B, dim, N/2, 2], real and imaginary parts.

    Source: Gu et al. 2021, arXiv 2111.00396.
    """

    undecayed = ("log_rate", "frequency", "low", "write")

    def __init__(
        self,
        dim: int,
        *,
        state: int = 64,
        step_least: float = 0.001,
        step_most: float = 0.1,
        glu: bool = True,
        form: str = "auto",
    ) -> None:
        super().__init__(dim, shape=(conjugate_pairs("s4", state), 2), form=form, glu=glu)
        self.steps = (step_least, step_most)
        self.log_rate, self.frequency = (nn.Parameter(torch.empty(dim, state // 2)) for _ in range(2))
        self.low, self.write, self.read = (nn.Parameter(torch.empty(dim, state // 2, 2)) for _ in range(3))
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Set A and B, and draw dt, C and D."""
        self._start_common(*self.steps, generator)
        rates, low, write, _ = (torch.from_numpy(x) for x in normal_and_low_rank(2 * self.shape[0]))
        self.log_rate.copy_((-rates.real).log())
        self.frequency.copy_(rates.imag)
        self.low.copy_(torch.view_as_real(low))
        self.write.copy_(torch.view_as_real(write))
        self.read.normal_(std=0.5**0.5, generator=generator)  # |C|^2 is 1 on average

    @property
    def kind(self) -> str:
        return f"s4({self.dim}, state={2 * self.shape[0]})"

    def system(self, dtype: torch.dtype) -> LowRankSystem:
        low, write, read = (torch.view_as_complex(x.double()) for x in (self.low, self.write, self.read))
        all_rates = torch.complex(-rates(self.log_rate, torch.float64), self.frequency.double())
        return LowRankSystem(all_rates, low, write, read, rates(self.log_step, torch.float64), dtype)
