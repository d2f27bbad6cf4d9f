"""A token whose decay forgets everything begins a sequence of its own, however steep the logarithm is."""

import pytest
import torch

from mercer import Causal, Decay, Exp, Identity, Mixed, Power, Sum, Taylor, attention

LENGTH, RESET = 90, 37
CELLS = {
    "linear, chunked": (Power(1), Identity(), {"form": "chunked", "path": "features"}),
    "linear, recurrent": (Power(1), Identity(), {"form": "recurrent", "path": "features"}),
    "linear, pairs": (Power(1), Identity(), {"form": "chunked", "path": "pairs"}),
    "linear, dense": (Power(1), Identity(), {"form": "dense"}),
    "taylor, chunked": (Taylor(2), Sum(), {"form": "chunked", "path": "features"}),
    "softmax, chunked": (Exp(), Sum(), {"form": "chunked"}),
    "softmax, dense": (Exp(), Sum(), {"form": "dense"}),
    "two kernels": (Mixed(near=Exp(), far=Taylor(2), window=16), Sum(), {"form": "chunked", "path": "features"}),
}


@pytest.mark.parametrize("complement", [False, True])
@pytest.mark.parametrize("steep", [-1e4, -1e10, -1e30])
@pytest.mark.parametrize("name", CELLS)
def test_what_came_before_is_as_if_it_had_not(name, steep, complement, generator):
    kernel, normalizer, options = CELLS[name]
    query, key, value = torch.randn(3, 2, 2, LENGTH, 4, dtype=torch.float64, generator=generator)
    gentle = -0.1 * torch.rand(2, 2, LENGTH, dtype=torch.float64, generator=generator) - 0.01
    log_rate = gentle.clone()
    log_rate[:, :, RESET] = steep
    log_rate.requires_grad_()

    def run(at, logs):
        structure = Causal() & Decay(log_rate=logs[:, :, at], complement=complement)
        rows = (x[:, :, at] for x in (query, key, value))
        return attention(*rows, kernel=kernel, normalizer=normalizer, structure=structure, **options)

    out = run(slice(None), log_rate)
    if complement:  # what the token itself adds is weighed by 1 - rate, which is 1 for it
        gentle[:, :, RESET] = steep
    alone = torch.cat((run(slice(0, RESET), gentle), run(slice(RESET, None), gentle)), 2)
    torch.testing.assert_close(out, alone, rtol=1e-8, atol=1e-8)
    (grad,) = torch.autograd.grad(out.square().sum(), log_rate)
    assert grad.isfinite().all()
    assert grad[:, :, RESET].abs().max() < 1e-12
    assert grad[:, :, RESET + 1 :].any()
