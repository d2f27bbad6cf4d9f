"""Features that do not depend on the token: order 0 is a mean, and sends no gradient to queries and keys."""

import pytest
import torch

from mercer.core.kernels import Taylor
from mercer.core.structures import Causal, Full, Structure
from mercer.ops import attention


@pytest.mark.parametrize("structure", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_order_zero_by_features(structure: Structure, form: str, generator: torch.Generator):
    q, k, v = (torch.randn(1, 2, 5, 3, generator=generator, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, kernel=Taylor(0), structure=structure, form=form, path="features")
    torch.testing.assert_close(out[:, :, -1], v.mean(2))
    grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
    assert all(g is None or not g.any() for g in grads[:2])
    assert grads[2].any()
