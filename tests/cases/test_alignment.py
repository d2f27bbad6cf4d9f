"""Cases 12, 14-16 and 18-20: heads, scales, empty rows, alignment, masks in half precision, windows, distances."""

import pytest
import torch
from tests.cases.builders import cells, filled, normal
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.log_weights import Alibi
from mercer.core.normalizers import L2, Normalizer, Sum
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal, Full, Padding, Structure, Window
from mercer.nn.rotary import Rotary
from mercer.ops import attention

KERNELS: list[Kernel] = [Exp(), Elu(), Taylor(2)]
CAUSAL = [(kernel, form, path) for kernel in KERNELS for form, path in cells(kernel, Causal())]
FULL = [(kernel, form, path) for kernel in KERNELS for form, path in cells(kernel, Full())]
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("kernel", "form", "path"), CAUSAL, ids=str)
def test_case_12_equal_heads_are_equal(kernel: Kernel, form: str, path: str):
    """fla PR 594: a kernel gave other numbers for one head than for eight equal ones."""
    one = [normal(2, 1, 9, 4, seed=s).requires_grad_() for s in range(3)]
    eight = [x.detach().expand(-1, 8, -1, -1).clone().requires_grad_() for x in one]
    options = {"kernel": kernel, "structure": Causal(), "form": form, "path": path}
    single, many = attention(*one, **options), attention(*eight, **options)
    cotangent = normal(2, 1, 9, 4, seed=5)
    wanted = torch.autograd.grad(single, one, cotangent)
    got = torch.autograd.grad(many, eight, cotangent.expand(-1, 8, -1, -1))
    for h in range(8):
        assert_close(many[:, h : h + 1], single, 9, f"head {h}")
        for g, w in zip(got, wanted, strict=True):
            assert_close(g[:, h : h + 1], w, 9, f"gradient of head {h}")


@pytest.mark.parametrize("scale", [None, 1.0, 8**-0.5, 0.1])
@pytest.mark.parametrize(("kernel", "form", "path"), CAUSAL, ids=str)
def test_case_12_as_many_tokens_as_heads_and_any_scale(kernel: Kernel, form: str, path: str, scale: float | None):
    """fla#47: with T = H = 4 a layout guessed from the shape was the wrong one, and scales differed between forms."""
    tensors = [normal(2, 4, 4, 8, seed=s).requires_grad_() for s in range(3)]
    cotangent = normal(2, 4, 4, 8, seed=5)
    for norm in (Sum(), L2()):
        expected = reference_attention(*tensors, kernel, norm, Causal(), scale)
        out = attention(*tensors, kernel=kernel, normalizer=norm, structure=Causal(), scale=scale, form=form, path=path)
        assert_close(out, expected, 4)
        wanted, got = (torch.autograd.grad(x, tensors, cotangent) for x in (expected, out))
        for g, w in zip(got, wanted, strict=True):
            assert_close(g, w, 8, f"{norm}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("norm", [Sum(), L2()], ids=str)
@pytest.mark.parametrize(("kernel", "form", "path"), FULL, ids=str)
def test_case_14_a_row_that_sees_nothing(kernel: Kernel, form: str, path: str, norm: Normalizer, dtype: torch.dtype):
    """pytorch#103963, #110213: softmax over a fully masked row is 0/0; the row must be 0 and its gradients finite."""
    tensors = [normal(2, 2, 5, 4, seed=s, dtype=dtype).requires_grad_() for s in range(3)]
    mask = torch.tensor([[False] * 5, [True] * 5])
    structure = Padding(mask)
    out = attention(*tensors, kernel=kernel, normalizer=norm, structure=structure, form=form, path=path)
    assert not out[0].any()
    assert bool(out[1].any())
    out.sum().backward()
    for x in tensors:
        assert x.grad is not None
        assert bool(torch.isfinite(x.grad).all())
        assert not x.grad[0].any()


@pytest.mark.parametrize(("kernel", "form", "path"), [c for c in CAUSAL if c[2] == "pairs"], ids=str)
def test_case_14_a_window_without_keys(kernel: Kernel, form: str, path: str):
    """The same reports, with rows emptied by the structure alone: queries in front of all keys."""
    q = normal(1, 1, 6, 4).requires_grad_()
    k, v = (normal(1, 1, 2, 4, seed=s).requires_grad_() for s in (1, 2))
    out = attention(q, k, v, kernel=kernel, structure=Window.last(2), form=form, path=path)
    assert not out[:, :, :4].any()
    out.sum().backward()
    assert not q.grad[:, :, :4].any()
    assert all(bool(torch.isfinite(x.grad).all()) for x in (q, k, v))


@pytest.mark.parametrize(("kernel", "form", "path"), CAUSAL, ids=str)
def test_case_15_unequal_lengths_align_at_the_end(kernel: Kernel, form: str, path: str):
    """pytorch#103082, #108108: zero scores average what is visible, so the numbers show the alignment."""

    def run(queries: int, keys: int, values: list[float]) -> list[float]:
        v = torch.tensor(values, dtype=torch.float64).view(1, 1, keys, 1)
        q, k = filled(0.0, 1, 1, queries, 1), filled(0.0, 1, 1, keys, 1)
        return attention(q, k, v, kernel=kernel, structure=Causal(), form=form, path=path).flatten().tolist()

    assert run(2, 5, [0, 1, 2, 3, 4]) == pytest.approx([1.5, 2.0], abs=1e-12)
    assert run(5, 2, [1, 2]) == pytest.approx([0, 0, 0, 1, 1.5], abs=1e-12)


@pytest.mark.parametrize(("kernel", "form", "path"), [*CAUSAL, *FULL], ids=str)
def test_case_16_consecutive_query_heads_share_a_key_head(kernel: Kernel, form: str, path: str):
    """onnx#7274: query heads were spread over the KV heads in turn (10, 20, 10, 20)."""
    q, k = normal(1, 4, 3, 2), normal(1, 2, 3, 2, seed=1)
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).view(1, 2, 1, 1).expand(-1, -1, 3, -1)
    for structure in (Causal(), Full()):
        out = attention(q, k, v, kernel=kernel, structure=structure, form=form, path=path)
        assert_close(out[0, :, :, 0], torch.tensor([10.0, 10, 20, 20], dtype=torch.float64).view(4, 1).expand(-1, 3), 3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_case_18_masks_combined_in_half_precision(kernel: Kernel, form: str, dtype: torch.dtype):
    """transformers PR 17306: adding two masks of the dtype's minimum gave -inf, and a row of them NaN."""
    tensors = [normal(2, 2, 6, 4, seed=s, dtype=dtype) for s in range(3)]
    mask = torch.tensor([[False, False, True, False, True, True], [True] * 6])
    slopes = torch.tensor([100.0, 1e4])
    structures: list[Structure] = [
        Causal() & Padding(mask),
        Causal() & Window.last(2) & Padding(mask),
        Causal() & Alibi(slopes) & Window.last(3) & Padding(mask),
    ]
    for structure in structures:
        out = attention(*tensors, kernel=kernel, structure=structure, form=form)
        expected = reference_attention(*tensors, kernel, Sum(), structure)
        assert_close(out, expected, 6, str(structure))


@pytest.mark.parametrize(
    ("kernel", "form"), [(k, f) for k in KERNELS for f in ("dense", "chunked", "recurrent")], ids=str
)
def test_case_19_the_edge_of_a_window(kernel: Kernel, form: str):
    """mlx-lm PR 390: a window of 8 is distances 0 to 7."""
    q, k = filled(0.0, 1, 1, 20, 1), filled(0.0, 1, 1, 20, 1)
    structure = Window.last(8)
    for distance, seen in ((0, True), (7, True), (8, False)):
        v = filled(0.0, 1, 1, 20, 1)
        v[0, 0, 19 - distance] = 8.0
        out = attention(q, k, v, kernel=kernel, structure=structure, form=form)
        assert abs(float(out[0, 0, 19, 0]) - (1.0 if seen else 0.0)) < 1e-12
    state = None
    for t in range(20):  # the cache keeps as much, and no more
        out, state = attention(
            q[:, :, :1],
            k[:, :, :1],
            filled(float(t), 1, 1, 1, 1),
            kernel=kernel,
            structure=structure,
            form=form,
            state=state,
            return_state=True,
            path="pairs",
        )
    assert abs(float(out) - (12 + 19) / 2) < 1e-12


@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
def test_case_20_distances_are_exact_in_bfloat16(form: str):
    """mlx PR 3071: past 256, positions in bfloat16 are even numbers, and so were distances made of them."""
    q = filled(0.0, 1, 1, 1, 1, dtype=torch.bfloat16)
    k = filled(0.0, 1, 1, 515, 1, dtype=torch.bfloat16)
    weights = torch.exp(-0.5 * torch.arange(514, -1, -1, dtype=torch.float64))
    for position in range(510, 515):
        v = filled(0.0, 1, 1, 515, 1, dtype=torch.bfloat16)
        v[0, 0, position] = 1
        out = attention(q, k, v, structure=Causal() & Alibi(torch.tensor([0.5])), form=form)
        assert_close(out.flatten(), (weights[position] / weights.sum()).view(1), 515, f"position {position}")


def test_case_20_rotary_angles_in_bfloat16():
    """transformers PR 29285: position 257 is 256 in bfloat16; angles must not be computed there."""
    rotary = Rotary(8)
    x = normal(1, 1, 1, 8, dtype=torch.bfloat16)
    at = torch.tensor([[257]])
    exact, turned = rotary(x.double(), at), rotary(x, at)
    wrong = rotary(x.double(), torch.tensor([[256]]))
    assert_close(turned, exact, 1)
    assert float((wrong - exact).abs().max()) > 0.1, "the mistake is visible at this position"
