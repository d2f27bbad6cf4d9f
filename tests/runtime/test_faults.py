"""Bad input of configurations is told in plain sentences that name the key, what it may be, and what was given."""

import pytest

from mercer.errors import InvalidArgument
from mercer.mixers.names import mixer_config
from mercer.models.config import ModelConfig
from mercer.training.config import TrainConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more, not 0"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"steps": "many"}, "steps must be a whole number, not 'many'"),
        ({"learning_rate": 0}, "learning_rate must be above 0, not 0"),
        ({"learning_rate": "x"}, "learning_rate must be a number, not 'x'"),
        ({"beta1": 1}, "beta1 must be below 1, not 1"),
        ({"floor": 1.5}, "floor must be 1 or less, not 1.5"),
        ({"device": 3}, "device must be text, not 3"),
        ({"step": 3}, "'step' is unknown (did you mean steps?)"),
        ({"steps": 0, "batch": 0}, "steps must be 1 or more, not 0; batch must be 1 or more, not 0"),
        ({"batch": 10, "accumulate": 4}, "accumulate=4 must divide batch=10"),
        ({"device": ["x" * 200]}, f"device must be text, not ['{'x' * 75}..."),
    ],
)
def test_of_training(values, message):
    with pytest.raises(InvalidArgument) as caught:
        TrainConfig(**values)
    assert str(caught.value) == f"training configuration: {message}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": 3}, "attention must be text or a list, not 3"),
        ({"attention": None}, "attention must be text or a list, not None"),
        ({"attention": ["softmax", 3]}, "attention.1 must be text, not 3"),
        ({"attention": []}, "attention needs at least one name"),
        ({"bias": "all"}, "bias must be true or false, or a list, not 'all'"),
        ({"norm": "x"}, "norm must be 'rms' or 'layer', not 'x'"),
        ({"tie_embeddings": "perhaps"}, "tie_embeddings must be true or false, not 'perhaps'"),
        ({"mixers": 3}, "mixers must be a mapping of names, not 3"),
        ({"experts": {"count": 0}}, "experts.count must be 1 or more, not 0"),
        ({"wings": 2}, "'wings' is unknown"),
    ],
)
def test_of_models(values, message):
    with pytest.raises(InvalidArgument) as caught:
        ModelConfig(vocab_size=10, **values)
    assert str(caught.value) == f"model configuration: {message}"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba", {"state": 0}, "state must be 1 or more, not 0"),
        ("mamba", {"inner_norms": 3}, "inner_norms must be 'learned' or 'plain', not 3"),
        ("rwkv4", {"wings": 1}, "'wings' is unknown; there are width"),
        ("s4d", {"step_least": 1.0, "step_most": 0.1}, "step_most 0.1 is below step_least 1"),
    ],
)
def test_of_mixers(name, options, message):
    with pytest.raises(InvalidArgument) as caught:
        mixer_config(name, options)
    assert str(caught.value) == f"the options of {name}: {message}"
