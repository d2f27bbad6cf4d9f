"""Pictures show what the forms compute."""

import subprocess
import sys

import pytest
import torch

from mercer import (
    Alibi,
    BigBird,
    Causal,
    Decay,
    Documents,
    Global,
    Identity,
    InvalidArgument,
    Longformer,
    Padding,
    PrefixLM,
    Strided,
    Taylor,
    Visible,
    Window,
    attention,
)
from mercer.core import picture
from mercer.core.picture import weights

BATCH, HEADS, LENGTH = 2, 3, 23
MARKS = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
MARKS[0, 4] = MARKS[1, 9] = True
SLOPES = torch.tensor([0.5, 0.25, 0.01])
HOLES = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.3

STRUCTURES = {
    "causal": Causal(),
    "padded window": Window(3, 1) & Padding(mask=HOLES),
    "documents": Causal() & Documents(torch.tensor([0, 9, 9, LENGTH])),
    "alibi": Causal() & Alibi(SLOPES),
    "decay": Causal() & Decay(torch.tensor([0.9, 0.5, 1.0])),
    "decay by token": Causal() & Decay(torch.linspace(0.3, 1, BATCH * LENGTH).view(BATCH, 1, LENGTH)),
    "strided": Strided(5) & Padding(lengths=torch.tensor([LENGTH, 11])),
    "longformer": Longformer(4, mask=MARKS),
    "bigbird by head": BigBird(3, random=1, heads=HEADS),
    "bigbird of the hub": BigBird(4, hf_compat=True),
    "function": Visible(lambda row, head, query, key: (query + key + head) % 3 != row),
    "union": (Window(2, 0) | Global((3,))) & Window(9, 9) & Alibi(SLOPES),
    "prefix by row": PrefixLM(torch.tensor([2, 8])),
}


SHORT = [(name, 7) for name in STRUCTURES if name != "documents"]  # whose queries and keys are the same tokens


@pytest.mark.parametrize(("name", "queries"), [*((name, LENGTH) for name in STRUCTURES), *SHORT])
def test_weights_are_those_of_the_forms(name, queries):
    """Taylor(0) gives every pair the weight 1, so with a value of 1 per key the rows are the structure's weights."""
    structure = STRUCTURES[name]
    query = torch.ones(BATCH, HEADS, queries, 2, dtype=torch.float64)
    key = torch.ones(BATCH, HEADS, LENGTH, 2, dtype=torch.float64)
    value = torch.eye(LENGTH, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    kernel = Taylor(0)
    expected = attention(query, key, value, kernel=kernel, normalizer=Identity(), structure=structure, form="chunked")
    found = weights(structure, queries, LENGTH, rows=(0, 1), heads=range(HEADS), batch=BATCH, query_heads=HEADS)
    assert torch.equal(found.share > 0, expected > 0)
    if found.log_weight is None:
        assert torch.equal(found.share, expected)
    else:
        torch.testing.assert_close(found.log_weight.exp(), expected)


def test_blocks_hold_the_share_and_the_mean_weight_of_their_pairs(monkeypatch):
    structure = (Window(3, 0) | Global((0,))) & Alibi(SLOPES)
    exact = weights(structure, 20, 20)
    monkeypatch.setattr(picture, "EXACT", 16)
    monkeypatch.setattr(picture, "CELLS", 8)
    found = weights(structure, 20, 20)
    assert found.block == 3
    assert found.share.shape == (1, 3, 7, 7)
    for row in range(7):
        for column in range(7):
            at = slice(3 * row, 3 * row + 3), slice(3 * column, 3 * column + 3)
            torch.testing.assert_close(found.share[..., row, column], exact.share[:, :, *at].mean((2, 3)))
            mean = exact.log_weight.exp()[:, :, *at].mean((2, 3))
            torch.testing.assert_close(found.log_weight.exp()[..., row, column], mean)


def test_heads_and_rows_come_from_the_tensors():
    assert weights(Causal() & Alibi(SLOPES), 5).share.shape[:2] == (1, 3)
    assert weights(BigBird(2, heads=4) & Causal(), 9).share.shape[:2] == (1, 4)
    assert weights(Causal() & Padding(lengths=torch.tensor([3, 5])), 5, rows=(0, 1)).share.shape[:2] == (2, 1)


def test_the_figure_is_the_right_way_up():
    figure = Causal().plot(6)
    (heat,) = figure.data
    z = torch.tensor(heat.z)
    assert z.isnan().tolist() == torch.ones(6, 6, dtype=torch.bool).triu(1).tolist()
    assert figure.layout.yaxis.autorange == "reversed"
    assert figure.layout.title.text == str(Causal())


def test_hover_tells_positions_without_padding():
    mask = torch.tensor([[False, False, True, True, True]])
    (heat,) = (Causal() & Padding(mask=mask)).plot(5).data
    assert heat.customdata[4, 2].tolist() == [2, 0]


def test_weights_are_colours_and_heads_are_panels():
    figure = (Causal() & Alibi(SLOPES)).plot(8)
    assert len(figure.data) == 3
    assert [note.text for note in figure.layout.annotations] == [f"row 0, head {h}" for h in range(3)]
    assert torch.tensor(figure.data[0].z)[7, 5].item() == pytest.approx(-1.0)
    assert "log-weight" in figure.layout.coloraxis.colorbar.title.text
    assert "log-weight" in figure.data[0].hovertemplate


def test_long_ones_say_that_cells_are_blocks():
    (heat,) = Window.last(64).plot(1024).data
    assert heat.z.shape == (256, 256)
    assert "blocks of 4" in heat.hovertemplate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": 0}, "queries must be an integer from 1 to 16,384, not 0"),
        ({"queries": 65536}, "not 65536"),
        ({"queries": 4, "keys": 2.5}, "keys must be an integer"),
        ({"queries": 4, "heads": (5,), "query_heads": 3}, r"heads must be some of 0 to 2, not \[5\]"),
        ({"queries": 4, "rows": ()}, "rows must be some of 0"),
        ({"queries": 4, "rows": 2}, r"rows says which rows to draw, such as \(0, 1\), not 2"),
        ({"queries": 4, "heads": 3}, r"heads says which heads to draw, such as \(0, 1\), not 3"),
        ({"queries": 4, "heads": tuple(range(9)), "rows": (0, 1)}, "draw 16 or fewer"),
    ],
)
def test_what_cannot_be_drawn_is_said(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        Causal().plot(**arguments)


def test_plotly_is_loaded_for_a_picture_only():
    code = "import sys, mercer; mercer.Causal(); assert 'plotly' not in sys.modules; mercer.Causal().plot(3)"
    subprocess.run([sys.executable, "-c", code], check=True)
