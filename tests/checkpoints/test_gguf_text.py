"""Vocabularies of GGUF files against the tokenizers that were written into them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mercer.checkpoints.gguf_text import gguf_template, gguf_vocabulary
from mercer.errors import InvalidArgument, Unsupported

TEXT = [
    "the old man and the sea, 1952; the sea was old",
    "x = [i for i in range(10)]\n\tprint(x)",
    "höhe über alles",
] * 3
SAMPLES = ["the sea", " leading", "two  spaces", "1234 men", "\n\n\tx", "höhe 日本", "", "the<s>sea", "it's the MAN's"]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, kind: str) -> dict:
    import json

    numbered = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": sorted(numbered, key=numbered.get),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(numbered) - len(SPECIAL)),
        "tokenizer.ggml.merges": [" ".join(pair) if isinstance(pair, list) else pair for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize("kind", ["gpt-2", "smollm"])
def test_byte_level(kind):
    tokenizer = byte_level(kind)
    values = metadata_of(tokenizer, kind)
    found = gguf_vocabulary(values, "a file", 400)
    for text in SAMPLES:
        assert found.prompt(text.encode()) == tokenizer.encode(text).ids, text
        assert found.decode(found.encode(text.encode())) == text.encode()
    assert found.ends == {2}
    assert found.names["bos_token"] == "<s>"
    begun = gguf_vocabulary(values | {"tokenizer.ggml.add_bos_token": True}, "a file", 400)
    assert begun.prompt(b"the sea") == [1, *tokenizer.encode("the sea").ids]


@given(text=st.text(max_size=40))
@settings(max_examples=200)
def test_every_text_comes_back(text):
    found = gguf_vocabulary(metadata_of(byte_level("gpt-2"), "gpt-2"), "a file", 400)
    assert found.decode(found.encode(text.encode())) == text.encode()


def test_merges_follow_from_scores():
    """SentencePiece's BPE merges the pair with the best score; its score falls with the number of the merge."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    numbered = tokenizer.get_vocab()
    tokens = sorted(numbered, key=numbered.get)
    pieces = len(tokens) - len(names)
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(names) + [-float(i) for i in range(pieces)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * pieces,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    found = gguf_vocabulary(values, "a file", 400)
    for text in SAMPLES:
        if "<s>" in text or not text:
            continue
        assert found.prompt(text.encode())[1:] == tokenizer.encode(text).ids, text
        assert found.prompt(text.encode())[0] == 1
        spoken = "".join(found.stream(found.encode(text.encode()).tolist()))
        assert spoken.removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"tokenizer.ggml.model": "bert"}, Unsupported, "vocabulary of kind 'bert'"),
        ({"tokenizer.ggml.pre": "viking"}, Unsupported, "cuts text as 'viking' does"),
        ({"tokenizer.ggml.tokens": []}, InvalidArgument, "has no vocabulary"),
        ({"tokenizer.ggml.eos_token_id": 4000}, InvalidArgument, "the number of eos_token is 4000"),
        ({"tokenizer.ggml.model": "llama"}, InvalidArgument, "not as many scores"),
    ],
)
def test_what_is_refused(change, kind, sentence):
    with pytest.raises(kind, match=sentence):
        gguf_vocabulary(metadata_of(byte_level("gpt-2"), "gpt-2") | change, "a file", 400)


def test_a_vocabulary_does_not_outgrow_its_model():
    with pytest.raises(InvalidArgument, match="tokens, but the model has 100"):
        gguf_vocabulary(metadata_of(byte_level("gpt-2"), "gpt-2"), "a file", 100)


def test_templates():
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"
    template = gguf_template({"tokenizer.chat_template": source}, {"eos_token": "</s>"}, "a file")
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "[hi]</s>"
    assert gguf_template({}, {}, "a file") is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is no list of str"),
        ({"tokens": "ab"}, "tokenizer.ggml.tokens is no list of str"),
        ({"tokens": ["a", "\udcff"]}, "the vocabulary of file is damaged"),
        ({"merges": ["a"]}, "the vocabulary of file is damaged"),
        ({"merges": ["x y"]}, "the vocabulary of file is damaged: .* `x` out of vocabulary"),
        ({"merges": [1]}, "tokenizer.ggml.merges is no list of str"),
        ({"token_type": ["x"]}, "tokenizer.ggml.token_type is no list of int"),
        ({"eos_token_id": "x"}, "the number of eos_token is 'x', and there are 2 tokens"),
        ({"model": "llama", "scores": ["x", "y"]}, "tokenizer.ggml.scores is no list of float"),
        ({"model": "llama", "scores": [0.0, 0.0], "unknown_token_id": 9}, "the number of unk_token is 9"),
    ],
)
def test_damaged_vocabularies_are_refused_in_one_sentence(change, sentence):
    values = {"model": "gpt2", "tokens": ["a", "b"]} | change
    with pytest.raises(InvalidArgument, match=sentence):
        gguf_vocabulary({f"tokenizer.ggml.{name}": value for name, value in values.items()}, "file", 8)
