"""Batches, texts, stop strings and logprobs: every way to the same tokens."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.inference.test_generate import build
from tests.models.hub_tokenizers import sentencepiece
from torch import nn

from mercer.errors import InvalidArgument
from mercer.inference.engine import prepare
from mercer.inference.generate import complete, generate, stream
from mercer.inference.reading import Reading
from mercer.inference.sampler import Sampling
from mercer.models.tokenizer import HubVocabulary
from mercer.models.vocabulary import Bytes

MODELS = {
    "softmax": {"kv_heads": 2},
    "taylor2-sum": {"attention": "taylor2-sum", "position": "none"},
    "elu": {"attention": ["elu-sum", "softmax"]},
    "exp-l2": {"attention": "exp-l2", "position": "alibi"},
    "window": {"window": 5, "position": "learned", "max_length": 64},
    "mixed": {"attention": "exp@4:taylor2-sum"},
    "t5": {"position": "t5"},
    "sinusoidal": {"position": "sinusoidal", "attention": "taylor2-l2"},
    "dynamic": {"max_length": 24, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "recency": {"attention": "elu-sum", "recency": True},
}
PROMPTS = [b"The kernel of a", b"x", b"attention is a kernel, a normaliser", b"of forms that agree"]


@pytest.fixture(scope="module")
def models():
    return {name: build(**fields) for name, fields in MODELS.items()}


def logits_alone(model, tokens):
    """[T, V] by the full forward."""
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0]


@settings(max_examples=40)
@given(st.data())
def test_every_path_agrees(models, data):
    """Full forward, one token at a time, chunks, and rows in a batch: the same logits and states that go on."""
    model = models[data.draw(st.sampled_from(sorted(MODELS)))]
    row = st.lists(st.integers(0, 255), min_size=1, max_size=12)
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    more = data.draw(
        st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=4), min_size=len(rows), max_size=len(rows))
    )
    reading = Reading(model, len(rows))
    first = reading.read(rows, data.draw(st.integers(1, 14)))
    every = list(reading.copy().logits(more, data.draw(st.integers(1, 5))))
    second = reading.read(more, data.draw(st.integers(1, 5)))
    assert reading.tokens == [a + b for a, b in zip(rows, more, strict=True)]
    chosen = data.draw(st.permutations(range(len(rows))).map(lambda order: order[: max(1, len(order) - 1)]))
    kept = reading.select(chosen)
    third = kept.read([[7]] * len(chosen))
    for i, (a, b) in enumerate(zip(rows, more, strict=True)):
        whole = logits_alone(model, [*a, *b, 7])
        torch.testing.assert_close(first[i], whole[len(a) - 1], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(second[i], whole[-2], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(torch.cat(every, 1)[i, -len(b) :], whole[len(a) : -1], atol=2e-4, rtol=2e-4)
        if i in chosen:
            torch.testing.assert_close(third[chosen.index(i)], whole[-1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_batch_are_what_they_are_alone(models, name):
    model, prompts = models[name], [list(prompt) for prompt in PROMPTS]
    for sampling in (Sampling(0.0), Sampling(0.8, top_k=20, repetition_penalty=1.3), Sampling(1.2, min_p=0.05)):
        together = complete(model, prompts, 9, sampling=sampling, seed=5, prefill=7)
        for i, prompt in enumerate(prompts):
            assert together[i].tokens == list(generate(model, prompt, 9, sampling, seed=5 + i))
            assert together[i].finish == "length"
    again = complete(model, prompts, 9, sampling=Sampling(), seed=[3, 3, 8, 8])
    assert again[1].tokens == list(generate(model, prompts[1], 9, Sampling(), seed=3))


def test_rows_that_ended_are_no_longer_computed_and_change_nothing(monkeypatch):
    model = build()
    prompts = [list(prompt) for prompt in PROMPTS]
    alone = [list(generate(model, prompt, 8, Sampling(0.0))) for prompt in prompts]
    end = alone[2][1]  # ends row 2 after two tokens, and others where they say it
    expected = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in alone]
    assert len({len(tokens) for tokens in expected}) > 1
    batches, hidden = [], type(model).hidden

    def watched(self, tokens, **keywords):
        batches.append(tokens.shape[0])
        return hidden(self, tokens, **keywords)

    monkeypatch.setattr(type(model), "hidden", watched)
    got = complete(model, prompts, 8, sampling=Sampling(0.0), ends=[end])
    assert [one.tokens for one in got] == expected
    assert [one.finish for one in got] == ["end" if tokens[-1] == end else "length" for tokens in expected]
    assert batches == [4] + [sum(len(tokens) > n for tokens in expected) for n in range(1, 8)]


@pytest.mark.slow  # compiles the step
def test_packed_weights_write_the_same_in_batches_whose_rows_end():
    pytest.importorskip("numba")
    model = build(kv_heads=2)
    engine, prompts = prepare(model), [list(prompt) for prompt in PROMPTS]
    assert engine.reason is None
    options = {"sampling": Sampling(0.8, top_k=20), "ends": range(40), "seed": 5}
    together, plain = complete(engine, prompts, 12, **options), complete(model, prompts, 12, **options)
    assert [one.tokens for one in together] == [one.tokens for one in plain]
    assert len({len(one.tokens) for one in plain}) > 1
    for i, prompt in enumerate(prompts):
        alone = list(generate(engine, prompt, 12, Sampling(0.8, top_k=20), seed=5 + i, ends=range(40)))
        assert alone == together[i].tokens


class Shifted(nn.Module):
    """Any module with the call: token t is followed by t + 1, and nothing else is possible."""

    class config:
        vocab_size = 256

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens, *, padding=None, states=None, return_states=False):
        logits = torch.nn.functional.one_hot((tokens + 1) % 256, 256) * 50.0
        return (logits, []) if return_states else logits


def test_text_comes_in_whole_characters_and_stops_where_asked():
    model, vocabulary = Shifted(), Bytes()
    pieces = list(
        stream(model, [list(b"A"), list(b"x")], 6, sampling=Sampling(0.0), vocabulary=vocabulary, stop=["DE"])
    )
    first, second = ([piece for piece in pieces if piece.row == row] for row in (0, 1))
    assert [(piece.text, piece.finish) for piece in first] == [("B", None), ("C", None), ("", None), ("", "stop")]
    assert bytes(piece.token for piece in first) == b"BCDE"
    assert "".join(piece.text for piece in second) == "yz{|}~"
    (held,) = complete(model, [list(b"A")], 3, sampling=Sampling(0.0), vocabulary=vocabulary, stop=["DEF"])
    assert (held.text, held.finish) == ("BCD", "length")  # what was held back comes when nothing follows
    (half,) = complete(model, [[0xC1]], 1, sampling=Sampling(0.0), vocabulary=vocabulary)
    assert half.text == "\ufffd"
    (ended,) = complete(
        model, [list(b"A")], 9, sampling=Sampling(0.0), vocabulary=vocabulary, ends=[ord("D")], stop=["CX"]
    )
    assert (ended.text, ended.tokens[-1], ended.finish) == ("BC", ord("D"), "end")


class Says(Shifted):
    """Continues one text."""

    def __init__(self, tokens, size):
        super().__init__()
        self.config = type("config", (), {"vocab_size": size})
        self.after = dict(pairwise(tokens))

    def forward(self, tokens, *, padding=None, states=None, return_states=False):
        follows = torch.tensor([[self.after.get(token, 0) for token in row] for row in tokens.tolist()])
        return torch.nn.functional.one_hot(follows, self.config.vocab_size) * 50.0, []


def test_spaces_and_special_tokens_inside_a_text():
    """A continuation keeps the space that is dropped where a text begins, and what ends it is no text."""
    vocabulary = HubVocabulary(sentencepiece(prepend="all"), names={"bos_token": "<s>", "eos_token": "</s>"})
    prompt, whole = vocabulary.prompt(b"the dog"), vocabulary.prompt("the dog café".encode())
    assert whole[: len(prompt)] == prompt
    assert len(set(whole)) == len(whole)
    end = vocabulary.tokenizer.token_to_id("</s>")
    model = Says([*whole, end], vocabulary.size)
    options = {"sampling": Sampling(0.0), "vocabulary": vocabulary, "echo": True}
    (one,) = complete(model, [prompt], 99, **options)
    assert ("".join(piece.text for piece in one.pieces if piece.prompt), one.text) == ("the dog", " café")
    assert (one.finish, one.tokens[-1]) == ("end", end)
    (one,) = complete(model, [prompt], 99, stop=["fé"], **options)
    assert (one.finish, one.text) == ("stop", " ca")


@pytest.mark.parametrize("prefill", [1, 4, 100])
def test_logprobs_are_those_of_the_full_forward(prefill):
    model, prompts = build(), [list(prompt) for prompt in PROMPTS]
    options = {"sampling": Sampling(0.7, top_k=9, repetition_penalty=1.5), "logprobs": 3, "echo": True}
    for prompt, one in zip(prompts, complete(model, prompts, 5, prefill=prefill, **options), strict=True):
        tokens = prompt + one.tokens
        assert [piece.token for piece in one.pieces] == tokens
        assert [piece.prompt for piece in one.pieces] == [True] * len(prompt) + [False] * 5
        assert (one.pieces[0].logprob, one.pieces[0].top) == (None, ())
        logs = logits_alone(model, tokens).double().log_softmax(-1)
        for i, piece in enumerate(one.pieces[1:]):
            assert piece.logprob == pytest.approx(float(logs[i, tokens[i + 1]]), abs=1e-4)
            values, likeliest = logs[i].topk(3)
            assert [token for token, _ in piece.top] == likeliest.tolist()
            assert [logprob for _, logprob in piece.top] == pytest.approx(values.tolist(), abs=1e-4)
    (alone,) = complete(model, prompts[:1], 0, echo=True, logprobs=0)
    assert len(alone.pieces) == len(prompts[0])
    assert all(piece.logprob is not None and piece.top == () for piece in alone.pieces[1:])


def test_the_echo_has_the_text_of_the_prompt():
    pieces = complete(
        Shifted(), [list("é☃".encode()), list(b"ab")], 1, sampling=Sampling(0.0), echo=True, vocabulary=Bytes()
    )
    assert ["".join(p.text for p in one.pieces if p.prompt) for one in pieces] == ["é☃", "ab"]


def test_a_reading_is_gone_on_from():
    model, prompt = build(attention=["taylor2-sum", "softmax"]), list(PROMPTS[0])
    reading = Reading(model)
    reading.read([prompt[:7]])
    before = reading.copy()
    options = {"sampling": Sampling(0.9, repetition_penalty=1.4), "seed": 2, "vocabulary": Bytes()}
    (on,) = complete(model, [prompt[7:]], 6, reading=reading, **options)
    assert on.tokens == complete(model, [prompt], 6, **options)[0].tokens
    assert reading.tokens == [prompt + on.tokens[:-1]]  # the last token is not read
    assert before.tokens == [prompt[:7]]
    assert complete(model, [prompt[7:]], 6, reading=before, **options)[0].tokens == on.tokens


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt; give at least one"),
        ([[1], []], {}, r"prompt 1 has shape \[0\]"),
        ([[1], [256]], {}, r"prompt 1 has tokens outside 0\.\.255"),
        ([[1], [1.5]], {}, "prompt 1 has dtype torch.float32"),
        ([[1]], {"logprobs": -1}, "logprobs=-1: from 0 to the vocabulary's 256 can be told"),
        ([[1]], {"logprobs": 257}, "logprobs=257"),
        ([[1]], {"stop": ["a"]}, "stop strings need the vocabulary"),
        ([[1]], {"stop": [""], "vocabulary": Bytes()}, "each of at least one character"),
        ([[1]], {"stop": "END", "vocabulary": Bytes()}, "stop is 'END'; it is a list of texts"),
        ([[1], [2]], {"seed": [1]}, "1 seeds and 2 rows read for 2 prompts"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(prompts, options, message):
    with pytest.raises(InvalidArgument, match=message):
        stream(build(), prompts, 1, **options)


def test_rows_beyond_the_positions_are_named():
    model = build(position="learned", max_length=20)
    with pytest.raises(
        InvalidArgument, match=r"too few to continue prompt 1 of 19 by max_tokens=3; at most 2 can follow"
    ):
        stream(model, [[1], [2] * 19], 3)
