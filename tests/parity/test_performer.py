"""Positive random features against performer-pytorch, with the same directions.

Its epsilon is set to 0, since it breaks the cancellation of its stabilisers; what is left of them, a factor for each
query and one for all keys, cancels in the average.
"""

import pytest
import torch
from tests.tolerance import assert_close

from mercer.core.random_features import PositiveRandomFeatures
from mercer.ops import attention

performer = pytest.importorskip("performer_pytorch.performer_pytorch")
pytestmark = pytest.mark.peers


@pytest.mark.parametrize("norms", ["chi", "sqrt"])
def test_full_attention(norms: str, generator: torch.Generator):
    q, k, v = (torch.randn(2, 3, 40, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    kernel = PositiveRandomFeatures(48, norms=norms)
    directions = kernel.directions_for(16)
    phi_query = performer.softmax_kernel(q, projection_matrix=directions, is_query=True, eps=0)
    phi_key = performer.softmax_kernel(k, projection_matrix=directions, is_query=False, eps=0)
    expected = performer.linear_attention(phi_query, phi_key, v)
    for path in ("pairs", "features"):
        assert_close(attention(q, k, v, kernel=kernel, path=path), expected, 40 * 48, path)


def test_directions_are_drawn_alike():
    """The distribution of both: row norms, and the products between rows of one block, at the same sizes."""
    torch.manual_seed(0)
    theirs = torch.stack([performer.gaussian_orthogonal_random_matrix(24, 8) for _ in range(400)]).double()
    ours = torch.stack([PositiveRandomFeatures(24, seed=s).directions_for(8) for s in range(400)])
    for rows in (theirs, ours):
        block = rows[:, :8]
        inner = block @ block.mT
        assert float((inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max()) < 1e-4
    # Squared norms are chi-squared with 8 degrees of freedom: mean 8, variance 16. z-tests at 1e-6.
    n = 400 * 24
    for rows in (theirs, ours):
        square = rows.square().sum(-1)
        assert abs(float(square.mean() - 8)) < 4.892 * (16 / n) ** 0.5
        assert abs(float(square.var() - 16)) < 4.892 * ((12 * 8 * 12 - 16**2) / n) ** 0.5
