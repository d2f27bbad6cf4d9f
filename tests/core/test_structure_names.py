"""Names of structures: a closed registry, both ways."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.core.bigbird import BigBird, RandomBlocks
from mercer.core.patterns import Blocks, Columns, Fixed, Global, Longformer, Prefix, Strided, Visible
from mercer.core.picture import weights
from mercer.core.structure_names import MOST, WORDS, parse_structure, split_structures, structure_name
from mercer.core.structures import Causal, Full, Padding, Structure, Window
from mercer.errors import InvalidArgument

LENGTH = 40


def shown(structure: Structure, heads: int = 1) -> torch.Tensor:
    """Who sees whom, [heads, query, key]."""
    return weights(structure, LENGTH, query_heads=heads, heads=range(heads)).share[0].bool()


@pytest.mark.parametrize(
    ("name", "sees"),
    [
        ("causal", lambda i, j: j <= i),
        ("window(5)", lambda i, j: 0 <= i - j < 5),
        ("window(5, dilation=3)", lambda i, j: 0 <= i - j < 15 and (i - j) % 3 == 0),
        ("window(none, dilation=4)", lambda i, j: j <= i and (i - j) % 4 == 0),
        ("blocks(8, before=1)", lambda i, j: 0 <= i // 8 - j // 8 <= 1),
        ("strided(6)", lambda i, j: j <= i and (i - j < 6 or (i - j) % 6 == 0)),
        ("fixed(6, 2)", lambda i, j: j <= i and (i // 6 == j // 6 or j % 6 >= 4)),
        ("columns(6, columns=2)", lambda i, j: j % 6 >= 4),
        ("global", lambda i, j: 0 in (i, j)),
        ("global(first=3, see=false)", lambda i, j: j < 3),
        ("global(at=[3, 7], seen=false)", lambda i, j: i in (3, 7)),
        ("longformer(6)", lambda i, j: abs(i - j) <= 3),
        ("longformer(6, first=2) & causal", lambda i, j: j <= i and (i - j <= 3 or j < 2 or i < 2)),
        ("window(3) | global(first=2) & causal", lambda i, j: 0 <= i - j < 3 or (j <= i and (i < 2 or j < 2))),
        ("( window(3)|global( first = 2 ) )&causal", lambda i, j: j <= i and (i - j < 3 or i < 2 or j < 2)),
        ("strided(5) & window(12) | columns(8, 1) & causal",
         lambda i, j: j <= i and (((i - j < 5 or (i - j) % 5 == 0) and i - j < 12) or j % 8 == 7)),
        ("bigbird(4, random=0, causal=true)", lambda i, j: j <= i and (i // 4 - j // 4 <= 1 or j < 4)),
    ],
)  # fmt: skip
def test_what_names_mean(name: str, sees: Any):
    expected = torch.tensor([[sees(i, j) for j in range(LENGTH)] for i in range(LENGTH)])
    assert (shown(parse_structure(name))[0] == expected).all()
    again = structure_name(parse_structure(name))
    assert (shown(parse_structure(again))[0] == expected).all()
    assert structure_name(parse_structure(again)) == again


def test_the_draws_of_names_are_those_of_the_classes():
    for name, structure in (
        ("bigbird(4, random=2, seed=5, heads=3)", BigBird(4, 2, 5, 3)),
        ("bigbird(4, 1, 7, causal=true)", BigBird(4, 1, 7, causal=True)),
        ("randomblocks(4, 2, 9, heads=3, apart=true)", RandomBlocks(4, 2, 9, 3, apart=True)),
        ("randomblocks(4, causal=true)", RandomBlocks(4, causal=True)),
    ):
        assert parse_structure(name) == structure
        assert (shown(parse_structure(name), 3) == shown(structure, 3)).all()
    assert not (shown(parse_structure("bigbird(4)")) == shown(parse_structure("bigbird(4, seed=1)"))).all()


@pytest.mark.parametrize(
    ("structure", "name"),
    [
        (Causal() & Window.last(64), "causal & window(64)"),
        (Window(63), "window(64)"),
        (Window(None, 0, 4), "window(none, dilation=4)"),
        (Window.last(9, 2) | Global((0, 1, 2, 3)), "window(9, dilation=2) | global(first=4)"),
        ((Window.last(9) | Global()) & Causal(), "(window(9) | global) & causal"),
        (Window.last(9) | (Global((4, 2)) & Causal()), "window(9) | (global(at=[4, 2]) & causal)"),
        (Fixed(8, 1), "fixed(8)"),
        (Columns(8, 1), "columns(8, 1)"),
        (Longformer(8, (0,)), "longformer(8, first=1)"),
        (BigBird(8, causal=True), "bigbird(8, causal=true)"),
    ],
    ids=str,
)
def test_one_way_of_writing(structure: Structure, name: str):
    assert structure_name(structure) == name
    assert repr(parse_structure(name)) == repr(structure)


structures = st.recursive(
    st.one_of(
        st.just(Causal()),
        st.builds(Window, st.none() | st.integers(0, 9), st.just(0), st.integers(2, 4)),
        st.builds(Window.last, st.integers(1, 30), st.integers(1, 3)),
        st.builds(Blocks, st.integers(1, 9), st.integers(0, 2)),
        st.builds(Strided, st.integers(1, 8)),
        st.builds(Fixed, st.integers(3, 8), st.integers(1, 3)),
        st.builds(Columns, st.integers(3, 8), st.integers(1, 3)),
        st.builds(Global, st.lists(st.integers(0, 40), max_size=4), see=st.booleans()),
        st.builds(Longformer, st.integers(1, 9).map(lambda n: 2 * n), st.lists(st.integers(0, 40), max_size=3)),
        st.builds(RandomBlocks, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), causal=st.booleans()),
        st.builds(BigBird, st.integers(1, 6), st.integers(0, 3), st.integers(0, 3), causal=st.booleans()),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: two[0] | two[1]),
        st.tuples(inner, inner).map(lambda two: two[0] & two[1]),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(structures)
def test_every_structure_of_words_comes_back(structure: Structure):
    name = structure_name(structure)
    assert repr(parse_structure(name)) == repr(structure)
    assert structure_name(parse_structure(name)) == name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "a word is missing at the end; write causal, window\\(width, dilation=1\\), "),
        ("full", "'full' is unknown; write causal, .* for example window\\(64\\) \\| global\\(first=4\\)"),
        ("Window(3)", "'Window' is unknown"),
        ("os.system(3)", "'os' is unknown"),
        ("window", "window needs its width; write window\\(width, dilation=1\\)\\."),
        ("window()", "window needs its width"),
        ("window(0)", "width must be 1 or more, not 0"),
        ("window(6.5)", "'\\.' stands in place of , or \\)"),
        ("window(-1)", "width of window is a whole number or none"),
        ("window(\u0663)", "width of window is a whole number or none"),
        ("window(9999999999)", "width of window is a whole number or none"),
        ("window(3", "a '\\)' is missing at the end"),
        ("window(3,)", "dilation of window is a whole number"),
        ("window(3, 1, 2)", "window is given too much"),
        ("window(3, width=3)", "window is given too much"),
        ("window(size=3)", "window has no 'size'"),
        ("window(dilation=2, 3)", "'3' follows a named number without a name"),
        ("window(3) window(4)", "'window' is one too many"),
        ("window(3))", "'\\)' is one too many"),
        ("(window(3)", "'\\)' is missing at the end"),
        ("window(3) &", "a word is missing at the end"),
        ("| window(3)", "'|' is unknown"),
        ("blocks(4, before=none)", "before of blocks is a whole number"),
        ("blocks(4, after=1)", "blocks has no 'after'; write blocks\\(size, before=0\\)"),
        ("causal(1)", "causal is given too much; write causal\\."),
        ("fixed(3, 4)", "columns must be 3 \\(the block's size\\) or less, not 4"),
        ("longformer(7)", "must be even, not 7"),
        ("global(see=1)", "see of global is true or false"),
        ("global(first=2, at=[3])", "global has first= or at=, not both"),
        ("global(first=1, at=[3])", "global has first= or at=, not both"),
        ("global(first=99999)", "first must be at most 65,536"),
        ("global(at=3)", "at of global is whole numbers in brackets"),
        ("global(at=[1 2])", "',' is missing at '2'"),
        ("global(at=[none])", "in brackets stand whole numbers"),
        ("global(at=[1", "',' is missing at the end"),
        ("global(see=false, seen=false)", "no pair is visible"),
        ("bigbird(4, hf_compat=true)", "bigbird has no 'hf_compat'"),
        ("bigbird(4, heads=0)", "heads must be an integer of 1 or more"),
        ("(" * 5000, f"more than {MOST} parentheses"),
        ("|".join(["causal"] * (MOST + 1)), f"more than {MOST} words"),
    ],
)
def test_what_is_wrong_is_said_with_what_is_allowed(name: str, sentence: str):
    with pytest.raises(InvalidArgument, match=sentence) as caught:
        parse_structure(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_word_is_answered_with_all_words():
    with pytest.raises(InvalidArgument) as caught:
        parse_structure("sparse")
    assert all(word in str(caught.value) for word in WORDS)


@pytest.mark.parametrize("name", [None, 3, ["causal"], b"causal"])
def test_a_name_is_text(name: Any):
    with pytest.raises(InvalidArgument, match="name is text, such as"):
        parse_structure(name)


@pytest.mark.parametrize(
    "structure",
    [
        Full(),
        Window(3, 1),
        Blocks(4, after=1),
        Prefix(3),
        Global(mask=torch.ones(1, 3, dtype=torch.bool)),
        Longformer(4, mask=torch.ones(1, 3, dtype=torch.bool)),
        BigBird(4, hf_compat=True),
        Visible(lambda row, head, query, key: key <= query),
        Causal() & Padding(lengths=torch.tensor([3])),
        type("Own", (Causal,), {})(),
    ],
    ids=str,
)
def test_what_no_word_says_has_no_name(structure: Structure):
    with pytest.raises(InvalidArgument, match="has no registered name: write causal, "):
        structure_name(structure)


def test_commas_between_names_and_inside_them():
    assert split_structures(" window(4, dilation=2), causal ,global(at=[0, 3])") == [
        "window(4, dilation=2)", "causal", "global(at=[0, 3])",
    ]  # fmt: skip
    assert split_structures("causal") == ["causal"]
    assert split_structures("causal,") == ["causal", ""]
