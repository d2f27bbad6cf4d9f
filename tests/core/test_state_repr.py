"""States show what they hold, not the numbers."""

import torch

from mercer import Causal, Exp, Mixed, Taylor, attention


def test_tensors_are_told_by_dtype_and_shape():
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    given = {"structure": Causal(), "return_state": True}
    cache = attention(query, key, value, kernel=Exp(), **given)[1]
    assert repr(cache) == (
        "CacheState(keys=float32[1, 2, 5, 8], values=float32[1, 2, 5, 8], length=int64[1], valid=None, log=None)"
    )
    sums = attention(query, key, value, kernel=Taylor(2), **given)[1]
    assert "features=float32[1, 2, 45, 8]" in repr(sums)
    assert "kernel='Taylor(order=2, signed=False)'" in repr(sums)
    mixed = attention(query, key, value, kernel=Mixed(Exp(), Taylor(2), window=3), **given)[1]
    assert repr(mixed).startswith("MixedState(near=CacheState(keys=")
