import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.nn import Rotary
from mercer.nn.rotary import heads_per_run, split_and_turn


def by_complex_numbers(x, positions, base, pairing):
    """The definition in float64: a pair is a complex number, turned by e^{i p w}."""
    dim = x.shape[-1]
    x = x.double()
    pairs = x.unflatten(-1, (2, dim // 2)).transpose(-1, -2) if pairing == "half" else x.unflatten(-1, (dim // 2, 2))
    w = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[..., None].double() * w)[:, :, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return (turned.transpose(-1, -2) if pairing == "half" else turned).flatten(-2)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [2, 6, 16])
def test_turning_is_multiplication_by_a_complex_number(dim, pairing):
    x = torch.randn(2, 5, 3, dim)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 1000, 100_000, 1_000_000]])
    turned = Rotary(dim, base=500.0, pairing=pairing)(x, positions)
    expected = by_complex_numbers(x, positions, 500.0, pairing)
    torch.testing.assert_close(turned.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(turned[0, 0], x[0, 0])


def test_products_depend_on_the_distance_only():
    rotary, q, k = Rotary(8), torch.randn(1, 1, 1, 8).double(), torch.randn(1, 1, 1, 8).double()
    products = [(rotary(q, torch.tensor([[i + 5]])) * rotary(k, torch.tensor([[i]]))).sum().item() for i in (0, 3, 900)]
    assert products == pytest.approx([products[0]] * 3, abs=1e-11)
    assert abs(products[0] - (q * k).sum().item()) > 1e-3


def test_the_pairings_differ_by_a_permutation_of_channels():
    x, positions = torch.randn(2, 4, 3, 8), torch.arange(4)[None]
    order = torch.arange(8).view(2, 4).t().flatten()  # channel 2i holds i, channel 2i + 1 holds i + 4
    interleaved = Rotary(8, pairing="interleaved")(x[..., order], positions)
    torch.testing.assert_close(interleaved, Rotary(8)(x, positions)[..., order])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 6), (4, 2, 6), (6, 1, 4), (2, 2, 96)])
@pytest.mark.parametrize("each_row", [False, True])
def test_the_fused_split_equals_turning_the_parts(heads, kv_heads, dim, pairing, each_row):
    rotary = Rotary(dim, pairing=pairing)
    batch, length = 2, 5
    run = heads_per_run(dim, heads, kv_heads)
    if each_row:
        positions = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
        turns = rotary.turns(positions, heads=run, dtype=torch.float64)
    else:
        positions = torch.arange(length)[None]
        turns = rotary.first_turns(length, heads=run, dtype=torch.float64, device=torch.device("cpu"))
    qkv = torch.randn(batch, length, heads + 2 * kv_heads, dim, dtype=torch.float64, requires_grad=True)
    fused = split_and_turn(qkv, heads, kv_heads, turns)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 2)
    plain = (rotary(q, positions), rotary(k, positions), v)
    weights = [torch.randn_like(part.transpose(1, 2)).transpose(1, 2) for part in plain]  # strided as attention's are
    for ours, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)
    (got,) = torch.autograd.grad(fused, qkv, weights)
    (expected,) = torch.autograd.grad(plain, qkv, weights)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


def test_the_fused_split_passes_gradcheck():
    rotary = Rotary(4)
    turns = rotary.first_turns(3, heads=2, dtype=torch.float64, device=torch.device("cpu"))
    qkv = torch.randn(1, 3, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: split_and_turn(x, 2, 2, turns), qkv)


def test_bfloat16_is_turned_in_float32_and_rounded_once():
    x, positions = torch.randn(1, 6, 6, 16).bfloat16(), torch.arange(1000, 1006)[None]
    rotary = Rotary(16)
    expected = by_complex_numbers(x, positions, 10000.0, "half").bfloat16()
    torch.testing.assert_close(rotary(x, positions), expected, rtol=2**-8, atol=1e-6)
    fused = split_and_turn(x, 2, 2, rotary.turns(positions, heads=2))
    torch.testing.assert_close(fused[0], expected[:, :, :2], rtol=2**-8, atol=1e-6)
    assert fused[1].dtype == torch.bfloat16


def test_the_kept_table_follows_length_and_dtype():
    rotary, cpu = Rotary(4), torch.device("cpu")
    short = rotary.first_turns(3, heads=1, dtype=torch.float32, device=cpu)
    long = rotary.first_turns(9, heads=2, dtype=torch.float64, device=cpu)
    assert short.cos.shape == (1, 3, 4)
    assert long.cos.shape == (1, 9, 8)
    assert long.cos.dtype == torch.float64
    torch.testing.assert_close(long.cos, rotary.turns(torch.arange(9)[None], heads=2, dtype=torch.float64).cos)


def test_positions_and_factors_of_another_shape_are_refused():
    rotary, x = Rotary(4), torch.randn(1, 3, 6, 4)
    for positions in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(InvalidArgument, match=r"must be \[1, 3\]"):
            rotary(x, positions)
        with pytest.raises(InvalidArgument, match=r"turns of \[B or 1, L, 8\]"):
            split_and_turn(x, 2, 2, rotary.turns(positions, heads=2))
    with pytest.raises(InvalidArgument, match=r"expects \[B, L, 5, D\]"):
        split_and_turn(x, 3, 1, rotary.turns(torch.arange(3)[None]))


@pytest.mark.parametrize("arguments", [{"dim": 5}, {"dim": 4, "base": 0.0}, {"dim": 4, "pairing": "thirds"}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        Rotary(**arguments)
    with pytest.raises(InvalidArgument, match=r"\[B, L, H, 4\]"):
        Rotary(4)(torch.randn(1, 2, 3, 6), torch.arange(2)[None])


def test_kept_factors_are_those_of_the_positions_asked_for():
    """Every call with other positions, heads or dtype makes its own; what inference mode made serves training."""
    rotary = Rotary(8)
    asked = [
        (torch.tensor([[p]]), heads, dtype)
        for p in (3, 4)
        for heads in (1, 2)
        for dtype in (torch.float32, torch.float64)
    ]
    with torch.inference_mode():
        first = [rotary.turns(torch.tensor([[3]]), heads=1, dtype=torch.float32) for _ in range(2)]
    assert first[0].cos is first[1].cos
    for positions, heads, dtype in [*asked, *reversed(asked)]:
        kept, fresh = (r.turns(positions, heads=heads, dtype=dtype) for r in (rotary, Rotary(8)))
        assert all(torch.equal(a, b) for a, b in zip(kept[:3], fresh[:3], strict=True))
        assert kept.cos.dtype == dtype
    positions = torch.tensor([[5, 6]])
    before = rotary.turns(positions).cos.clone()
    positions += 1
    assert not torch.equal(rotary.turns(positions).cos, before)
    with torch.inference_mode():
        rotary.turns(torch.tensor([[7]]))
    x = torch.randn(1, 1, 2, 8, requires_grad=True)
    rotary(x, torch.tensor([[7]])).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("length", [3, 65, 200])
def test_a_table_made_in_inference_mode_serves_training(length):
    """Above 64 positions the table was an inference tensor, which no later backward pass can keep."""
    rotary = Rotary(8)
    with torch.inference_mode():
        rotary.first_turns(length, heads=1, dtype=torch.float32, device=torch.device("cpu"))
    turns = rotary.first_turns(length, heads=1, dtype=torch.float32, device=torch.device("cpu"))
    qkv = torch.randn(1, length, 3, 8, requires_grad=True)
    torch.cat(split_and_turn(qkv, 1, 1, turns)).square().sum().backward()
    torch.testing.assert_close(qkv.grad, 2 * qkv.detach(), rtol=0, atol=1e-5)  # turning keeps lengths
