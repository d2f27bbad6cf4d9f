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


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_padding_between_tokens_under_a_window(kind):
    """A mask with holes, as a chat of several padded turns makes: windows count the holes, as the model does."""
    mask = padded([19, 19], 19, "left")
    mask[1, 5:9] = 0
    ours, theirs = both(make(kind), input_ids=tokens(2, 19), attention_mask=mask)
    assert_same(ours[mask.bool()], theirs[mask.bool()])


def test_rows_that_are_packed_in_different_ways():
    rows = torch.stack([torch.cat([torch.arange(n) for n in parts]) for parts in ([11, 9], [5, 15])])
    assert_same(*both(make("llama"), input_ids=tokens(2, 20), position_ids=rows, use_cache=False))


@pytest.mark.parametrize("form", ["boolean", "added"])
def test_a_mask_of_four_dimensions(form):
    real = padded([9, 6], 9, "right").bool()
    mask = (torch.ones(9, 9, dtype=torch.bool).tril() & real[:, None])[:, None]
    if form == "added":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    model = make("llama")
    model.set_attn_implementation("mercer:softmax")
    with torch.no_grad():
        ours = model(input_ids=tokens(2, 9), attention_mask=mask).logits
        model.set_attn_implementation("sdpa")
        theirs = model(input_ids=tokens(2, 9), attention_mask=mask).logits
    assert_same(ours[real], theirs[real])


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


@pytest.mark.parametrize("sides", ["both", "encoder"])
def test_biases_of_positions(sides):
    """T5 adds a learned bias of distances to scores, which are not scaled."""
    mask = padded([12, 7], 12, "right") if sides == "encoder" else torch.ones(2, 12, dtype=torch.int64)
    model = make("t5")
    assert_same(*both(model, input_ids=tokens(2, 12), attention_mask=mask, decoder_input_ids=tokens(2, 9, 2)))
    assert (model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.abs() > 0.01).any()


def test_gradients_of_biases_of_positions():
    inputs = {"input_ids": tokens(2, 12), "labels": tokens(2, 9, 2)}
    found = []
    for name in ("mercer:softmax", "sdpa"):
        model = make("t5").double()
        model.set_attn_implementation(name)
        model(**inputs).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
