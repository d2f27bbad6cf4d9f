"""Linear attention and its decayed kin against recurrences written out by hand, as in their papers."""

import pytest
import torch
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.kernels import Elu, Kernel, Power, Relu, Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.normalizers import Identity
from mercer.core.structures import Causal
from mercer.ops import attention

B, H, L, D, DV = 2, 3, 19, 4, 5
CELLS = [("chunked", "features"), ("recurrent", "features"), ("dense", "pairs"), ("chunked", "pairs")]


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(B, H, L, d, generator=generator, dtype=torch.float64).requires_grad_() for d in (D, D, DV)]


def recurrence(phi_q: Tensor, phi_k: Tensor, v: Tensor, gates: Tensor, divide: bool) -> Tensor:
    """S_t = g_t S_{t-1} + phi(k_t) v_t^T,  z_t = g_t z_{t-1} + phi(k_t),  o_t = S_t^T phi(q_t) [/ z_t . phi(q_t)]."""
    sums = v.new_zeros(B, H, phi_k.shape[-1], DV)
    mass = v.new_zeros(B, H, phi_k.shape[-1])
    rows = []
    for t in range(L):
        sums = gates[..., t, None, None] * sums + torch.einsum("bhf,bhd->bhfd", phi_k[:, :, t], v[:, :, t])
        mass = gates[..., t, None] * mass + phi_k[:, :, t]
        row = torch.einsum("bhf,bhfd->bhd", phi_q[:, :, t], sums)
        if divide:
            row = row / torch.einsum("bhf,bhf->bh", phi_q[:, :, t], mass).unsqueeze(-1)
        rows.append(row)
    return torch.stack(rows, 2)


def compare(out: Tensor, expected: Tensor, leaves: list[Tensor], what: str) -> None:
    assert_close(out, expected, L, what)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, got = (torch.autograd.grad(o, leaves, cotangent) for o in (expected, out))
    for g, w in zip(got, wanted, strict=True):
        assert_close(g, w, L, f"{what}: gradient")


@pytest.mark.parametrize(("form", "path"), CELLS)
def test_linear_transformer(form: str, path: str):
    """Katharopoulos et al. 2020, equations 16 to 20."""
    q, k, v = tensors()
    phi = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    expected = recurrence(*phi, v, torch.ones(B, H, L, dtype=torch.float64), divide=True)
    compare(attention(q, k, v, kernel=Elu(), structure=Causal(), form=form, path=path), expected, [q, k, v], "elu")


@pytest.mark.parametrize(("form", "path"), CELLS)
def test_retention(form: str, path: str):
    """RetNet before its group norm: gamma_h = 1 - 2^(-5 - h), no denominator, by rates and by slopes."""
    q, k, v = tensors()
    gamma = 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))
    linear = {"kernel": Power(1), "normalizer": Identity(), "scale": 1.0, "form": form, "path": path}
    for structure in (Causal() & Decay(gamma), Causal() & Alibi(-gamma.log())):
        expected = recurrence(q, k, v, gamma.view(1, H, 1).expand(B, H, L), divide=False)
        compare(attention(q, k, v, structure=structure, **linear), expected, [q, k, v], str(structure))


@pytest.mark.parametrize("kernel", [Relu(), Elu()], ids=str)
@pytest.mark.parametrize(("form", "path"), CELLS)
def test_gates_from_data(form: str, path: str, kernel: Kernel):
    """A scalar gate a head and token, gradients into it included."""
    q, k, v = tensors()
    gates = (
        torch.rand(B, H, L, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 0.6 + 0.3
    ).requires_grad_()
    mapped = kernel.map_query(q), kernel.map_key(k)
    expected = recurrence(*mapped, v, gates, divide=False)
    out = attention(
        q, k, v, kernel=kernel, normalizer=Identity(), structure=Causal() & Decay(gates), form=form, path=path
    )
    compare(out, expected, [q, k, v, gates], "gates")


@pytest.mark.parametrize(("form", "path"), CELLS)
def test_softmax_as_a_sum_of_recurrences(form: str, path: str):
    """Mongaras and Larson 2025: order 2 is three recurrences over 1, k and k (x) k, with 1, 1 and 1/2 before them."""
    q, k, v = tensors()
    scale = D**-0.5

    def powers(x: Tensor) -> Tensor:
        square = torch.einsum("bhti,bhtj->bhtij", x, x).flatten(-2)
        return torch.cat((torch.ones_like(x[..., :1]), x, square / 2**0.5), -1)

    expected = recurrence(powers(q * scale), powers(k), v, torch.ones(B, H, L, dtype=torch.float64), divide=True)
    compare(
        attention(q, k, v, kernel=Taylor(2), structure=Causal(), form=form, path=path), expected, [q, k, v], "order 2"
    )
