"""Diagonal state spaces, one for each channel."""

from __future__ import annotations

import math

import torch
from torch import nn

from mercer.errors import InvalidArgument
from mercer.mixers.diagonal_system import DiagonalSystem
from mercer.mixers.head_sizes import conjugate_pairs
from mercer.mixers.hippo import normal_and_low_rank
from mercer.mixers.state_space import StateSpace
from mercer.mixers.steps import rates

INITS, RULES = ("lin", "inv", "legs", "real"), ("zoh", "bilinear")


class S4D(StateSpace):
    """For each channel a state x of N numbers, which its input drives and it reads,

        x' = A x + u,   A diagonal,   s = C x + D u   in steps of dt,      y = glu(W gelu(s) + b)

    Discretised, x_t = a x_{t-1} + b u_t with a = exp(dt A), b = (a - 1) / A (rule="zoh"), or a = (1 + dt A / 2) /
    (1 - dt A / 2), b = dt / (1 - dt A / 2) (rule="bilinear"). B of the paper is all ones, since only C B counts.

    dim: channels of x and y. state: N; of complex numbers N/2 are kept, each for itself and its conjugate. init: A_n =
    -1/2 + i pi n ("lin"); -1/2 + i N/pi (N / (2n + 1) - 1) ("inv"); the eigenvalues of the normal part of HiPPO-LegS
    ("legs"); or -(n + 1), real ("real"). A is learned as -exp(log_rate) + i frequency, so that its real part stays
    negative, dt as exp(log_step). step_least, step_most: dt starts log-uniform between them; C and D come from N(0, 1).
    glu: whether W makes twice as many channels, of which half gate the others. form: see `mercer.mixers.state_space`.

    State: `state` [B, dim, N/2, 2], real and imaginary parts, or [B, dim, N, 1] for real A.

    Source: Gu et al. 2022, arXiv 2206.11893.
    """

    undecayed = ("log_rate", "frequency")

    def __init__(
        self,
        dim: int,
        *,
        state: int = 64,
        init: str = "lin",
        rule: str = "zoh",
        step_least: float = 0.001,
        step_most: float = 0.1,
        glu: bool = True,
        form: str = "auto",
    ) -> None:
        if init not in INITS or rule not in RULES:
            raise InvalidArgument(
                f"s4d: init must be one of {', '.join(INITS)} and rule one of {', '.join(RULES)}, not {init!r} and "
                f"{rule!r}"
            )
        shape = (state, 1) if init == "real" else (conjugate_pairs("s4d", state, f" for init {init!r}"), 2)
        super().__init__(dim, shape=shape, form=form, glu=glu)
        self.init, self.rule, self.steps = init, rule, (step_least, step_most)
        self.log_rate = nn.Parameter(torch.empty(dim, shape[0]))
        self.frequency = None if init == "real" else nn.Parameter(torch.empty(dim, shape[0]))
        self.read = nn.Parameter(torch.empty(dim, *shape))
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Set A, and draw dt, C and D."""
        self._start_common(*self.steps, generator)
        number = torch.arange(self.shape[0], dtype=torch.float64)
        self.log_rate.fill_(math.log(0.5))
        if self.frequency is None:
            self.log_rate.copy_((number + 1).log())
        elif self.init == "lin":
            self.frequency.copy_(math.pi * number)
        elif self.init == "inv":
            size = 2 * self.shape[0]
            self.frequency.copy_(size / math.pi * (size / (2 * number + 1) - 1))
        else:
            self.frequency.copy_(torch.from_numpy(normal_and_low_rank(2 * self.shape[0])[0].imag.copy()))
        self.read.normal_(std=self.shape[1] ** -0.5, generator=generator)  # |C|^2 is 1 on average

    @property
    def kind(self) -> str:
        return (
            f"s4d({self.dim}, state={self.shape[0] * self.shape[1]}, {'real' if self.frequency is None else 'complex'})"
        )

    def system(self, dtype: torch.dtype) -> DiagonalSystem:
        turning, read = -rates(self.log_rate, torch.float64), self.read.double()
        if self.frequency is None:
            read = read.squeeze(-1)
        else:
            turning, read = torch.complex(turning, self.frequency.double()), torch.view_as_complex(read)
        return DiagonalSystem(turning, read, rates(self.log_step, torch.float64), self.rule, dtype)
