"""Mixtures of experts equal the sum over their experts; capacity, padding, and the losses of a router."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.errors import InvalidArgument
from mercer.models.initial import initialise
from mercer.nn import Attention, Block, Experts, FeedForward, RMSNorm, balance_loss, z_loss
from mercer.nn.activations import GATED, KINDS
from mercer.nn.routing import route


def logits_of(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def plain(layer, x, keep=None):
    """Every expert on every token, as a feed-forward of its own, and the weights by the formula, token by token."""
    made = []
    for e in range(layer.experts):
        own = FeedForward(layer.dim, layer.output.weight.shape[-1], kind=layer.kind).to(x.dtype)
        with torch.no_grad():
            own.input.weight.copy_(layer.input.weight[e])
            own.output.weight.copy_(layer.output.weight[e])
        made.append(own(x).detach())
    logits = F.linear(x, layer.router.weight, layer.router.bias).detach()
    out, used = torch.zeros_like(x), {}
    for row in range(x.shape[0]):
        for at in range(x.shape[1]):
            if keep is not None and not keep[row, at]:
                continue
            best = sorted(range(layer.experts), key=lambda e: -float(logits[row, at, e]))[: layer.chosen]
            whole = best if layer.renormalise else range(layer.experts)
            total = sum(logits[row, at, e].exp() for e in whole)
            for e in best:
                used[row, e] = used.get((row, e), 0) + 1
                if layer.capacity is None or used[row, e] <= layer.capacity:
                    out[row, at] += logits[row, at, e].exp() / total * made[e][row, at]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("renormalise", [True, False])
def test_the_output_is_the_weighted_sum_over_the_chosen_experts(kind, renormalise):
    layer = Experts(6, 10, 5, 2, kind=kind, renormalise=renormalise, router_bias=True).double()
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(layer, x), rtol=0, atol=1e-12)
    assert layer.input.weight.shape == (5, 20 if kind in GATED else 10, 6)


@settings(max_examples=30)
@given(
    st.integers(1, 3), st.integers(0, 9), st.integers(1, 6), st.data(), st.sampled_from([None, 1, 2, 5]), st.booleans()
)
def test_any_sizes_capacities_and_padding(batch, length, experts, data, capacity, renormalise):
    chosen = data.draw(st.integers(1, experts))
    layer = Experts(3, 4, experts, chosen, capacity=capacity, renormalise=renormalise).double()
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(batch, length, 3, dtype=torch.float64)
    keep = torch.rand(batch, length) > 0.3
    torch.testing.assert_close(layer(x), plain(layer, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x, padding=keep), plain(layer, x, keep), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["geglu", "silu"])
@pytest.mark.parametrize("capacity", [None, 3])
def test_gradients_pass_gradcheck(kind, capacity):
    layer = Experts(3, 4, 4, 2, kind=kind, capacity=capacity, renormalise=False).double()
    torch.nn.init.normal_(layer.router.weight)
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([[1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def call(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,), {"padding": keep})

    assert torch.autograd.gradcheck(call, (x, *weights))


def test_the_weights_of_mixtral_and_of_jamba():
    logits = logits_of((2, 1, 0, -1))
    weights = {r: route(logits, 2, renormalise=r).weights.flatten() for r in (True, False)}
    torch.testing.assert_close(weights[True], torch.tensor([0.7311, 0.2689]).double(), rtol=0, atol=5e-5)
    torch.testing.assert_close(weights[False], torch.tensor([0.6439, 0.2369]).double(), rtol=0, atol=5e-5)


def test_a_full_expert_adds_exactly_nothing():
    """Six equal tokens and room for two (transformers#37017)."""
    layer = Experts(4, 8, 3, 1, kind="relu", renormalise=False, capacity=2)
    x = torch.randn(1, 1, 4).expand(2, 6, 4)
    y = layer(x)
    assert (y[:, :2] != 0).any(-1).all()
    assert torch.equal(y[:, 2:], torch.zeros(2, 4, 4))
    padded = layer(x, padding=torch.tensor([[0, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool))
    assert (padded[0] != 0).any(-1).tolist() == [False, True, False, True, False, False]  # padding takes no place


def test_room_goes_to_the_earlier_token_and_later_ones_change_nothing():
    logits = logits_of((3.0, 2, 0), (0, 3, 2), (2, 3, 0), (3, 2, 0))
    kept = route(logits, 2, renormalise=True, capacity=2).kept[0]
    assert kept.tolist() == [[True, True], [True, True], [False, True], [False, False]]  # a second choice comes first
    layer = Experts(4, 8, 3, 2, capacity=2)
    x = torch.randn(2, 9, 4)
    torch.testing.assert_close(layer(x)[:, :5], layer(x[:, :5]))


def test_what_stands_in_the_padding_does_not_leak():
    layer, x = Experts(4, 8, 3, 2), torch.randn(1, 5, 4)
    keep = torch.tensor([[1, 0, 1, 1, 0]], dtype=torch.bool)
    spoilt = x.masked_fill(~keep[..., None], torch.nan).requires_grad_()
    found = []
    y = layer(spoilt, padding=keep, routings=found)
    assert torch.equal(y[:, [1, 4]], torch.zeros(1, 2, 4))
    torch.testing.assert_close(y[keep], layer(x[keep][None])[0])
    (y.sum() + balance_loss(*found) + z_loss(*found)).backward()
    assert torch.equal(spoilt.grad[~keep], torch.zeros(2, 4))
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_the_losses_of_a_router_by_hand():
    logits = logits_of((1, 0, 0), (0, 1, 0), (2, 0, 0), (0, 0, 5)).requires_grad_()
    found = route(logits, 1, renormalise=False)
    share = torch.tensor([2, 1, 1], dtype=torch.float64) / 4
    expected = 3 * (share * logits[0].softmax(-1).mean(0)).sum()
    torch.testing.assert_close(balance_loss(found), expected)
    got, wanted = (torch.autograd.grad(loss, logits)[0] for loss in (balance_loss(found), expected))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(z_loss(found), logits.exp().sum(-1).log().square().mean())
    even = 1e-9 * torch.eye(4, dtype=torch.float64)[None]  # all experts alike, each chosen once
    assert balance_loss(route(even, 1, renormalise=False)).item() == pytest.approx(1)
    assert balance_loss(route(even, 4, renormalise=True)).item() == pytest.approx(4)
    one = torch.tensor([[[50.0, 0, 0]] * 5])
    assert balance_loss(route(one, 1, renormalise=False)).item() == pytest.approx(3)


def test_masked_tokens_change_no_loss():
    """transformers#28505."""
    logits = torch.randn(2, 6, 4, dtype=torch.float64)
    alone = [route(logits[:1, :4], 2, renormalise=True), route(logits[1:], 2, renormalise=True)]
    keep = torch.tensor([[1] * 4 + [0] * 2, [1] * 6], dtype=torch.bool)
    both = route(logits.masked_fill(~keep[..., None], 7.0), 2, renormalise=True, padding=keep)
    for loss in (balance_loss, z_loss):
        torch.testing.assert_close(loss(both), loss(*alone))
        empty = route(logits, 2, renormalise=True, padding=torch.zeros(2, 6, dtype=torch.bool))
        assert loss(empty).item() == 0
    with pytest.raises(InvalidArgument, match="equally many experts"):
        balance_loss(both, route(logits[..., :3], 2, renormalise=True))
    with pytest.raises(InvalidArgument, match="at least one"):
        z_loss()


def test_autocast_keeps_the_router_in_float32():
    layer, x = Experts(8, 16, 4, 2), torch.randn(2, 5, 8)
    torch.nn.init.normal_(layer.router.weight)
    plain_found, found = [], []
    exact = layer(x, routings=plain_found)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, routings=found)
    assert y.dtype == torch.bfloat16
    assert torch.equal(found[0].weights, plain_found[0].weights)
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.02)
    half = layer.bfloat16()
    torch.testing.assert_close(half(x.bfloat16()).float(), exact, rtol=0.05, atol=0.02)


def test_a_block_hands_padding_and_routings_on():
    experts, norm = Experts(8, 12, 3, 1, renormalise=False, capacity=2), RMSNorm(8)
    block = Block(Attention(8, 2), experts, RMSNorm(8), norm)
    x, keep = torch.randn(1, 6, 8), torch.tensor([[0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    found = []
    y = block(x, padding=keep, routings=found)
    assert len(found) == 1
    assert torch.equal(found[0].padding, keep)
    middle = x + block.attention(block.attention_norm(x), padding=keep)
    torch.testing.assert_close(y, middle + experts(norm(middle), padding=keep))
    torch.testing.assert_close(y[keep], block(x[keep][None])[0])
    plain_block = Block(Attention(8, 2), FeedForward(8), RMSNorm(8), RMSNorm(8))
    plain_block(x, routings=found)
    assert len(found) == 1


def test_initial_weights_of_experts_depend_on_seed_and_name_and_leave_the_stream_narrow():
    block = Block(Attention(32, 2), Experts(32, 64, 4, 2), RMSNorm(32), RMSNorm(32))
    initialise(block, std=0.1, seed=3, residual_outputs=4)
    inward, outward = block.feedforward.input.weight, block.feedforward.output.weight
    assert inward.std().item() == pytest.approx(0.1, rel=0.05)
    assert outward.std().item() == pytest.approx(0.05, rel=0.05)
    assert block.feedforward.router.weight.std().item() == pytest.approx(0.1, rel=0.3)
    assert not torch.equal(inward[0], inward[1])
    other = Block(Attention(32, 2), Experts(32, 64, 4, 2), RMSNorm(32), RMSNorm(32))
    initialise(other, std=0.1, seed=3, residual_outputs=4)
    assert torch.equal(other.feedforward.input.weight, inward)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dim": 0}, "dim and hidden"),
        ({"dim": 4, "experts": 2, "chosen": 3}, "from 1 to all of them"),
        ({"dim": 4, "chosen": 0}, "from 1 to all of them"),
        ({"dim": 4, "capacity": 0}, "at least 1 token"),
        ({"dim": 4, "kind": "tanh"}, "swiglu"),
    ],
)
def test_bad_arguments_are_refused(arguments, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        Experts(**arguments)
    with pytest.raises(InvalidArgument, match=r"\[B, L, 4\]"):
        Experts(4)(torch.randn(3, 4))
    with pytest.raises(InvalidArgument, match="boolean"):
        Experts(4)(torch.randn(1, 3, 4), padding=torch.ones(1, 3))


def drawn(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3)
    return module


def agree(ours, theirs, dim=12):
    x, upstream = torch.randn(2, 7, dim, requires_grad=True), torch.randn(2, 7, dim)
    outs = [layer(x) for layer in (ours, theirs)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(out, x, upstream)[0] for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("family", ["mixtral", "jamba"])
def test_chosen_experts_equal_transformers(family):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    config = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2, "num_key_value_heads": 2}
    if family == "mixtral":
        config = modeling.MixtralConfig(**config, num_local_experts=5, num_experts_per_tok=2)
        theirs = drawn(modeling.MixtralSparseMoeBlock(config))
        router = theirs.gate
    else:
        config = modeling.JambaConfig(**config, num_experts=5, num_experts_per_tok=2)
        theirs = drawn(modeling.JambaSparseMoeBlock(config))
        router = theirs.router
    ours = Experts(12, 20, 5, 2, renormalise=family == "mixtral")
    with torch.no_grad():
        ours.router.weight.copy_(router.weight)
        ours.input.weight.copy_(theirs.experts.gate_up_proj)
        ours.output.weight.copy_(theirs.experts.down_proj)
    agree(ours, theirs)


@pytest.mark.peers
@pytest.mark.parametrize("capacity", [2, 64])
def test_switch_equals_transformers(capacity):
    modeling = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    config = modeling.SwitchTransformersConfig(
        d_model=12, d_ff=20, num_experts=3, expert_capacity=capacity, dropout_rate=0, dense_act_fn="relu"
    )
    theirs = drawn(modeling.SwitchTransformersSparseMLP(config)).eval()
    ours = Experts(12, 20, 3, 1, kind="relu", renormalise=False, capacity=capacity)
    with torch.no_grad():
        ours.router.weight.copy_(theirs.router.classifier.weight)
        for e in range(3):
            ours.input.weight[e] = theirs.experts[f"expert_{e}"].wi.weight
            ours.output.weight[e] = theirs.experts[f"expert_{e}"].wo.weight
    agree(ours, theirs)
    x = torch.randn(2, 7, 12)
    assert bool((ours(x) == 0).all(-1).any()) == (capacity == 2)


@pytest.mark.peers
@pytest.mark.parametrize("masked", [True, False])
def test_losses_equal_transformers(masked):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    switch = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    logits = torch.randn(2, 3, 6, 5)  # two layers
    keep = torch.rand(3, 6) > 0.4 if masked else None
    found = [route(layer, 2, renormalise=True, padding=keep) for layer in logits]
    expected = mixtral.load_balancing_loss_func(tuple(layer.flatten(0, 1) for layer in logits), 5, 2, keep)
    torch.testing.assert_close(balance_loss(*found), expected)
    if not masked:
        torch.testing.assert_close(z_loss(found[0]), switch.router_z_loss_func(logits[0]))
