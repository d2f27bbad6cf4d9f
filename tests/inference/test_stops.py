"""Stop strings, wherever the text is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mercer.errors import InvalidArgument
from mercer.inference.stops import Stops


def literal(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first prefix of the text that ends in a stop string, without it."""
    for n in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:n].endswith(stop)]:
            return text[: n - max(map(len, found))], True
    return text, False


@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 14), max_size=6),
)
def test_what_comes_out_does_not_depend_on_the_pieces(text, strings, cuts):
    stops, out, stopped = Stops(strings), "", False
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, stop in pairwise(borders):
        piece, stopped = stops.push(text[start:stop])
        out += piece
        expected, _ = literal(text, strings)
        assert expected.startswith(out)
        if stopped:
            break
    assert (out if stopped else out + stops.close(), stopped) == literal(text, strings)


def test_only_what_may_begin_a_stop_string_is_held_back():
    stops = Stops(["\n\nUser:", "</s>"])
    assert stops.push("Hello\n") == ("Hello", False)
    assert stops.push("there") == ("\nthere", False)
    assert stops.push("\n\nUser") == ("", False)
    assert stops.push(": and more") == ("", True)


@pytest.mark.parametrize("bad", [[""], ["a", ""], "a", [3]])
def test_stop_strings_are_texts(bad):
    with pytest.raises(InvalidArgument, match="it is a list of texts, each of at least one character"):
        Stops(bad)
