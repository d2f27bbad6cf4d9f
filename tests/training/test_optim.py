"""The schedule and which parameters decay."""

from itertools import pairwise

import pytest
import torch
from tests.training.tiny import Tiny

from mercer.errors import InvalidArgument
from mercer.training.config import TrainConfig
from mercer.training.optim import decays, learning_rate, make_optimizer


def test_warm_up_then_cosine_to_the_floor():
    config = TrainConfig(steps=101, warmup=10, learning_rate=1.0, floor=0.2)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.6)  # half-way between the peak and the floor
    assert rates[100] == 0.2
    assert all(a > b for a, b in pairwise(rates[10:]))


@pytest.mark.parametrize(("steps", "warmup", "last"), [(1, 0, 0.1), (1, 1, 1.0), (2, 1, 0.1), (5, 5, 1.0)])
def test_short_runs(steps, warmup, last):
    config = TrainConfig(steps=steps, warmup=warmup, learning_rate=1.0, floor=0.1)
    assert learning_rate(steps - 1, config) == pytest.approx(last)


def test_the_default_warm_up():
    assert TrainConfig(steps=300).warmup_steps == 30
    assert TrainConfig(steps=10_000).warmup_steps == 100
    assert TrainConfig(steps=5).warmup_steps == 0


def test_matrices_decay_and_nothing_else():
    model = Tiny()
    named = {name: decays(name, parameter) for name, parameter in model.named_parameters()}
    assert named == {"embedding.weight": True, "mix.weight": True, "mix.bias": False, "gain": False}


def test_with_a_zero_gradient_only_the_decaying_ones_shrink():
    model = Tiny()
    config = TrainConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer, form = make_optimizer(model, config, torch.device("cpu"))
    assert form == "fused"
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if decays(name, parameter) else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more"),
        ({"batch": 10, "accumulate": 4}, "accumulate=4 must divide batch=10"),
        ({"steps": 5, "warmup": 6}, "warmup=6 must not exceed steps=5"),
        ({"learning_rat": 1}, "'learning_rat' is unknown"),
        ({"dtype": "float16"}, "dtype must be 'float32' or 'bfloat16', not 'float16'"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number, not nan"),
        ({"clip": float("inf")}, "clip must be a finite number"),
        ({"epsilon": float("inf")}, "epsilon must be a finite number"),
    ],
)
def test_a_wrong_recipe_is_one_sentence(values, message):
    with pytest.raises(InvalidArgument, match=f"^training configuration: {message}"):
        TrainConfig(**values)
