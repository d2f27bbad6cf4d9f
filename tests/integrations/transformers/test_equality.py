"""`mercer:softmax` is the attention that the models have."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.integrations.transformers.zoo import assert_same, make, padded, tokens  # noqa: E402

import mercer.integrations.transformers  # noqa: E402, F401  # registers the names

pytestmark = pytest.mark.peers
DECODERS = ("gpt2", "llama", "mistral", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt_oss")


@torch.no_grad()
def both(model, peer="eager", **inputs):
    model.set_attn_implementation("mercer:softmax")
    ours = model(**inputs).logits
    model.set_attn_implementation(peer)
    return ours, model(**inputs).logits


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_logits_of_a_sequence(kind):
    assert_same(*both(make(kind), input_ids=tokens(2, 37)))


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_a_padded_batch(kind, side):
    mask = padded([19, 7, 13], 19, side)
    ours, theirs = both(make(kind), input_ids=tokens(3, 19), attention_mask=mask)
    assert torch.isfinite(ours).all()
    assert_same(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_between_tokens(kind):
    """A mask with holes, as a chat of several padded turns makes."""
    mask = padded([19, 19], 19, "left")
    mask[1, 5:9] = 0
    ours, theirs = both(make(kind), input_ids=tokens(2, 19), attention_mask=mask)
    assert_same(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences(kind):
    places = torch.cat([torch.arange(n) for n in (11, 1, 17)]).expand(2, -1)
    assert_same(*both(make(kind), input_ids=tokens(2, 29), position_ids=places, use_cache=False))


def test_images():
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert_same(*both(make("vit"), pixel_values=images))


def test_an_encoder_with_a_decoder_that_looks_at_it():
    mask = padded([12, 7], 12, "right")
    inputs = {"input_ids": tokens(2, 12), "attention_mask": mask, "decoder_input_ids": tokens(2, 9, 2)}
    assert_same(*both(make("marian"), **inputs))


def test_double_precision_is_kept():
    model = make("llama").double()
    ours, theirs = both(model, "sdpa", input_ids=tokens(2, 21))  # eager attention has its softmax in float32
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "mistral", "bert"])
def test_half_precision(kind):
    """Weights in bfloat16: as near to the model in float32 as its own attention is."""
    exact = make(kind)
    mask = padded([19, 7], 19, "left")
    inputs = {"input_ids": tokens(2, 19), "attention_mask": mask}
    with torch.no_grad():
        expected = exact(**inputs).logits[mask.bool()]
    ours, theirs = both(exact.bfloat16(), **inputs)
    assert ours.dtype == torch.bfloat16
    ours, theirs = ((x[mask.bool()].float() - expected).abs().mean() for x in (ours, theirs))
    assert ours < 1.5 * theirs


def test_autocast():
    model, ids = make("llama"), tokens(2, 19)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = both(model, input_ids=ids)
    expected = both(model, input_ids=ids)[1]
    ours, theirs = ((x.float() - expected).abs().mean() for x in (ours, theirs))
    assert ours < 1.5 * theirs
