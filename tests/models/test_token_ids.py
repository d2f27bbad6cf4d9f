"""From a text to what a model takes, whatever the vocabulary and the dtype that it numbers tokens in."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.hub_tokenizers import MAKERS

from mercer.errors import InvalidArgument
from mercer.inference.generate import complete
from mercer.inference.sampler import Sampling
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.encoder import Encoder
from mercer.models.encoder_config import EncoderConfig
from mercer.models.seq2seq import Seq2Seq
from mercer.models.seq2seq_config import Seq2SeqConfig
from mercer.models.tokenizer import HubVocabulary
from mercer.models.vocabulary import BPE, Bytes, Vocabulary

SIZE = 420
SMALL = {"vocab_size": SIZE, "dim": 16, "heads": 2, "layers": 1}
INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
VOCABULARIES: dict[str, Vocabulary] = {
    "bytes": Bytes(),
    "bpe": BPE.train(["the cat sat on the mat\n" * 9, "naïve café 日本\n" * 9], 300),
} | {kind: HubVocabulary(make(), names=names) for kind, (make, names) in MAKERS.items()}


@pytest.fixture(scope="module")
def models():
    """Of each class a call from tokens [B, T]."""
    decoder = DecoderLM(ModelConfig(**SMALL)).eval()
    encoder = Encoder(EncoderConfig(**SMALL, max_length=64)).eval()
    both = Seq2Seq(Seq2SeqConfig(**SMALL, encoder_layers=1)).eval()
    return {
        "decoder": decoder,
        "loss": lambda tokens: decoder.loss(tokens, tokens),
        "encoder": encoder,
        "seq2seq": lambda tokens: both(tokens, tokens),
    }


@pytest.mark.parametrize("kind", VOCABULARIES)
@settings(max_examples=10, deadline=None)
@given(text=st.text("acehmnot ïé日\n", min_size=1, max_size=20))
def test_what_is_encoded_goes_into_every_model(models, kind, text):
    vocabulary, data = VOCABULARIES[kind], text.encode()
    array = vocabulary.encode(data)
    if not len(array):
        return
    wanted = torch.tensor([array.tolist()])
    assert wanted.dtype == torch.int64
    with torch.no_grad():
        for call in models.values():
            for ids in (torch.tensor(array)[None], torch.from_numpy(array)[None], torch.as_tensor(array)[None]):
                assert torch.equal(call(ids), call(wanted))
    prompt = vocabulary.prompt(data)
    wanted_answer = complete(models["decoder"], [prompt], 2, sampling=Sampling(0.0))
    for ids in (torch.tensor(prompt), np.array(prompt, dtype=vocabulary.dtype)):
        assert complete(models["decoder"], [ids], 2, sampling=Sampling(0.0)) == wanted_answer


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_integer_is_a_token(models, dtype):
    tokens = torch.tensor([[1, 2, 100, 3]])
    with torch.no_grad():
        for call in models.values():
            assert torch.equal(call(tokens.to(dtype)), call(tokens))


@pytest.mark.parametrize("tokens", [torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool), torch.zeros(3).long()])
def test_other_tensors_are_refused(models, tokens):
    for call in models.values():
        with pytest.raises(InvalidArgument, match=r"must be integers \[B, T\]"):
            call(tokens)


def test_what_is_no_tensor_is_refused(models):
    for call in (models["decoder"], models["encoder"], models["seq2seq"]):
        with pytest.raises(InvalidArgument, match=r"must be a tensor of integers .* not of type ndarray"):
            call(np.zeros((1, 3), dtype=np.int64))


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_text_that_is_no_bytes_is_told_what_to_write(kind):
    for method in (VOCABULARIES[kind].encode, VOCABULARIES[kind].prompt):
        with pytest.raises(InvalidArgument, match=r"as bytes, not as str: write text\.encode\(\)"):
            method("the cat")
        with pytest.raises(InvalidArgument, match=r"as bytes, not as list: the messages of a chat go through its Chat"):
            method([{"role": "user", "content": "the cat"}])
        assert list(method(bytearray(b"the cat"))) == list(method(memoryview(b"the cat"))) == list(method(b"the cat"))
