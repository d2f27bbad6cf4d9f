import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mercer.errors import InvalidArgument
from mercer.nn import linear_cross_entropy, loss
from mercer.nn.loss import SMALL, default_block


def problem(tokens=11, dim=5, vocabulary=13, dtype=torch.float64, ignored=()):
    hidden = torch.randn(tokens, dim, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, dim, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[list(ignored)] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("block", [1, 3, 11, 50, None])
@pytest.mark.parametrize("ignored", [(), (0, 4, 10)])
def test_equals_torch_to_the_last_digits(block, ignored, reduction):
    hidden, weight, targets = problem(ignored=ignored)
    ours = linear_cross_entropy(hidden, weight, targets, block=block, reduction=reduction)
    expected = F.cross_entropy(hidden @ weight.t(), targets, reduction=reduction)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(3 * ours, (hidden, weight))
    wanted = torch.autograd.grad(3 * expected, (hidden, weight))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_passes_gradcheck_in_two_leading_dimensions():
    hidden, weight, targets = problem(tokens=6, ignored=(2,))
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h.view(2, 3, 5), w, targets.view(2, 3), block=2), (hidden, weight)
    )


def test_gradients_only_where_asked_and_none_without_grad_mode():
    hidden, weight, targets = problem()
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), targets), (hidden, weight))
    for wanted in (0, 1):
        inputs = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((hidden, weight))]
        linear_cross_entropy(*inputs, targets).backward()
        torch.testing.assert_close(inputs[wanted].grad, expected[wanted])
        assert inputs[1 - wanted].grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad


def test_no_kept_token_gives_zero_and_zero_gradients():
    hidden, weight, targets = problem(tokens=3, ignored=(0, 1, 2))
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_huge_logits_stay_finite():
    hidden = torch.tensor([[3e4], [-3e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 0]), reduction="sum")
    loss.backward()
    assert loss.item() == pytest.approx(6e4)
    assert torch.equal(hidden.grad, torch.tensor([[0.0], [-2.0]]))


def test_bfloat16_has_float32_statistics_and_sums():
    hidden, weight, targets = problem(tokens=512, dim=16, vocabulary=64, dtype=torch.bfloat16)
    ours = linear_cross_entropy(hidden, weight, targets, block=8)
    rounded = (hidden @ weight.t()).float()  # the product itself is rounded to bfloat16; nothing after it is
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, F.cross_entropy(rounded, targets), rtol=1e-5, atol=1e-5)
    ours.backward()
    assert weight.grad.dtype == torch.bfloat16
    for got, exact in zip((hidden.grad, weight.grad), exact_gradients(hidden, weight, targets), strict=True):
        assert distance(got, exact) < 0.0019  # one rounding to bfloat16 costs 0.0017


def exact_gradients(hidden, weight, targets, reduction="mean"):
    """In float64, from logits that are rounded to the inputs' dtype."""
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    product, rounded = wide[0] @ wide[1].t(), (hidden @ weight.t()).detach().double()
    logits = product + (rounded - product).detach()
    return torch.autograd.grad(F.cross_entropy(logits, targets, reduction=reduction), wide)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.fixture(params=["in float32", "into float32"])
def _products(request, monkeypatch):
    """As they run here, and as on CUDA: of 16-bit matrices into a float32 one."""
    if request.param == "into float32":
        monkeypatch.setattr(loss, "_multiplies_into_float32", lambda device: True)
        monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))


@pytest.mark.usefixtures("_products")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2.6e-4), (torch.bfloat16, 2e-3)])
def test_gradients_of_16_bits_are_rounded_once_after_the_factor_of_a_loss_scaler(dtype, bound, reduction):
    hidden, weight, targets = problem(tokens=256, dim=8, vocabulary=500, dtype=dtype)
    scale = 2.0**17 if reduction == "mean" else 2.0**17 / 256  # 2^17 is infinite in float16, the gradients are not
    expected = exact_gradients(hidden, weight, targets, reduction)
    ours = linear_cross_entropy(hidden, weight, targets, block=50, reduction=reduction)
    got = torch.autograd.grad(ours * scale, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(ours * scale, (hidden, weight))
    for a, b, c in zip(got, expected, again, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, c)
        assert distance(a, b * scale) < bound


def test_under_autocast_the_loss_is_float32_and_gradients_reach_float32_parameters():
    hidden, weight, targets = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), targets), rtol=0.02, atol=0.02)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forward_and_backward_inside_autocast_sum_in_float32(dtype):
    hidden, weight, targets = problem(tokens=200, dtype=torch.float32)
    cast = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
    expected = torch.autograd.grad(linear_cross_entropy(*cast, targets, block=10) * 4096, cast)
    with torch.autocast("cpu", dtype):
        ours = linear_cross_entropy(hidden, weight, targets, block=10) * 4096
        got = torch.autograd.grad(ours, (hidden, weight))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b.float())


def test_autocast_leaves_float64_alone():
    hidden, weight, targets = problem()
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, targets)
        torch.testing.assert_close(ours, F.cross_entropy(hidden @ weight.t(), targets), rtol=1e-12, atol=1e-12)
        with pytest.raises(InvalidArgument, match="share one"):
            linear_cross_entropy(hidden.float(), weight, targets)


def test_logits_are_never_held_all_at_once():
    hidden, weight, targets = problem(tokens=300, dim=8, vocabulary=100, dtype=torch.float32)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, block=10).backward()
    assert largest.numel == hidden.numel()  # 2400, above the 1000 logits of a block and far below the 30000 of all


@pytest.mark.parametrize("vocabulary", [1, 7, 100, 1000, 4097, 32_768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_may_write_over_its_input_on_this_release_of_torch(vocabulary, dtype):
    logits = 5 * torch.randn(9, vocabulary, dtype=dtype)
    expected = logits.softmax(1)
    torch.softmax(logits, 1, out=logits)
    assert torch.equal(logits, expected)


def test_the_default_block_keeps_logits_below_the_weight_or_a_fixed_size():
    for vocabulary, dim in ((256, 128), (32_768, 256), (50_257, 768), (SMALL * 2, 8)):
        assert default_block(vocabulary, dim) * vocabulary <= max(vocabulary * dim, SMALL)
    assert default_block(256, 128) >= 4096  # a small vocabulary takes one block


def test_bad_arguments_are_refused():
    hidden, weight, targets = problem()
    with pytest.raises(InvalidArgument, match=r"0\.\.12"):
        linear_cross_entropy(hidden, weight, targets + 13)
    with pytest.raises(InvalidArgument, match="leading shape"):
        linear_cross_entropy(hidden, weight, targets[:-1])
    with pytest.raises(InvalidArgument, match="reduction"):
        linear_cross_entropy(hidden, weight, targets, reduction="none")
    with pytest.raises(InvalidArgument, match="block"):
        linear_cross_entropy(hidden, weight, targets, block=0)


def test_bad_dtypes_and_shapes_are_refused():
    hidden, weight, targets = problem()
    for wrong in (targets.double(), targets > 3):
        with pytest.raises(InvalidArgument, match="targets must be integers"):
            linear_cross_entropy(hidden, weight, wrong)
    with pytest.raises(InvalidArgument, match=r"share one .* torch\.float32 and weight torch\.float64"):
        linear_cross_entropy(hidden.float(), weight, targets)
    with pytest.raises(InvalidArgument, match="share one"):
        linear_cross_entropy(hidden.long(), weight.long(), targets)
    with pytest.raises(InvalidArgument, match=r"weight must be \[vocabulary, dim\]"):
        linear_cross_entropy(hidden, weight[0], targets)
    with pytest.raises(InvalidArgument, match="leading shape"):
        linear_cross_entropy(hidden.sum(), weight, targets)
    with pytest.raises(InvalidArgument, match="one device"):
        linear_cross_entropy(hidden, weight, targets.to("meta"))
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, targets.int()), linear_cross_entropy(hidden, weight, targets)
    )
