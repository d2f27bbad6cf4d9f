"""Generation through states equals the full forward."""

from itertools import pairwise

import pytest
import torch

from mercer.core.state import CacheState
from mercer.errors import InvalidArgument, NonFinite, Unsupported
from mercer.inference.generate import complete, generate, stream
from mercer.inference.sampler import Sampling
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

PROMPT = list(b"The kernel of")
MODELS = {
    "softmax": {},
    "elu": {"attention": "elu-sum"},
    "taylor": {"attention": "taylor2-l2", "position": "none"},
    "exp-l2": {"attention": "exp-l2", "gain": "head"},
    "pattern": {"attention": ["elu-sum", "softmax"], "kv_heads": 2},
    "window": {"window": 5},
    "strided": {"structure": "strided(4)"},
    "sparse": {
        "structure": ["window(4) | global(first=2)", "bigbird(3, random=1, causal=true)"],
        "attention": "exp-l2",
    },
    "alibi": {"position": "alibi"},
    "learned": {"position": "learned", "max_length": 64},
    "sinusoidal": {"position": "sinusoidal"},
}


def build(**fields):
    # Large initial weights make the likeliest token depend on the context.
    config = {"vocab_size": 256, "dim": 32, "layers": 2, "heads": 4, "init_std": 0.4} | fields
    return DecoderLM(ModelConfig(**config)).eval()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_argmax_of_the_full_forward(name):
    model = build(**MODELS[name])
    tokens = list(generate(model, PROMPT, 24, Sampling(0.0), prefill=5))
    assert len(tokens) == 24
    assert len(set(tokens)) > 1
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens]))[0]
    assert logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist() == tokens


@pytest.mark.parametrize("structure", ["bigbird(4)", ["causal", "randomblocks(4) | window(3)"]])
def test_a_structure_that_no_state_continues_is_refused_before_anything_is_read(structure):
    model = build(structure=structure)
    number = 1 if isinstance(structure, str) else 2
    with pytest.raises(Unsupported, match=rf"of layer {number} depends on the length, .* bigbird\(size, causal=true\)"):
        generate(model, PROMPT, 4)
    with pytest.raises(Unsupported, match="a state cannot continue it"):
        model(torch.tensor([PROMPT]), return_states=True)
    assert model(torch.tensor([PROMPT])).isfinite().all()


@pytest.mark.parametrize("prefill", [1, 4, 13, 512])
def test_the_pieces_of_the_prompt_do_not_matter(prefill):
    model = build(attention=["elu-sum", "softmax"])
    sampling = Sampling(0.8, top_k=20)
    expected = list(generate(model, PROMPT, 16, sampling, seed=3))
    assert list(generate(model, torch.tensor(PROMPT), 16, sampling, seed=3, prefill=prefill)) == expected
    assert list(generate(model, PROMPT, 16, sampling, seed=4)) != expected


def test_a_longer_generation_begins_with_the_shorter_and_comes_one_at_a_time():
    model = build()
    stream = generate(model, PROMPT, 10, seed=5)
    assert next(stream) == next(generate(model, PROMPT, 1, seed=5))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert len(list(stream)) == 9
    assert list(generate(model, PROMPT, 0)) == []


@pytest.mark.parametrize(("attention", "constant"), [("elu-sum", True), ("softmax", False)])
def test_memory_is_the_states(attention, constant, monkeypatch):
    model = build(attention=attention)
    sizes = []
    hidden = DecoderLM.hidden

    def watched(self, tokens, **keywords):
        last, states = hidden(self, tokens, **keywords)
        sizes.append(sum(state.nbytes for state in states))
        assert all(isinstance(state, CacheState) is not constant for state in states)
        return last, states

    monkeypatch.setattr(DecoderLM, "hidden", watched)
    list(generate(model, PROMPT, 8))
    growth = {after - before for before, after in pairwise(sizes)}
    assert growth == {0} if constant else min(growth) >= 2 * 2 * 32 * 4  # two layers, keys and values, 32 channels


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, r"the prompt has shape \[0\]; give at least one token"),
        ([[1, 2]], {}, r"the prompt has shape \[1, 2\]"),
        ([1, 256], {}, r"the prompt has tokens outside 0..255"),
        ([-1], {}, r"the prompt has tokens outside 0..255"),
        (torch.tensor([1.7, 2.2]), {}, r"the prompt has dtype torch.float32; tokens are whole numbers"),
        ([1.7, 2], {}, r"tokens are whole numbers"),
        (torch.tensor([True, False]), {}, r"the prompt has dtype torch.bool"),
        ([1, None], {}, r"the prompt must be whole numbers in one dimension \("),
        ([2**70], {}, r"the prompt must be whole numbers in one dimension \("),
        ([1], {"max_tokens": -1}, r"max_tokens=-1"),
        ([1], {"prefill": 0}, r"prefill=0"),
        ([1], {"max_tokens": 2.5}, r"max_tokens=2.5 .* whole numbers"),
        ([1], {"max_tokens": True}, r"max_tokens=True"),
        ([1], {"seed": "1"}, r"seed is '1'; it is a whole number"),
        ([1], {"seed": [1.5]}, r"seed is 1.5; it is a whole number"),
        ([1], {"seed": 2**64}, r"seed is 18446744073709551616; it is a whole number of 64 bits"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_runs(prompt, options, message):
    with pytest.raises(InvalidArgument, match=message):
        generate(build(), prompt, **{"max_tokens": 1} | options)


def test_numbers_of_logprobs_are_whole():
    with pytest.raises(InvalidArgument, match="logprobs=True: from 0 to the vocabulary's 256"):
        stream(build(), [[1]], 1, logprobs=True)


def test_logprobs_of_a_model_that_is_broken_are_no_numbers():
    model = build()
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    with pytest.raises(NonFinite, match="the model's logits are not finite"):
        complete(model, [[1, 2, 3]], 0, logprobs=1, echo=True)


def test_learned_positions_that_do_not_reach_are_refused_before_anything_runs():
    model = build(position="learned", max_length=20)
    assert len(list(generate(model, PROMPT, 8))) == 8  # 13 + 7 are read
    with pytest.raises(InvalidArgument, match=r"for max_length=20 tokens, .* by max_tokens=9; at most 8 can follow"):
        generate(model, PROMPT, 9)
    with pytest.raises(InvalidArgument, match=r"a prompt of 26 by max_tokens=1; give at most 20 tokens"):
        generate(model, PROMPT * 2, 1)
    assert list(generate(model, PROMPT * 2, 0)) == []
    for position in ("alibi", "none"):
        assert len(list(generate(build(position=position, max_length=20), PROMPT, 9))) == 9


@pytest.mark.parametrize(
    ("position", "fix"), [("rotary", r"rope_scaling=\.\.\. scales"), ("sinusoidal", "allow_longer=True")]
)
def test_positions_that_were_not_trained_so_far_are_refused_unless_they_may_run_on(position, fix):
    model = build(position=position, max_length=20)
    assert len(list(generate(model, PROMPT, 8))) == 8
    with pytest.raises(InvalidArgument, match=rf"{position} positions for max_length=20 tokens, .*{fix}"):
        generate(model, PROMPT, 9)
    assert len(list(generate(model.with_positions(allow_longer=True), PROMPT, 9))) == 9


def test_a_scaling_carries_generation_on():
    model = build(position="rotary", max_length=20)
    longer = model.with_positions(rope_scaling={"rope_type": "yarn", "factor": 2})
    assert len(list(generate(longer, PROMPT, 28))) == 28
    with pytest.raises(InvalidArgument, match=r"for 40 tokens, .* at most 28 can follow"):
        generate(longer, PROMPT, 29)
