"""Cross-attention with any kernel and normaliser equals the double loop, and a remembered memory equals the memory."""

import pytest
import torch
import torch.nn.functional as F
from tests.tolerance import assert_close

from mercer import Full, Padding
from mercer.core.denominators import Length, SigmoidGate
from mercer.core.kernels import Elu, Exp, Taylor
from mercer.core.learned_maps import Hedgehog
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Standardize, Sum
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.reference import reference_attention
from mercer.core.soft_cap import SoftCap
from mercer.core.state import CacheState, FeatureState, State
from mercer.errors import InvalidArgument, Unsupported
from mercer.nn import CrossAttention

DIM, OTHER, HEADS, SIZE = 10, 7, 4, 3
PARTS = [
    (Exp(), Sum()),
    (Exp(), L2()),
    (SoftCap(2.0), Sum()),
    (Elu(), Sum()),
    (Taylor(2), L2()),
    (Elu(), Length()),
    (Hedgehog(), Standardize()),
    (PositiveRandomFeatures(6), Sum()),
]


def layer_of(kernel=None, normalizer=None, **options):
    layer = CrossAttention(
        DIM, HEADS, memory_dim=OTHER, kv_heads=2, head_dim=SIZE, kernel=kernel, normalizer=normalizer, **options
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def drawn(length=5, memory=11, batch=2):
    x = torch.randn(batch, length, DIM, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(batch, memory, OTHER, dtype=torch.float64, requires_grad=True)


def mask(*absent, length=11):
    keep = torch.ones(len(absent), length, dtype=torch.bool)
    for row, tokens in enumerate(absent):
        keep[row, list(tokens)] = False
    return keep


def expected_of(layer, x, memory, padding=None):
    query = F.linear(x, layer.query.weight, layer.query.bias).unflatten(2, (HEADS, -1)).transpose(1, 2)
    key, value = (
        F.linear(memory, weight).unflatten(2, (2, SIZE)).transpose(1, 2) for weight in layer.key_value.weight.chunk(2)
    )
    structure = Full() if padding is None else Padding(padding)
    out = reference_attention(query, key, value, layer.kernel, layer.normalizer, structure)
    return F.linear(out.transpose(1, 2).flatten(2), layer.output.weight, layer.output.bias)


@pytest.mark.parametrize(("kernel", "normalizer"), PARTS, ids=str)
@pytest.mark.parametrize("padding", [None, mask((0, 1, 5), (10,))], ids=["whole", "padded"])
def test_rows_equal_the_double_loop_from_the_memory_and_from_a_state(kernel, normalizer, padding):
    layer, (x, memory) = layer_of(kernel, normalizer), drawn()
    expected = expected_of(layer, x, memory, padding)
    cotangent = torch.randn_like(expected)
    inputs = (x, memory, *layer.parameters())
    wanted = torch.autograd.grad(expected, inputs, cotangent, allow_unused=True)
    for path in ("auto", "pairs", "features"):
        if path == "features" and kernel.feature_dim(SIZE) is None:
            continue
        layer.path = path
        for given, options in ((memory, {"padding": padding}), (layer.remember(memory, padding=padding), {})):
            y = layer(x, given, **options)
            assert_close(y, expected, 11, path)
            got = torch.autograd.grad(y, inputs, cotangent, retain_graph=True, allow_unused=True)
            for a, b in zip(got, wanted, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_close(a, b, 200, path)


def test_a_memory_is_remembered_in_the_smaller_way():
    memory = torch.randn(1, 40, OTHER, dtype=torch.float64)
    for kernel, length, kind in (
        (Exp(), 40, CacheState),
        (Elu(), 40, FeatureState),
        (Elu(), 1, CacheState),  # 3 (3 + 1) numbers against 2 3 1
        (Taylor(2), 6, CacheState),  # 10 (3 + 1) against 2 3 6
        (Taylor(2), 7, FeatureState),
    ):
        state = layer_of(kernel).remember(memory[:, :length])
        assert type(state) is kind, kernel
    assert type(layer_of(Elu(), path="pairs").remember(memory)) is CacheState
    with pytest.raises(Unsupported, match="no finite feature map"):
        layer_of(path="features").remember(memory)


@pytest.mark.parametrize("kernel", [Exp(), Elu()], ids=str)
def test_decoding_token_by_token_and_for_several_beams(kernel):
    layer, (x, memory) = layer_of(kernel, bias=True), drawn()
    padding = mask((0, 1, 2), ())
    whole = layer(x, memory, padding=padding)
    state = layer.remember(memory, padding=padding)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    for step in range(5):
        assert_close(layer(x[:, step : step + 1], state), whole[:, step : step + 1], 11)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())
    beams = torch.tensor([1, 0, 0])
    assert_close(layer(x[beams], state.select(beams)), whole[beams], 11)
    again = State.from_tensors({name: tensor.detach() for name, tensor in state.tensors().items()})
    assert_close(layer(x, again), whole, 11)


@pytest.mark.parametrize("kernel", [Exp(), Elu()], ids=str)
def test_masked_memory_is_as_if_absent(kernel):
    layer, (x, memory) = layer_of(kernel, bias=True), drawn(batch=1)
    padding = mask((0, 3, 10))
    spoilt = memory.detach().masked_fill(~padding[..., None], 1e3).requires_grad_()
    alone = layer(x, memory[:, padding[0]])
    for given, options in ((spoilt, {"padding": padding}), (layer.remember(spoilt, padding=padding), {})):
        y = layer(x, given, **options)
        assert_close(y, alone, 11)
        (gradient,) = torch.autograd.grad(y.sum(), spoilt)
        assert torch.equal(gradient[~padding], torch.zeros(3, OTHER, dtype=torch.float64))
    nothing = torch.zeros(1, 11, dtype=torch.bool)
    for y in (layer(x, memory, padding=nothing), layer(x, layer.remember(memory, padding=nothing))):
        assert torch.equal(y, layer.output.bias.expand_as(y))
    for y in (layer(x, memory[:, :0]), layer(x, layer.remember(memory[:, :0])), layer(x[:, :0], memory)):
        assert torch.equal(y, layer.output.bias.expand_as(y))


def test_gates_gains_and_scale_are_used():
    layer = layer_of(Elu(), SigmoidGate(inner=L2()), gate="head", gain="channel", gain_init=0.5, bias="gate", scale=2.0)
    x, memory = drawn()
    bare = layer_of(Elu(), L2(), scale=2.0)
    bare.load_state_dict({name: t for name, t in layer.state_dict().items() if name in bare.state_dict()})
    with torch.no_grad():
        layer.gate.weight.zero_()
        layer.gate.bias.fill_(30.0)  # a gate of 1
        layer.gain.fill_(0.5)
    assert_close(layer(x, memory), 0.5 * bare(x, memory), 11)
    assert_close(layer(x, layer.remember(memory)), 0.5 * bare(x, memory), 11)


def test_redrawn_features_refuse_a_memory_of_others():
    layer, (x, memory) = layer_of(PositiveRandomFeatures(6), path="features"), drawn()
    state = layer.remember(memory)
    layer.redraw()
    with pytest.raises(InvalidArgument):
        layer(x, state)


def test_refusals():
    layer, (x, memory) = layer_of(), drawn()
    with pytest.raises(Unsupported, match="no distances"):
        layer_of(Mixed(Exp(), Elu(), 4))
    with pytest.raises(InvalidArgument, match=r"x of \[B, L, 10\]"):
        layer(memory, memory)
    with pytest.raises(InvalidArgument, match=r"memory of \[B, M, 7\]"):
        layer.remember(x)
    with pytest.raises(InvalidArgument, match="boolean"):
        layer(x, memory, padding=torch.ones(2, 11))
    with pytest.raises(InvalidArgument, match="remember"):
        layer(x, layer.remember(memory), padding=mask((), ()))
    with pytest.raises(InvalidArgument, match="2 batch entries, but this call has 1"):
        layer(x[:1], layer.remember(memory))
    with pytest.raises(InvalidArgument, match="memory_dim"):
        CrossAttention(8, 2, memory_dim=0)
    with pytest.raises(InvalidArgument, match="kernel object"):
        CrossAttention(8, 2, kernel="elu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_memories_in_single_precision(dtype):
    """Of the size at which fused kernels run."""
    layer = CrossAttention(64, 4, bias=("query", "value", "output")).to(dtype)
    x, memory = torch.randn(2, 40, 64, dtype=dtype), torch.randn(2, 300, 64, dtype=dtype)
    exact = CrossAttention(64, 4, bias=("query", "value", "output")).double()
    exact.load_state_dict(layer.state_dict())
    padding = torch.rand(2, 300) > 0.2
    with torch.no_grad():
        expected = exact(x.double(), memory.double(), padding=padding)
        state = layer.remember(memory, padding=padding)
        found = [layer(x, memory, padding=padding), layer(x, state)]
        found += [torch.cat([layer(token, state) for token in x[:, :4].split(1, 1)], 1)]
    for y in found:
        error = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(y.double(), expected[:, : y.shape[1]], **error)


def compare(ours, theirs, padding):
    """theirs: of x, the memory and a mask to be added."""
    x, memory = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 9, 12, requires_grad=True)
    hidden = torch.zeros(2, 1, 1, 9).masked_fill(~padding[:, None, None], torch.finfo(torch.float32).min)
    outs = [
        ours(x, memory, padding=padding), ours(x, ours.remember(memory, padding=padding)), theirs(x, memory, hidden)
    ]  # fmt: skip
    upstream = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, (x, memory), upstream, retain_graph=True) for out in outs]
    for out, grad in zip(outs[:2], grads[:2], strict=True):
        torch.testing.assert_close(out, outs[2], rtol=1e-5, atol=1e-5)
        for a, b in zip(grad, grads[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("family", ["whisper", "marian", "t5"])
def test_equals_transformers(family):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if family == "t5":
        config = modeling.T5Config(d_model=12, d_kv=5, num_heads=3, dropout_rate=0, is_decoder=True)
        config._attn_implementation = "eager"
        theirs = modeling.T5Attention(config, layer_idx=0)
        ours = CrossAttention(12, 3, head_dim=5, scale=1.0)
        names = dict(zip("qkvo", ("query", "key", "value", "output"), strict=True))
        call = lambda x, memory, hidden: theirs(x, mask=hidden, key_value_states=memory)[0]  # noqa: E731
    else:
        config = getattr(modeling, f"{family.capitalize()}Config")(d_model=12)
        config._attn_implementation = "eager"
        theirs = getattr(modeling, f"{family.capitalize()}Attention")(
            12, 3, is_decoder=True, bias=True, config=config, layer_idx=0
        )
        ours = CrossAttention(12, 3, bias=("query", "value", "output") if family == "whisper" else True)
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
        call = lambda x, memory, hidden: theirs(x, key_value_states=memory, attention_mask=hidden)[0]  # noqa: E731
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    given = {f"{names[n.partition('.')[0]]}.{n.partition('.')[2]}": t for n, t in theirs.named_parameters()}
    for kind in ("weight", "bias"):
        parts = [given.pop(f"{name}.{kind}") for name in ("key", "value") if f"{name}.{kind}" in given]
        if parts:
            given[f"key_value.{kind}"] = torch.cat(parts)
    ours.load_state_dict(given)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, :3] = padding[1, 7:] = False
    compare(ours, call, padding)
