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


def test_a_t5_with_a_head_of_its_own_is_read_however_often_it_was_saved(tmp_path):
    import transformers

    theirs = make(*SEQ2SEQ["t5 1.1"], tmp_path / "0")
    old = json.loads((tmp_path / "0" / "config.json").read_text())
    assert old["tie_word_embeddings"]  # which it is not
    assert not torch.equal(theirs.lm_head.weight, theirs.shared.weight)
    del old["scale_decoder_outputs"]  # as in the folders of the hub, which transformers 4 wrote
    (tmp_path / "0" / "config.json").write_text(json.dumps(old | {"tie_word_embeddings": False}))
    source, ids = tokens(length=11), tokens(length=7)
    with torch.no_grad():
        wanted = theirs(input_ids=source, decoder_input_ids=ids).logits
    for again in range(1, 3):
        transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / str(again - 1)).save_pretrained(
            tmp_path / str(again)
        )
    for again in range(3):
        found = checkpoints.load(tmp_path / str(again))
        assert not found.config.tie_embeddings
        assert torch.allclose(found(source, ids), wanted, atol=1e-5 * float(wanted.abs().max()))


def test_a_head_that_differs_in_a_t5_of_old_that_says_tied_is_refused(tmp_path):
    make(*SEQ2SEQ["t5 1.1"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["scale_decoder_outputs"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InvalidArgument, match=r"lm_head.weight differs from shared.weight"):
        checkpoints.load(tmp_path)
