"""Stop strings: the same text for every way of cutting it into pieces, and nothing lost without a stop."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qjax.text import StopStrings

TEXT = st.text("ab\né", max_size=40)
STOPS = st.lists(st.text("ab\né", min_size=1, max_size=5), max_size=4)


def run(pieces, stops):
    """(the whole text shown, whether it stopped)."""
    reader, shown = StopStrings(stops), ""
    for piece in pieces:
        emit, stopped = reader.feed(piece)
        shown += emit
        if stopped:
            return shown, True
    return shown + reader.flush(), False


def reference(text, stops):
    """The shortest beginning of the text that ends with a stop string, without the longest such stop."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(TEXT, STOPS, st.lists(st.integers(0, 40), max_size=10))
@example("xabcdy", ["abcd", "bc"], [3])
@example("aab", ["aab", "ab"], [1, 2])
@example("aaab", ["aab"], [1, 2, 3])
def test_pieces_do_not_matter(text, stops, cuts):
    cuts = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    assert run(pieces, stops) == run([text], stops) == run(list(text), stops) == reference(text, stops)


@given(TEXT, STOPS)
def test_nothing_is_held_back_that_cannot_become_a_stop(text, stops):
    reader = StopStrings(stops)
    shown, stopped = reader.feed(text)
    if not stopped:
        held = reader.flush()
        assert shown + held == text
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one END two", ["END"], "one "),
        ("abcd", ["abcd", "bc"], "a"),  # bc is complete first
        ("xabc", ["bc", "abc"], "x"),  # both complete together: the longer one
        ("END", ["END"], ""),
        ("a END b STOP", ["STOP", "END"], "a "),
    ],
)
def test_which_stop_wins(text, stops, shown):
    assert run(list(text), stops) == (shown, True)


def test_text_is_shown_as_soon_as_it_may_be():
    reader = StopStrings(["</stop>"])
    assert reader.feed("a < b </st") == ("a < b ", False)
    assert reader.feed("range>") == ("</strange>", False)
    assert reader.feed("</stop> more") == ("", True)
    assert reader.feed("again") == ("", True)
    assert reader.flush() == ""


@pytest.mark.parametrize("cut", range(1, 8))
def test_every_beginning_of_a_stop_is_held_back(cut):
    reader = StopStrings(["</stop>", "no"])
    assert reader.feed("a" + "</stop>"[:cut]) == ("a", cut == 7)
    assert reader.feed("</stop>"[cut:] + "b") == ("", True)


def test_one_text_is_one_stop():
    assert run(["no EN but END"], "END") == ("no EN but ", True)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [1], ""])
def test_refuses_what_is_no_stop(stops):
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(stops)
