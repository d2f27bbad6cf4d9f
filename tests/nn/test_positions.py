import math

import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.nn import LearnedPositions, Sinusoidal, alibi_slopes
from mercer.nn.positions import token_positions

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_alibi_slopes_are_the_published_ones(heads, exponents):
    expected = torch.tensor([2.0**-e for e in exponents], dtype=torch.float64)
    assert torch.equal(alibi_slopes(heads), expected.float())


@pytest.mark.parametrize("heads", range(1, 34))
def test_alibi_slopes_exist_for_any_number_of_heads_and_never_repeat(heads):
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    assert len(set(slopes.tolist())) == heads
    assert 0 < slopes.min() <= slopes.max() < 1


def test_sinusoids_follow_the_formula_and_the_layouts_are_a_permutation():
    dim, positions = 6, torch.tensor([[0, 1, 17, 100_000]])
    interleaved, split = Sinusoidal(dim)(positions), Sinusoidal(dim, layout="split")(positions)
    for t, p in enumerate(positions[0].tolist()):
        for i in range(dim // 2):
            angle = p / 10000 ** (2 * i / dim)
            assert interleaved[0, t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert interleaved[0, t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert torch.equal(split, torch.cat((interleaved[..., ::2], interleaved[..., 1::2]), -1))


def test_positions_count_real_tokens_and_go_on_from_an_offset():
    padding = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]], dtype=torch.bool)
    counted = token_positions(2, 5, padding=padding, device=CPU)
    assert counted.tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 2]]
    later = token_positions(2, 5, padding=padding, offset=torch.tensor([10, 3]), device=CPU)
    assert later.tolist() == [[10, 10, 10, 11, 12], [3, 3, 4, 5, 5]]
    assert token_positions(2, 3, device=CPU).tolist() == [[0, 1, 2]]


def test_positions_start_anew_in_each_packed_document():
    bounds = [0, 2, 2, 5]
    assert token_positions(2, 5, bounds=bounds, device=CPU).tolist() == [[0, 1, 0, 1, 2]]
    offset = torch.tensor([10, 20, 30, 40, 50, 60])
    later = token_positions(2, 5, bounds=bounds, offset=offset, device=CPU)
    assert later.tolist() == [[10, 11, 30, 31, 32], [40, 41, 60, 61, 62]]
    with pytest.raises(InvalidArgument, match=r"\[6\], got \[2\]"):
        token_positions(2, 5, bounds=bounds, offset=offset[:2], device=CPU)
    with pytest.raises(InvalidArgument, match="not both"):
        token_positions(2, 5, bounds=bounds, padding=torch.ones(2, 5, dtype=torch.bool), device=CPU)


def test_a_learned_table_refuses_positions_it_does_not_have():
    table = LearnedPositions(4, 3)
    assert torch.equal(table(torch.tensor([[3, 0]]))[0, 0], table.weight[3])
    with pytest.raises(InvalidArgument, match=r"position 4 .* table of 4"):
        table(torch.tensor([[4]]))


def test_sinusoids_beyond_the_trained_length_are_refused_where_it_is_known():
    assert Sinusoidal(4, max_length=8)(torch.tensor([7])).shape == (1, 4)
    with pytest.raises(InvalidArgument, match=r"9 tokens is longer than the 8 .*max_length=None"):
        Sinusoidal(4, max_length=8)(torch.tensor([8]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sinusoidal(3),
        lambda: Sinusoidal(4, max_length=0),
        lambda: Sinusoidal(4, layout="sideways"),
        lambda: LearnedPositions(0, 4),
        lambda: alibi_slopes(0),
        lambda: token_positions(2, 3, padding=torch.ones(2, 4, dtype=torch.bool), device=CPU),
        lambda: token_positions(2, 3, padding=torch.ones(2, 3), device=CPU),
    ],
)
def test_bad_arguments_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()


@pytest.mark.parametrize("positions", [Sinusoidal(8), LearnedPositions(4, 8)])
def test_the_input_in_place_of_its_positions_is_refused(positions):
    with pytest.raises(InvalidArgument, match=r"takes positions, integers .*, not torch.float32 \[1, 3, 8\]"):
        positions(torch.zeros(1, 3, 8))
