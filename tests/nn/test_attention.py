import pytest
import torch
import torch.nn.functional as F

from mercer.core.denominators import SigmoidGate
from mercer.core.kernels import Elu, Exp, Taylor
from mercer.core.normalizers import L2, RMS, Sum
from mercer.core.structures import Causal, Documents, Full, Window
from mercer.errors import InvalidArgument
from mercer.nn import Attention, Rotary, alibi_slopes

PARTS = [(Exp(), Sum()), (Exp(), L2()), (Elu(), Sum()), (Taylor(2), L2())]


def plain(layer, x):
    """Queries, keys and values [B, H, L, D] by slicing, turned by the brick itself, keys repeated for the groups."""
    batch, length, _ = x.shape
    qkv = F.linear(x, layer.qkv.weight, layer.qkv.bias).view(batch, length, -1, layer.head_dim)
    q, k, v = qkv.split((layer.heads, layer.kv_heads, layer.kv_heads), 2)
    if layer.rotary is not None:
        q, k = (layer.rotary(t, torch.arange(length)[None]) for t in (q, k))
    group = layer.heads // layer.kv_heads
    return (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_softmax_heads_and_groups_equal_torch(kv_heads, rotary, bias):
    layer = Attention(12, 4, kv_heads=kv_heads, head_dim=6, rotary=Rotary(6) if rotary else None, bias=bias).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    out = F.scaled_dot_product_attention(*plain(layer, x), is_causal=True)
    expected = F.linear(out.transpose(1, 2).flatten(2), layer.output.weight, layer.output.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_bias", [("query", "value", "output"), "qkv", "output", ("key", "output"), ["gate"]])
def test_a_bias_of_some_projections_is_theirs_alone(with_bias):
    parts = ("query", "key", "value") if with_bias == "qkv" else (with_bias,) if with_bias == "output" else with_bias
    normalizer = SigmoidGate()
    layer = Attention(12, 4, kv_heads=2, head_dim=6, normalizer=normalizer, gate="head", bias=with_bias).double()
    whole = Attention(12, 4, kv_heads=2, head_dim=6, normalizer=normalizer, gate="head", bias=True).double()
    sizes = {"query": 24, "key": 12, "value": 12}
    for parameter in layer.parameters():
        parameter.data.normal_()
    weights = dict(layer.state_dict())
    own = iter(weights.get("qkv.bias", torch.zeros(0)).split([n for part, n in sizes.items() if part in parts]))
    weights["qkv.bias"] = torch.cat([next(own) if part in parts else torch.zeros(n) for part, n in sizes.items()])
    for part, size in (("output", 12), ("gate", 4)):
        assert (f"{part}.bias" in weights) == (part in parts)
        weights.setdefault(f"{part}.bias", torch.zeros(size))
    assert sum(p.numel() for n, p in layer.named_parameters() if n.endswith("bias")) == sum(
        (sizes | {"output": 12, "gate": 4})[part] for part in parts
    )
    whole.load_state_dict(weights)
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer(x), whole(x), rtol=0, atol=1e-12)
    layer(x).square().sum().backward()
    assert all((p.grad != 0).any() for p in layer.parameters())


def test_a_bias_of_an_unknown_projection_is_refused():
    for with_bias in ("keys", ("query", "out"), ["output", "qk"]):
        with pytest.raises(InvalidArgument, match="query, key, value, output, gate and qkv"):
            Attention(8, 2, bias=with_bias)


def test_the_operands_are_what_the_operator_is_given():
    layer = Attention(12, 4, kv_heads=2, head_dim=6, rotary=Rotary(6)).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = layer.operands(x)
    assert (q.shape, k.shape, v.shape) == ((2, 4, 7, 6), (2, 2, 7, 6), (2, 2, 7, 6))
    for found, expected in zip((q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)), plain(layer, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    with pytest.raises(InvalidArgument, match="expects"):
        layer.operands(x[0])


def test_each_query_head_reads_its_own_group():
    layer = Attention(4, 4, kv_heads=2, head_dim=1)
    values = torch.tensor([10.0, 20.0])
    layer.qkv.weight.data.zero_()
    layer.qkv.weight.data[6:] = values[:, None] / 4  # x of ones gives the values 10 and 20
    layer.output.weight.data.copy_(torch.eye(4))
    assert layer(torch.ones(1, 3, 4))[0].tolist() == [[10, 10, 20, 20]] * 3


def test_scale_structure_and_kernel_are_used():
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    layer = Attention(8, 2, structure=Causal() & Window.last(3), scale=0.1).double()
    q, k, v = plain(layer, x)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    scores = (0.1 * q @ k.transpose(-1, -2)).masked_fill((distance < 0) | (distance > 2), -torch.inf)
    expected = layer.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    other = Attention(8, 2, structure=Full(), kernel=Elu()).double()
    q, k, v = plain(other, x)
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2)
    expected = other.output((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(other(x), expected, rtol=0, atol=1e-12)


def test_alibi_adds_the_standard_slopes():
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    layer = Attention(12, 6, alibi=True).double()
    q, k, v = plain(layer, x)
    distance = (torch.arange(5)[:, None] - torch.arange(5)).double()
    scores = q @ k.transpose(-1, -2) / 2**0.5 - alibi_slopes(6).double()[:, None, None] * distance
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(layer(x), layer.output((weights @ v).transpose(1, 2).flatten(2)), rtol=0, atol=1e-7)


@pytest.mark.parametrize("normalizer", [L2(), RMS()])
@pytest.mark.parametrize(("gain", "shape"), [("head", (3,)), ("channel", (3, 2))])
def test_a_gain_multiplies_each_head_and_learns(normalizer, gain, shape):
    layer = Attention(6, 3, normalizer=normalizer, gain=gain, gain_init=0.25)
    bare = Attention(6, 3, normalizer=normalizer)
    bare.load_state_dict({name: t for name, t in layer.state_dict().items() if name != "gain"})
    x = torch.randn(2, 5, 6)
    assert layer.gain.shape == shape
    torch.testing.assert_close(layer(x), bare(x) * 0.25)
    layer(x).square().sum().backward()
    assert (layer.gain.grad != 0).all()
    with torch.no_grad():
        layer.gain.zero_()[1] = 1  # only head 1 speaks
        only = bare.output.weight.clone()
        only[:, [0, 1, 4, 5]] = 0
        bare.output.weight.copy_(only)
    torch.testing.assert_close(layer(x), bare(x))


@pytest.mark.parametrize(("kernel", "normalizer"), PARTS)
@pytest.mark.parametrize("where", ["left", "right", "inside"])
def test_masked_tokens_are_as_if_absent(kernel, normalizer, where):
    layer = Attention(8, 2, kernel=kernel, normalizer=normalizer, rotary=Rotary(4)).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    masked = {"left": [0, 1, 2], "right": [7, 8, 9], "inside": [2, 3, 8]}[where]
    keep = torch.ones(1, 10, dtype=torch.bool)
    keep[:, masked] = False
    padded = torch.full((1, 10, 8), 9.0, dtype=torch.float64)
    padded[keep] = x[0]
    padded.requires_grad_()
    out, state = layer(padded, padding=keep, return_state=True)
    torch.testing.assert_close(out[keep], layer(x)[0], rtol=0, atol=1e-12)
    assert state.length.tolist() == [7]
    out[keep].sum().backward()
    assert torch.equal(padded.grad[~keep], torch.zeros(3, 8, dtype=torch.float64))


@pytest.mark.parametrize(("kernel", "normalizer"), PARTS)
def test_a_state_continues_with_padding_in_either_part(kernel, normalizer):
    layer = Attention(8, 2, kernel=kernel, normalizer=normalizer, rotary=Rotary(4)).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0, 1, 1]], dtype=torch.bool)
    whole, last = layer(x, padding=keep, return_state=True)
    first, state = layer(x[:, :4], padding=keep[:, :4], return_state=True)
    second, state = layer(x[:, 4:], padding=keep[:, 4:], state=state, return_state=True)
    torch.testing.assert_close(torch.cat((first, second), 1)[keep], whole[keep], rtol=0, atol=1e-12)
    assert state.length.tolist() == last.length.tolist() == [9, 5]


def test_the_structure_of_a_call_is_composed_with_the_layers_own():
    layer = Attention(8, 2)
    x = torch.randn(1, 7, 8)
    packed = layer(x, structure=Documents(torch.tensor([0, 3, 7])))
    torch.testing.assert_close(packed, torch.cat((layer(x[:, :3]), layer(x[:, 3:])), 1))


@pytest.mark.parametrize(("kernel", "normalizer"), PARTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_documents_continue_their_own_states_and_positions(kernel, normalizer, batch):
    layer = Attention(8, 2, kv_heads=1, kernel=kernel, normalizer=normalizer, rotary=Rotary(4)).double()
    calls = [[0, 2, 2, 6], [0, 3, 4, 5], [0, 1, 2, 5]]  # lengths change from call to call; document 1 starts empty
    parts = [torch.randn(batch, offsets[-1], 8, dtype=torch.float64) for offsets in calls]
    state, outs = None, []
    for x, offsets in zip(parts, calls, strict=True):
        out, state = layer(x, structure=Documents(torch.tensor(offsets)), state=state, return_state=True)
        outs.append(out)
    for document in range(3):
        spans = [slice(*offsets[document : document + 2]) for offsets in calls]
        alone = layer(torch.cat([x[:, span] for x, span in zip(parts, spans, strict=True)], 1))
        packed = torch.cat([out[:, span] for out, span in zip(outs, spans, strict=True)], 1)
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    assert state.length.tolist() == [6, 2, 8] * batch


def test_a_state_of_another_number_of_rows_or_documents_is_refused():
    layer, x = Attention(8, 2, rotary=Rotary(4)), torch.randn(2, 4, 8)
    _, state = layer(x, structure=Documents(torch.tensor([0, 1, 4])), return_state=True)
    with pytest.raises(InvalidArgument, match=r"one for each row, \[2\], got \[4\]"):
        layer(x, state=state)
    with pytest.raises(InvalidArgument, match=r"one for each document of each row, \[6\], got \[4\]"):
        layer(x, structure=Documents(torch.tensor([0, 1, 2, 4])), state=state)


def test_a_backward_pass_inside_autocast_keeps_dtypes_and_nears_float32():
    layer, x = Attention(8, 2, kv_heads=1, rotary=Rotary(4)), torch.randn(2, 5, 8, requires_grad=True)
    inputs = (x, *layer.parameters())
    exact = torch.autograd.grad(layer(x).square().sum(), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(layer(x).float().square().sum(), inputs)
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.05 * b.norm()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dim": 8, "heads": 3}, "not a multiple"),
        ({"dim": 8, "heads": 4, "kv_heads": 3}, "divisor"),
        ({"dim": 8, "heads": 2, "rotary": Rotary(6)}, "turns 6 channels but a head has 4"),
        ({"dim": 8, "heads": 2, "gain": "head"}, "L2 and RMS"),
        ({"dim": 8, "heads": 2, "gain": "row", "normalizer": L2()}, "none, head, channel"),
    ],
)
def test_bad_arguments_are_refused(arguments, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        Attention(**arguments)
    with pytest.raises(InvalidArgument, match=r"\[B, L, 8\]"):
        Attention(8, 2)(torch.randn(1, 3, 6))
