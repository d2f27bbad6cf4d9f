"""Decoder language models of transformers and the same here: one number for each way of asking."""

import json

import pytest
from tests.checkpoints.measure import BOUND, decoder
from tests.checkpoints.zoo import DECODERS

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", DECODERS)
def test_a_loaded_model_is_the_model_that_was_saved(name, tmp_path, record_property):
    errors = decoder(name, tmp_path / "model")
    record_property("errors", json.dumps(errors))  # for the page of them all, scripts/parity_docs.py
    assert max(errors.values()) < BOUND, errors
