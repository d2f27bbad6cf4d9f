"""The Decision Transformer of transformers and the same here, in whole episodes and step by step."""

import json

import pytest
import torch
from tests.checkpoints.measure import BOUND, error, gradient_error, hidden_error, written_error
from tests.checkpoints.zoo import make

from mercer import checkpoints
from mercer.errors import InvalidArgument
from mercer.models.decision import DecisionTransformer
from mercer.models.decision_config import DecisionConfig

pytestmark = pytest.mark.peers

_SHAPE = {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 3, "n_head": 4, "max_ep_len": 64}
_SHAPE |= {"n_positions": 48, "bos_token_id": 0, "eos_token_id": 0}
MODELS = {
    "bounded": _SHAPE,
    "unbounded": _SHAPE | {"action_tanh": False, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-3},
}
SETTINGS = {"dim": 32, "layers": 2, "heads": 4, "observed": 5, "actions": 3}


def episodes(length=9, rows=2):
    """Returns, observations, actions and steps; the two rows begin at other steps."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(rows, length, size, generator=generator) for size in (1, 5, 3)]
    return (*drawn, torch.arange(length) + torch.tensor([[4], [17]]))


def answer(model, given, padding=None):
    """Everything that a model of transformers predicts, side by side."""
    returns, states, actions, steps = given
    mask = None if padding is None else padding.long()
    result = model(
        states=states, actions=actions, returns_to_go=returns, timesteps=steps, attention_mask=mask, rewards=None
    )
    return torch.cat((result.action_preds, result.state_preds, result.return_preds), -1)


class Joined:
    """A model of ours whose call gives its predictions side by side."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *given, **options):
        return torch.cat(self.model(*given, **options), -1)

    def __getattr__(self, name):
        return getattr(self.model, name)


@pytest.fixture
def pair(request, tmp_path):
    theirs = make("DecisionTransformerModel", MODELS[getattr(request, "param", "bounded")], tmp_path / "model")
    return theirs, checkpoints.load(tmp_path / "model")


@pytest.mark.parametrize("pair", MODELS, indirect=True)
def test_a_loaded_model_is_the_model_that_was_saved(pair, tmp_path, record_property):
    theirs, plain = pair
    ours, given = Joined(plain), episodes()
    returns, states, actions, steps = given
    with torch.no_grad():
        errors = {"answer": error(ours(*given), answer(theirs, given))}
        result = theirs(
            states=states, actions=actions, returns_to_go=returns, timesteps=steps, output_hidden_states=True
        )
        errors["hidden"] = hidden_error(lambda: plain(*given), plain.blocks, result.hidden_states)
        errors["steps"] = error(stepwise(plain, given), answer(theirs, given))
    folder = tmp_path / "model"
    errors["written"] = written_error(plain, theirs, folder, lambda model: answer(model, given))
    errors["gradients"] = gradient_error(ours, theirs, lambda model: answer(model, given), given, folder)
    record_property("errors", json.dumps(errors))  # for the page of them all, scripts/parity_docs.py
    assert max(errors.values()) < BOUND, errors


def stepwise(model, given, start=3):
    """All predictions, the first steps in one call and the others one by one."""
    returns, observations, actions, steps = given
    first, states = model(*(each[:, :start] for each in given), return_states=True)
    found = [torch.cat(first, -1)]
    for t in range(start, steps.shape[1]):
        action, states = model.act(returns[:, t], observations[:, t], steps[:, t], states=states)
        following, states = model.took(actions[:, t], steps[:, t], states)
        found.append(torch.cat((action, *following), -1).unsqueeze(1))
    return torch.cat(found, 1)


def test_an_episode_from_its_first_observation(pair):
    _, model = pair
    given = episodes()
    with torch.no_grad():
        returns, observations, _, steps = given
        action, states = model.act(returns[:, 0], observations[:, 0], steps[:, 0])
        assert error(action, model(*given).actions[:, 0]) < BOUND
        _, states = model.took(given[2][:, 0], steps[:, 0], states)
        rest, _ = model(*(each[:, 1:] for each in given), states=states, return_states=True)
        assert error(Joined(lambda: rest)(), Joined(model)(*given)[:, 1:]) < BOUND


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_masked_steps_change_nothing(pair, side):
    theirs, ours = pair
    given = episodes(length=6)
    width = 10
    real = {"left": torch.arange(width) >= 4, "right": torch.arange(width) < 6, "holes": torch.arange(width) % 5 > 1}
    padding = real[side].expand(2, width)
    filled = episodes(length=width)
    wide = []
    for short, filler in zip(given, filled, strict=True):
        wide.append(filler.clone())
        wide[-1][:, real[side]] = short
    with torch.no_grad():
        alone = answer(theirs, given)
        assert error(Joined(ours)(*wide, padding=padding)[:, real[side]], alone) < BOUND
        assert error(answer(theirs, wide, padding)[:, real[side]], alone) < BOUND
        # A padded past is continued by real steps.
        more = episodes(length=8)
        _, states = ours(*wide, padding=padding, return_states=True)
        _, again = ours(*given, return_states=True)
        action, _ = ours.act(more[0][:, 7], more[1][:, 7], more[3][:, 7], states=states)
        wanted, _ = ours.act(more[0][:, 7], more[1][:, 7], more[3][:, 7], states=again)
        assert error(action, wanted) < BOUND


@pytest.mark.parametrize("attention", ["taylor2-sum", "elu-sum"])
def test_attention_is_swapped(pair, tmp_path, attention):
    _, plain = pair
    given = episodes()
    swapped = checkpoints.load(tmp_path / "model", attention=attention)
    with torch.no_grad():
        whole = Joined(swapped)(*given)
        assert torch.equal(whole, Joined(plain.with_attention(attention))(*given))
        assert not torch.allclose(whole, Joined(plain)(*given))
        assert error(stepwise(swapped, given), whole) < 1e-4


def test_inputs_that_do_not_fit():
    model = DecisionTransformer(DecisionConfig(**SETTINGS, max_length=20))
    returns, observations, actions, _ = episodes()
    steps = torch.arange(9).expand(2, 9)
    with pytest.raises(InvalidArgument, match="returns must be floating-point numbers, 1 for each of 2 x 9 steps"):
        model(returns[:, :, 0], observations, actions, steps)
    with pytest.raises(InvalidArgument, match=r"actions must be .* got torch.int64 \[2, 9, 3\]"):
        model(returns, observations, actions.long(), steps)
    with pytest.raises(InvalidArgument, match="steps must be integers, one for each step"):
        model(returns, observations, actions, steps.float())
    with pytest.raises(InvalidArgument, match="position 28 was asked of a learned table of 20"):
        model(returns, observations, actions, steps + 20)
    with pytest.raises(InvalidArgument, match=r"padding must be bool \[2, 9\], got torch.bool \[2, 8\]"):
        model(returns, observations, actions, steps, padding=torch.ones(2, 8, dtype=torch.bool))


def test_tokens_out_of_turn_are_refused():
    model = DecisionTransformer(DecisionConfig(**SETTINGS))
    returns, observations, actions, steps = (each[:, 0] for each in episodes())
    _, states = model.act(returns, observations, steps)
    with pytest.raises(InvalidArgument, match="the last observation has no action yet"):
        model.act(returns, observations, steps + 1, states=states)
    with pytest.raises(InvalidArgument, match="whole steps follow an action"):
        model(*episodes(), states=states)
    _, states = model.took(actions, steps, states)
    with pytest.raises(InvalidArgument, match="an action follows an observation"):
        model.took(actions, steps, states)
    with pytest.raises(InvalidArgument, match="a state for each of its 2 layers, got 1"):
        model.act(returns, observations, steps, states=states[:1])
