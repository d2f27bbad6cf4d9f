"""Swapping: what a swapped model computes, by which name, and what of it is saved."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.integrations.transformers.zoo import assert_same, make, padded, tokens  # noqa: E402

from mercer import L2, Alibi, Causal, Decay, Exp, Padding, Taylor, attention, parse_attention  # noqa: E402
from mercer.integrations.transformers import load_kernel_tensors, register, swap_attention  # noqa: E402
from mercer.nn import alibi_slopes  # noqa: E402

pytestmark = pytest.mark.peers


@pytest.fixture
def calls(monkeypatch):
    """What the attention function of mercer was given and gave, call by call."""
    from mercer.integrations.hf.attention import AttentionFunction

    seen, original = [], AttentionFunction.__call__

    def recording(self, module, query, key, value, mask, **options):
        out = original(self, module, query, key, value, mask, **options)
        seen.append((query, key, value, options["scaling"], out[0]))
        return out

    monkeypatch.setattr(AttentionFunction, "__call__", recording)
    return seen


@torch.no_grad()
def logits(model, ids, **others):
    return model(input_ids=ids, use_cache=False, **others).logits


@pytest.mark.parametrize("name", ["taylor4-l2", "elu-sum", "taylor3-signed-sum", "gaussian-rms", "exp-length"])
def test_a_layer_computes_mercer_attention_of_its_own_queries_keys_and_values(name, calls):
    model = swap_attention(make("llama"), name)
    mask = padded([12, 7], 12, "left")
    logits(model, tokens(2, 12), attention_mask=mask)
    kernel, normalizer = parse_attention(name)
    assert len(calls) == 2
    for query, key, value, scale, out in calls:
        assert key.shape[1] == 2  # grouped heads come as they are
        structure = Causal() & Padding(mask.bool())
        expected = attention(query, key, value, kernel=kernel, normalizer=normalizer, structure=structure, scale=scale)
        assert torch.equal(out, expected.transpose(1, 2))


def test_the_name_of_a_plain_swap_is_that_of_the_grammar():
    model = swap_attention(make("llama"), "taylor4-l2")
    assert model.config._attn_implementation == "mercer:taylor4-l2"
    same = swap_attention(make("llama"), kernel=Taylor(4), normalizer=L2())
    ids = tokens(2, 9)
    assert torch.equal(logits(model, ids), logits(same, ids))


@pytest.mark.parametrize("name", ["taylor4-l2", "softmax", "exp@8:taylor2-sum"])
def test_a_saved_model_is_loaded_with_an_attention(name, tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    expected = logits(swap_attention(model, name), ids)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=register(name))
    assert loaded.config._attn_implementation == f"mercer:{name}"
    assert_same(logits(loaded, ids), expected)
    model.save_pretrained(tmp_path)  # which attention it had is not saved
    assert "mercer" not in (tmp_path / "config.json").read_text()


def test_some_layers():
    ids = tokens(2, 9)
    softmax, taylor = (logits(swap_attention(make("llama"), name), ids) for name in ("softmax", "taylor2-sum"))
    one, both, none = (
        logits(swap_attention(make("llama"), "taylor2-sum", layers=layers), ids) for layers in ([1], [0, 1], [])
    )
    assert torch.equal(both, taylor)
    assert torch.equal(none, softmax)
    assert all((one - other).abs().max() > 1e-3 for other in (softmax, taylor))


@pytest.mark.parametrize("weights", ["alibi", "decay"])
def test_log_weights(weights, calls):
    """ALiBi, or a decay, over a model that has neither; decoding from a cache of keys gives the same."""
    part = Alibi(alibi_slopes(4)) if weights == "alibi" else Decay(torch.tensor([0.9, 0.8]))
    model = swap_attention(make("llama"), structure=part)
    ids = tokens(2, 12)
    whole = logits(model, ids)
    query, key, value, scale, out = calls[0]
    expected = attention(query, key, value, structure=Causal() & part, scale=scale)
    assert torch.equal(out, expected.transpose(1, 2))
    cache = transformers.DynamicCache()
    with torch.no_grad():
        steps = [model(input_ids=token, cache=cache).logits for token in ids.split(1, 1)]
    assert_same(torch.cat(steps, 1), whole)


class TestKernelsWithTensors:
    def test_every_layer_has_its_own_and_a_seed_gives_them_again(self):
        models = [swap_attention(make("llama"), "favor32-sum", seed=seed) for seed in (0, 0, 1)]
        drawn = [[layer.self_attn.mercer_kernel.directions for layer in m.model.layers] for m in models]
        assert not torch.equal(drawn[0][0], drawn[0][1])
        assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))
        assert not torch.equal(torch.stack(drawn[0]), torch.stack(drawn[2]))

    def test_random_features_by_name_alone_have_their_own_seed(self):
        model = make("llama")
        model.set_attn_implementation(register("favor32-sum"))
        ids = tokens(2, 9)
        first = logits(model, ids)
        assert torch.equal(first, logits(model, ids))
        assert not hasattr(model.model.layers[0].self_attn, "mercer_kernel")

    def test_learned_maps_are_parameters_that_train_and_come_back(self, tmp_path):
        model = swap_attention(make("llama"), "hedgehog-sum")
        learned = [p for n, p in model.named_parameters() if "mercer_kernel" in n]
        assert len(learned) == 4  # of queries and of keys, in two layers
        ids = tokens(2, 9)
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learned)
        with torch.no_grad():
            for p in learned:
                p += 0.3 * torch.randn(p.shape)
        expected = logits(model, ids)
        model.save_pretrained(tmp_path)
        transformers.logging.set_verbosity_error()  # it warns of tensors it does not know
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        swap_attention(loaded, "hedgehog-sum")
        assert (logits(loaded, ids) - expected).abs().max() > 1e-3
        load_kernel_tensors(loaded, tmp_path)
        assert_same(logits(loaded, ids), expected)

    def test_they_leave_with_the_attention(self):
        model = swap_attention(make("llama"), "hedgehog-sum")
        swap_attention(model, "softmax")
        assert not [n for n in model.state_dict() if "mercer" in n]

    def test_another_attention_does_not_take_them(self):
        model = swap_attention(make("llama"), "favor32-sum")
        ids = tokens(2, 9)
        model.set_attn_implementation("mercer:softmax")
        assert torch.equal(logits(model, ids), logits(swap_attention(make("llama"), "softmax"), ids))

    def test_only_the_layers_that_are_swapped_get_them(self):
        model = swap_attention(make("llama"), "hedgehog-sum", layers=[1])
        assert [hasattr(layer.self_attn, "mercer_kernel") for layer in model.model.layers] == [False, True]

    def test_inputs_for_models_that_do_not_run_on_tokens(self):
        images = torch.randn(1, 3, 16, 16)
        model = swap_attention(make("vit"), "favor32-sum", inputs={"pixel_values": images})
        with torch.no_grad():
            assert torch.isfinite(model(pixel_values=images).logits).all()

    def test_the_mode_of_training_stays(self):
        model = make("llama")
        model.train()
        model.model.layers[0].eval()
        swap_attention(model, "hedgehog-sum")
        assert model.training
        assert not model.model.layers[0].training


def test_training_gives_the_gradients_of_the_models_attention():
    ids = tokens(2, 11)
    found = []
    for name in ("mercer:softmax", "sdpa"):
        model = make("llama").double()
        model.set_attn_implementation(name)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["taylor2-sum", "taylor4-l2", "elu-sum"])
def test_a_few_steps_of_training_lower_the_loss(name):
    model = swap_attention(make("llama"), name)
    model.train()
    ids = tokens(4, 16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_gradient_checkpointing():
    ids = tokens(2, 11)
    found = []
    for checkpointing in (False, True):
        model = swap_attention(make("llama"), "taylor2-sum").train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(model.model.embed_tokens.weight.grad)
    assert_same(*found)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.filterwarnings("default")  # of the compiler, about this and other code that it leaves alone
def test_a_compiled_model_computes_the_same():
    model, ids = swap_attention(make("llama"), "taylor2-sum"), tokens(2, 20)
    expected = logits(model, ids)
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(logits(compiled, ids), expected)


def test_a_bidirectional_model_stays_bidirectional(calls):
    model = swap_attention(make("bert"), "elu-sum")
    mask = padded([9, 6], 9, "right")
    logits_of = model(input_ids=tokens(2, 9), attention_mask=mask).logits
    assert torch.isfinite(logits_of).all()
    query, key, value, scale, out = calls[0]
    kernel, normalizer = parse_attention("elu-sum")
    expected = attention(
        query, key, value, kernel=kernel, normalizer=normalizer, structure=Padding(mask.bool()), scale=scale
    )
    assert torch.equal(out, expected.transpose(1, 2))


def test_own_parts_under_an_own_name():
    name = register("fourth", kernel=Taylor(4), normalizer=L2())
    assert name == "mercer:fourth"
    model, ids = make("llama"), tokens(2, 9)
    model.set_attn_implementation(name)
    assert torch.equal(logits(model, ids), logits(swap_attention(make("llama"), "taylor4-l2"), ids))
    register("fourth", kernel=Exp())  # again: the model follows
    assert torch.equal(logits(model, ids), logits(swap_attention(make("llama"), "softmax"), ids))
