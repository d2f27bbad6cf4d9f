"""Generation with caches of transformers and with states: what a row gives alone, it gives in a batch and step by
step.
"""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.integrations.transformers.zoo import assert_same, make, padded, tokens  # noqa: E402

from mercer import CacheState, FeatureState, MixedState, Unsupported  # noqa: E402
from mercer.integrations.transformers import StateCache, register, swap_attention  # noqa: E402

pytestmark = pytest.mark.peers
NEW = 13  # more than the window of 8


def generate(model, ids, mask, **options):
    made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)
    return made[:, ids.shape[1] :]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "gemma3"])
@pytest.mark.parametrize("name", ["softmax", "taylor4-l2", "elu-sum"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_a_padded_batch_writes_what_its_rows_write_alone(kind, name, cache):
    model = make(kind)
    model.set_attn_implementation(f"mercer:{name}")
    lengths, width = [11, 4, 9], 11
    ids, mask = tokens(3, width), padded(lengths, width, "left")
    together = generate(model, ids, mask, cache_implementation=cache)
    for row, length in enumerate(lengths):
        one = ids[row : row + 1, width - length :]
        assert torch.equal(generate(model, one, torch.ones_like(one))[0], together[row])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_softmax_writes_what_the_model_writes(kind):
    model = make(kind)
    ids, mask = tokens(2, 11), padded([11, 6], 11, "left")
    before = generate(model, ids, mask)
    model.set_attn_implementation("mercer:softmax")
    assert torch.equal(generate(model, ids, mask), before)


@torch.no_grad()
def stepwise(model, ids, cache, chunk):
    """Logits of a sequence given in pieces."""
    return torch.cat([model(input_ids=piece, cache=cache, use_cache=True).logits for piece in ids.split(chunk, 1)], 1)


CACHES = {
    "dynamic": lambda model: transformers.DynamicCache(config=model.config),
    "static": lambda model: transformers.StaticCache(config=model.config, max_cache_len=40),
    "states": lambda model: StateCache(),
}


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("name", ["softmax", "taylor2-l2", "elu-sum", "power2-rms", "favor32-sum", "hedgehog-sum"])
@pytest.mark.parametrize(
    ("cache", "chunk"), [("dynamic", 1), ("dynamic", 5), ("static", 1), ("states", 1), ("states", 5)]
)
def test_pieces_give_what_the_whole_gives(kind, name, cache, chunk):
    model = swap_attention(make(kind).double(), name)  # by states, powers near 0 are differences of larger numbers
    ids = tokens(2, 23)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
    assert_same(stepwise(model, ids, CACHES[cache](model), chunk), whole)


@pytest.mark.parametrize(
    ("kind", "name", "state", "grows"),
    [
        ("llama", "taylor2-sum", FeatureState, False),
        ("llama", "softmax", CacheState, True),
        ("llama", "exp@4:taylor2-sum", MixedState, False),
        ("mistral", "taylor2-sum", CacheState, False),
    ],
)
def test_a_state_cache_keeps_the_state_of_the_kernel(kind, name, state, grows):
    model, cache = swap_attention(make(kind), name), StateCache()
    ids = tokens(2, 32)
    stepwise(model, ids, cache, 16)
    assert all(isinstance(layer.state, state) for layer in cache.layers)
    first = cache.nbytes
    stepwise(model, ids, cache, 16)
    assert (cache.nbytes > first) == grows
    assert cache.get_seq_length() == 64


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["softmax", "taylor2-sum"])
def test_going_on_behind_padding_on_the_right(name, cache):
    """Padding that ends up between tokens: each row gives what it gives alone."""
    model = swap_attention(make("llama").double(), name)
    lengths, ids, more = [9, 4], tokens(2, 9), tokens(2, 5, 2)
    mask = padded(lengths, 9, "right")
    held = CACHES[cache](model)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, cache=held)
        made = []
        for step in range(5):
            mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.int64)), 1)
            places = torch.tensor(lengths).unsqueeze(1) + step
            token = more[:, step : step + 1]
            made.append(model(input_ids=token, attention_mask=mask, position_ids=places, cache=held).logits)
        for row, length in enumerate(lengths):
            alone = torch.cat((ids[row, :length], more[row])).unsqueeze(0)
            assert_same(torch.cat(made, 1)[row], model(input_ids=alone).logits[0, length:])


@pytest.mark.parametrize("name", ["softmax", "taylor2-sum", "exp@4:taylor2-sum", "favor32-sum"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_from_states(name, beams):
    model = swap_attention(make("llama"), name)
    ids, mask = tokens(3, 11), padded([11, 4, 9], 11, "left")
    expected = generate(model, ids, mask, num_beams=beams)
    assert torch.equal(generate(model, ids, mask, num_beams=beams, cache=StateCache()), expected)


def test_two_continuations_of_one_state_cache():
    model, cache = swap_attention(make("llama"), "taylor2-sum"), StateCache()
    start, one, other = tokens(2, 9), tokens(2, 5, 2), tokens(2, 5, 3)
    stepwise(model, start, cache, 9)
    branch = copy.copy(cache)
    stepwise(model, other, branch, 1)
    got = stepwise(model, one, cache, 1)
    with torch.no_grad():
        whole = model(input_ids=torch.cat((start, one), 1)).logits[:, 9:]
    assert_same(got, whole)


def test_a_cut_of_a_state_is_refused():
    model, cache = swap_attention(make("llama"), "taylor2-sum"), StateCache()
    stepwise(model, tokens(1, 4), cache, 4)
    with pytest.raises(Unsupported, match="cannot forget"):
        cache.crop(-1)


def test_an_attention_that_does_not_take_the_states_is_refused():
    model, cache = make("llama"), StateCache()
    model.set_attn_implementation("sdpa")
    with pytest.raises(Unsupported, match="never reached an attention of mercer"):
        stepwise(model, tokens(1, 8), cache, 4)


def test_a_window_of_ones_own_under_a_cache():
    """structure= narrows what the model asks for, with a cache of all keys too."""
    from mercer import Window

    name = register("near", structure=Window.last(5))
    model, peer = make("llama"), make("mistral", sliding_window=5)
    model.set_attn_implementation(name)
    ids = tokens(2, 17)
    expected = stepwise(peer, ids, transformers.DynamicCache(config=peer.config), 17)
    peer.set_attn_implementation("eager")
    for cache in (transformers.DynamicCache(config=model.config), StateCache()):
        assert_same(stepwise(model, ids, cache, 1), expected)


@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_an_encoder_decoder_generates(kind):
    model = make(kind)
    ids, mask = tokens(2, 9), padded([9, 6], 9, "right")
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**options)
    model.set_attn_implementation("mercer:softmax")
    assert torch.equal(model.generate(**options), expected)


def test_an_encoder_decoder_generates_from_states():
    model = swap_attention(make("marian"), "taylor2-sum")
    ids, mask = tokens(2, 9), padded([9, 6], 9, "right")
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**options)
    cache = transformers.EncoderDecoderCache(StateCache(), transformers.DynamicCache())
    made = model.generate(**options, cache=cache)
    assert torch.equal(made, expected)


def test_biases_of_positions_have_no_states():
    """They are of tokens that a state does not hold one by one."""
    model = swap_attention(make("t5"), "taylor2-sum")
    cache = transformers.EncoderDecoderCache(StateCache(), transformers.DynamicCache())
    with pytest.raises(Unsupported, match="says nothing of the tokens in a state"):
        model.generate(input_ids=tokens(2, 9), max_new_tokens=2, do_sample=False, cache=cache)
