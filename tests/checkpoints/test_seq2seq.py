"""Encoder-decoders of transformers and the same here: one number for each way of asking."""

import json

import pytest
import torch
from tests.checkpoints.measure import BOUND, seq2seq
from tests.checkpoints.zoo import SEQ2SEQ, frames, make, tokens

from mercer import checkpoints
from mercer.errors import InvalidArgument
from mercer.models.seq2seq import Seq2Seq

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_a_loaded_model_is_the_model_that_was_saved(name, tmp_path, record_property):
    errors = seq2seq(name, tmp_path / "model")
    record_property("errors", json.dumps(errors))  # for the page of them all, scripts/parity_docs.py
    assert max(errors.values()) < BOUND, errors


@pytest.mark.parametrize("attention", ["taylor2-sum", "elu-sum"])
def test_attention_is_swapped_on_both_sides(tmp_path, attention):
    make(*SEQ2SEQ["marian"], tmp_path)
    plain, swapped = checkpoints.load(tmp_path), checkpoints.load(tmp_path, attention=attention)
    source, ids = tokens(length=11), tokens(length=7)
    assert torch.equal(swapped(source, ids), plain.with_attention(attention)(source, ids))
    assert not torch.allclose(swapped(source, ids), plain(source, ids))
    whole = swapped(source, ids)
    states, steps = None, []
    decoder = swapped.conditioned(source)
    for i in range(ids.shape[1]):
        logits, states = decoder(ids[:, i : i + 1], states=states, return_states=True)
        steps.append(logits)
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4)


def test_inputs_that_do_not_fit(tmp_path):
    make(*SEQ2SEQ["whisper"], tmp_path)
    model = checkpoints.load(tmp_path)
    with pytest.raises(InvalidArgument, match=r"the source must be frames \[B, 8, T\]"):
        model(tokens(), tokens())
    with pytest.raises(InvalidArgument, match="a learned table of 32 positions"):
        model(frames(length=80), tokens())
    with pytest.raises(InvalidArgument, match="tokens must be integers"):
        model(frames(), torch.zeros(2, 3))


def test_positions_of_a_new_model_for_speech_are_those_of_the_hub(tmp_path):
    theirs = make(*SEQ2SEQ["whisper"], tmp_path)
    fresh = Seq2Seq(checkpoints.load(tmp_path).config)
    wanted = theirs.model.encoder.embed_positions.weight  # fixed, so not drawn again
    assert torch.allclose(fresh.encoder.positions.weight, wanted, atol=1e-6)
    assert not fresh.encoder.positions.weight.requires_grad
