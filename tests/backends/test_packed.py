"""Packed weights against products in float64 with the numbers that they hold, and against what they came from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.backends.packed import FEW, KINDS, _has_tiles, pack
from mercer.errors import InvalidArgument

pytest.importorskip("numba")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 140),
    count=st.integers(0, 9),
    kind=st.sampled_from(KINDS),
    paired=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_products_with_few_inputs(rows: int, columns: int, count: int, kind: str, paired: bool) -> None:
    rows = rows * 2 if paired else rows
    packed, x = pack(drawn(rows, columns), kind, paired=paired), drawn(count, columns, seed=1)
    want = x.double() @ packed.plain().double().t()
    assert packed.plain().shape == (rows, columns)
    torch.testing.assert_close(packed.times(x).double(), want, rtol=1e-5, atol=1e-5)


@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    count=st.integers(8, 70),
    kind=st.sampled_from(KINDS),
    paired=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_products_with_many_inputs(
    rows: int, columns: int, count: int, kind: str, paired: bool, dtype: torch.dtype
) -> None:
    """With and without tile registers, which multiply both sides in bfloat16; nothing else is rounded."""
    rows = rows * 2 if paired else rows
    packed, x = pack(drawn(rows, columns), kind, paired=paired), drawn(count, columns, seed=1).to(dtype)
    exact = x.double() @ packed.plain().double().t()
    rounded = x.bfloat16().double() @ packed.plain().bfloat16().double().t()
    for tiles in (False, True) if _has_tiles() else (False,):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mercer.backends.packed._has_tiles", lambda tiles=tiles: tiles)
            found = packed.times(x)
        tiled = tiles and count > FEW and kind != "float32" and packed.width % 32 == 0 and rows > 16 * (1 + paired)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), rounded if tiled else exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_digits_do_not_depend_on_threads_nor_on_what_lies_around(
    kind: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the number of inputs beside one; a whole cache of them, with inputs that lie apart in memory."""
    if tiles and not _has_tiles():
        pytest.skip("the processor has no tile registers")
    monkeypatch.setattr("mercer.backends.packed._has_tiles", lambda: tiles)
    packed, x = pack(drawn(2 * 16 * 7, 2048), kind, paired=True), drawn(2048, 2 * 290, seed=1).t()[::2]
    many, before = packed.times(x), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(packed.times(x), many)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(packed.times(x[77:130].contiguous()), many[77:130])
    exact = x.double() @ packed.plain().double().t()
    torch.testing.assert_close(many.double(), exact, rtol=0, atol=1.5 if tiles and kind != "float32" else 1e-3)


@pytest.mark.parametrize("count", [4, 40])
def test_numbers_that_are_not_finite_reach_their_own_products_alone(count: int) -> None:
    for kind in ("float32", "bfloat16"):
        weight, x = drawn(70, 64), drawn(count, 64, seed=1)
        weight[21, 3], x[2, 5] = torch.inf, torch.nan
        found = pack(weight, kind).times(x).isfinite()
        wanted = torch.ones(count, 70, dtype=torch.bool)
        wanted[:, 21] = wanted[2] = False
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("kind", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_first_two_kinds_lose_nothing(kind: str, dtype: torch.dtype) -> None:
    weight = drawn(37, 75).to(dtype)
    assert torch.equal(pack(weight, kind).plain(), weight.float())
    assert torch.equal(pack(weight[:36], kind, paired=True).plain(), weight[:36].float())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_number(kind: str) -> None:
    packed, index = pack(drawn(50, 70), kind), torch.tensor([[0, 49, 16], [16, 3, 15]])
    assert torch.equal(packed.rows_of(index), packed.plain()[index])


def literal(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """What the weights become, from the definition: row by row, 32 columns at a time."""
    out = torch.empty_like(weight)
    for row, target in zip(weight, out, strict=True):
        for start in range(0, len(row), 32):
            part = row[start : start + 32]
            padded = torch.cat((part, torch.zeros(32 - len(part))))  # a group that ends early counts zeros
            if kind == "int8":
                d = (padded.abs().max() / 127).half().float()
                target[start : start + 32] = (part / d).round().clamp(-127, 127) * d
            else:
                d = ((padded.max() - padded.min()) / 15).half().float()
                m = padded.min().half().float()
                target[start : start + 32] = ((part - m) / d).round().clamp(0, 15) * d + m
    return out


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_eight_and_four_bits_are_what_they_say(kind: str) -> None:
    weight = drawn(20, 83)
    torch.testing.assert_close(pack(weight, kind).plain(), literal(weight, kind), rtol=1e-6, atol=1e-6)


def test_the_error_of_eight_and_four_bits() -> None:
    """Of normally distributed weights, relative in the mean square: 0.5 and 8 percent. A step is 1/127 of the largest
    of 32 numbers, or 1/15 of their range, and an error is spread evenly over a step: its deviation is 1/sqrt(12)."""
    weight = drawn(256, 1024)
    groups = weight.view(256, 32, 32)
    low, high = groups.aminmax(dim=-1)
    for kind, step, worst in (("int8", groups.abs().amax(-1) / 127, 0.006), ("int4", (high - low) / 15, 0.085)):
        error = (pack(weight, kind).plain() - weight).view(256, 32, 32)
        assert (error.abs().amax(-1) <= step * 0.51 + 2e-3 * low.abs() * (kind == "int4")).all()
        relative = float(error.square().mean().sqrt())
        assert worst / 1.3 < relative < worst
        expected = float((step.square().mean() / 12).sqrt())
        assert relative == pytest.approx(expected, rel=0.03)


def test_four_bits_keep_weights_that_had_four_bits() -> None:
    q = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0))
    q[:, ::32], q[:, 1::32] = 0, 15
    d, m = drawn(8, 2, 1).abs().half().float(), drawn(8, 2, 1, seed=1).half().float()
    weight = (q.view(8, 2, 32) * d + m).view(8, 64)
    torch.testing.assert_close(pack(weight, "int4").plain(), weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_single_large_numbers(kind: str) -> None:
    weight = torch.zeros(16, 64)
    weight[3, 5] = 1000.0
    assert torch.equal(pack(weight, kind).plain()[:3], weight[:3])
    assert pack(weight, kind).plain()[3, 5] == pytest.approx(1000.0, rel=1e-3)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="float32, bfloat16, int8, int4"):
        pack(torch.zeros(2, 2), "int2")
    with pytest.raises(InvalidArgument, match="only matrices"):
        pack(torch.zeros(2), "int8")
    with pytest.raises(InvalidArgument, match="even number of rows"):
        pack(torch.zeros(3, 2), "int8", paired=True)
    with pytest.raises(InvalidArgument, match="not finite"):
        pack(torch.full((2, 2), torch.nan), "int8")
