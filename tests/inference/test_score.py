"""The likelihood of a text, token by token."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.inference.test_generate import build
from tests.models.hub_tokenizers import byte_level

from mercer.errors import InvalidArgument, NonFinite
from mercer.inference.engine import prepare
from mercer.inference.reading import Reading
from mercer.inference.score import score
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig
from mercer.models.tokenizer import HubVocabulary
from mercer.models.vocabulary import BPE, Bytes

TEXT = b"The kernel of an attention is a kernel, a normaliser and a structure."
MODELS = {
    "softmax": {},
    "taylor2-sum": {"attention": "taylor2-sum", "position": "none"},
    "window": {"attention": ["softmax", "elu-sum"], "position": "alibi"},
    "learned": {"position": "learned", "max_length": 128},
}


@pytest.fixture(scope="module")
def models():
    return {name: build(**fields) for name, fields in MODELS.items()}


def literal(model, tokens, skipped, context, stride):
    """Each token by a forward of its own over the window that is to score it."""
    ends = [min(context, len(tokens))]
    while ends[-1] < len(tokens):
        ends.append(min(ends[-1] + stride, len(tokens)))
    out = []
    for i in range(skipped, len(tokens)):
        end = next(end for end in ends if i < end)
        with torch.no_grad():
            logits = model(torch.tensor([tokens[max(end - context, 0) : i]]))[0, -1].double()
        assert len(tokens[max(end - context, 0) : i]) >= min(i, context - stride)
        out.append(-float(logits.log_softmax(0)[tokens[i]]))
    return out


@settings(max_examples=25)
@given(st.data())
def test_every_token_once_with_its_context(models, data):
    model = models[data.draw(st.sampled_from(sorted(MODELS)))]
    text = data.draw(st.binary(min_size=2, max_size=40))
    context = data.draw(st.integers(2, 45))
    stride = data.draw(st.integers(1, context - 1))
    result = score(model, Bytes(), text, context=context, stride=stride, piece=data.draw(st.integers(1, 50)))
    assert result.nats.tolist() == pytest.approx(literal(model, list(text), 1, context, stride), abs=2e-4)
    assert (result.tokens, result.bytes) == (len(text) - 1, len(text) - 1)
    assert result.windows == 1 + max(0, math.ceil((len(text) - context) / stride))


def test_special_tokens_begin_every_window_and_are_not_scored():
    vocabulary = HubVocabulary(byte_level(), names={"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    (begin,) = vocabulary.beginning
    model = build(vocab_size=vocabulary.size)
    tokens = vocabulary.encode(TEXT).tolist()
    result = score(model, vocabulary, TEXT, context=9, stride=3)
    expected, first = [], 0
    for end in range(8, len(tokens) + 3, 3):
        window = tokens[max(min(end, len(tokens)) - 8, 0) : end]
        with torch.no_grad():
            logs = model(torch.tensor([[begin, *window]]))[0].double().log_softmax(-1)
        done = len(window) - (min(end, len(tokens)) - first)
        expected += [-float(logs[i, window[i]]) for i in range(done, len(window))]
        first = end
    assert result.nats.tolist() == pytest.approx(expected, abs=2e-4)
    assert (result.tokens, result.bytes) == (len(tokens), len(TEXT))


def test_the_numbers_follow_from_the_tokens():
    vocabulary = BPE.train([TEXT.decode() * 3], 300)
    model = build(vocab_size=300)
    result, seen = None, []
    result = score(model, vocabulary, TEXT, piece=5, progress=lambda done, total: seen.append((done, total)))
    tokens = vocabulary.encode(TEXT).tolist()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(torch.tensor([tokens]))[0, :-1], torch.tensor(tokens[1:]))
    assert result.loss == pytest.approx(float(loss), abs=1e-4)
    assert result.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)
    size = len(TEXT) - len(vocabulary.token_bytes(tokens[0]))
    assert result.bits_per_byte == pytest.approx(float(loss) * (len(tokens) - 1) / math.log(2) / size, abs=1e-4)
    assert seen[-1] == (len(tokens) - 1,) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    told = json.loads(json.dumps(result.to_dict()))
    assert (told["tokens"], told["context"], told["windows"]) == (len(tokens) - 1, len(tokens), 1)


def test_a_text_beyond_the_reach_is_read_in_windows_of_it():
    model = build(position="learned", max_length=16)
    result = score(model, Bytes(), TEXT)
    assert (result.context, result.stride, result.tokens) == (16, 8, len(TEXT) - 1)
    with pytest.raises(InvalidArgument, match="context=18 is beyond what the model reaches; at most 17 can be scored"):
        score(model, Bytes(), TEXT, context=18)
    assert score(model, Bytes(), TEXT, context=17).tokens == len(TEXT) - 1


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (b"", {}, "nothing to score"),
        (b"a", {}, "nothing to score"),
        (b"abc", {"context": 1}, "context=1 must be a whole number, and at least 2"),
        (b"abc", {"context": 2.5}, "context=2.5 must be a whole number"),
        (b"abc", {"context": 4, "stride": 4}, "stride=4 must be a whole number from 1 to 3, with context=4"),
        (b"abc", {"stride": 0}, "stride=0 must be a whole number from 1 to 2, with context=3"),
        (b"abc", {"piece": 0}, "piece=0 must be a whole number, and at least 1"),
        (b"abcdef", {"context": 4, "stride": 2.5}, "stride=2.5 must be a whole number"),
    ],
)
def test_what_cannot_be_scored(text, options, message):
    with pytest.raises(InvalidArgument, match=message):
        score(build(), Bytes(), text, **options)


def test_a_model_that_no_state_continues_is_scored_by_whole_windows():
    model = build(structure="bigbird(4)")
    assert model.config.refuses_states
    with torch.no_grad():
        logits = model(torch.tensor([list(TEXT[:-1])]))[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(list(TEXT[1:])), reduction="none")
    torch.testing.assert_close(score(model, Bytes(), TEXT, piece=9).nats, expected.double())
    two = score(model, Bytes(), TEXT, context=40, stride=20)
    with torch.no_grad():
        logits = model(torch.tensor([list(TEXT[20:59])]))[0, 19:]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(list(TEXT[40:60])), reduction="none")
    torch.testing.assert_close(two.nats[39:59], expected.double())


def test_logits_that_are_not_finite_are_told():
    model = build()
    with torch.no_grad():
        model.embedding.weight[98] = float("nan")
    with pytest.raises(NonFinite, match="the model's logits are not finite"):
        score(model, Bytes(), b"aabb")


SMALL = {"mamba": {"state": 3}, "mamba2": {"head_dim": 8, "state": 4}}
ENDLESS = {
    "mamba": {"attention": "mamba", "mixers": {"mamba": SMALL["mamba"]}},
    "rwkv7, channel mixing": {"attention": "rwkv7", "feedforward": "rwkv7"},
    "two mixers": {"attention": "mamba2,gated-deltanet", "mixers": {"mamba2": SMALL["mamba2"]}},
    "features": {"attention": "taylor2-l2", "position": "none"},
    "features that fade": {"attention": "elu-sum", "position": "alibi", "kv_heads": 2},
    "mixers and a window": {
        "attention": "mamba,softmax", "position": "none", "window": 5, "mixers": {"mamba": SMALL["mamba"]},
    },
    "a pattern in a window": {"attention": "exp-l2", "position": "none", "structure": "strided(3)", "window": 9},
}  # fmt: skip
ENDING = {
    "mixers and a softmax": {
        "attention": "mamba,softmax", "position": "none", "mixers": {"mamba": SMALL["mamba"]},
    },
    "alibi": {"position": "alibi"},
    "a pattern": {"attention": "elu-sum", "position": "none", "structure": "strided(3)"},
}  # fmt: skip


def of_one_forward(model, text):
    with torch.no_grad():
        logits = model(torch.tensor([list(text[:-1])]))[0].double()
    return torch.nn.functional.cross_entropy(logits, torch.tensor(list(text[1:])), reduction="none")


@pytest.mark.parametrize("name", ENDLESS)
def test_without_an_end_a_text_is_one_sequence(name):
    model = build(**ENDLESS[name], max_length=16)
    expected = of_one_forward(model, TEXT)
    for piece in (7, 32):
        result = score(model, Bytes(), TEXT, piece=piece)
        assert (result.windows, result.context, result.tokens) == (1, len(TEXT), len(TEXT) - 1)
        torch.testing.assert_close(result.nats, expected, atol=2e-4, rtol=1e-4)
    by_windows = score(model, Bytes(), TEXT, context=16, stride=8)
    assert by_windows.windows == 1 + math.ceil((len(TEXT) - 16) / 8)
    with pytest.raises(InvalidArgument, match=r"stride=8 is of windows, .* give context=\.\.\. too"):
        score(model, Bytes(), TEXT, stride=8)


@pytest.mark.parametrize("name", ["mamba", "two mixers", "features", "mixers and a window"])
def test_packed_weights_score_a_text_as_one_sequence_too(name):
    pytest.importorskip("numba")
    model = build(**ENDLESS[name], max_length=16)
    result = score(prepare(model, "as_is"), Bytes(), TEXT, piece=20)
    assert result.windows == 1
    torch.testing.assert_close(result.nats, of_one_forward(model, TEXT), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ENDING)
def test_what_grows_with_the_text_is_scored_by_windows(name):
    model = build(**ENDING[name], max_length=16)
    result = score(model, Bytes(), TEXT)
    assert (result.context, result.stride) == (16, 8)
    torch.testing.assert_close(
        score(model, Bytes(), TEXT, context=len(TEXT), piece=7).nats, of_one_forward(model, TEXT), atol=2e-4, rtol=1e-4
    )


def test_a_model_has_no_end_if_its_states_do_not_grow():
    shared = SharedHybridConfig(
        vocab_size=256, dim=32, heads=4, layers=2, shared_at=(1,), mixers={"mamba2": SMALL["mamba2"]}
    )
    models = [build(**fields) for fields in (ENDLESS | ENDING).values()] + [SharedHybridLM(shared).eval()]
    for model in models:
        reading, sizes = Reading(model), []
        for _ in range(3):
            reading.read([[7] * 40])
            sizes.append(sum(state.nbytes for state in reading.states))
        assert model.endless == (sizes[1] == sizes[2])
    assert not build(attention="elu-sum").endless
    assert not build(attention="elu-sum", allow_longer=True).endless
