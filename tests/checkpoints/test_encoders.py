"""Encoders of transformers and the same here: one number for each way of asking."""

import json

import pytest
import torch
from tests.checkpoints.measure import BOUND, encoder, error
from tests.checkpoints.zoo import ENCODERS, make, tokens

from mercer import checkpoints
from mercer.errors import InvalidArgument

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", ENCODERS)
def test_a_loaded_model_is_the_model_that_was_saved(name, tmp_path, record_property):
    errors = encoder(name, tmp_path / "model")
    record_property("errors", json.dumps(errors))  # for the page of them all, scripts/parity_docs.py
    assert max(errors.values()) < BOUND, errors


def test_kinds_of_tokens(tmp_path):
    theirs = make(*ENCODERS["bert"], tmp_path)
    ours, ids = checkpoints.load(tmp_path), tokens()
    types = (torch.arange(ids.shape[1]) > 12).long().expand_as(ids)
    with torch.no_grad():
        assert error(ours(ids, types=types), theirs(ids, token_type_ids=types).logits) < BOUND


def test_global_tokens_of_a_longformer(tmp_path):
    theirs = make(*ENCODERS["longformer"], tmp_path)
    ours, ids = checkpoints.load(tmp_path), tokens(length=40)
    marked = torch.zeros_like(ids, dtype=torch.bool)
    marked[0, [0, 17]] = True
    marked[1, 5] = True
    with torch.no_grad():
        there = {"attention_mask": torch.ones_like(ids), "global_attention_mask": marked.long()}
        assert error(ours(ids, global_mask=marked), theirs(ids, **there).logits) < BOUND
        assert error(ours(ids), theirs(ids, **there).logits) > 0.01
    with pytest.raises(InvalidArgument, match="global_mask marks the global tokens of a Longformer"):
        checkpoints.load(_bert(tmp_path / "bert"))(ids, global_mask=marked)


def _bert(folder):
    make(*ENCODERS["bert"], folder)
    return folder


def test_masked_tokens_of_esm_beside_padding(tmp_path):
    theirs = make(*ENCODERS["esm, masked"], tmp_path)
    ours = checkpoints.load(tmp_path)
    ids = tokens()
    ids[:, ::5] = 7
    padding = torch.ones_like(ids, dtype=torch.bool)
    padding[0, 30:] = False
    padding[1, 34:] = False
    ids[~padding] = 9  # theirs counts masked tokens among the padding too
    with torch.no_grad():
        wanted = theirs(ids, attention_mask=padding.long()).logits
        assert error(ours(ids, padding=padding)[padding], wanted[padding]) < BOUND


def test_attention_of_an_encoder_is_swapped(tmp_path):
    make(*ENCODERS["bert"], tmp_path)
    plain, ids = checkpoints.load(tmp_path), tokens()
    swapped = checkpoints.load(tmp_path, attention="elu-sum")
    assert torch.equal(swapped(ids), plain.with_attention("elu-sum")(ids))
    assert not torch.allclose(swapped(ids), plain(ids))


def test_sentences_have_length_one_and_do_not_see_padding(tmp_path):
    make(*ENCODERS["bert, bare"], tmp_path)
    model, ids = checkpoints.load(tmp_path), tokens(length=9)
    alone = model.sentences(ids)
    assert torch.allclose(alone.norm(dim=-1), torch.ones(2))
    wide = torch.cat((ids, torch.full((2, 4), 3)), 1)
    padding = torch.arange(13).expand(2, 13) < 9
    assert torch.allclose(model.sentences(wide, padding=padding), alone, atol=1e-6)


def test_sequences_beyond_the_table_are_refused(tmp_path):
    make(*ENCODERS["bert"], tmp_path)
    with pytest.raises(InvalidArgument, match=r"the model takes 128 tokens \(max_length\), got 129"):
        checkpoints.load(tmp_path)(torch.zeros(1, 129, dtype=torch.long))
