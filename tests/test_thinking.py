"""Reasoning and content are parted alike however the answer is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.thinking import Thinking


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("It is 4.\n</think>\n\nFour.", True, "It is 4.\n", "Four."),
        ("It is 4.</think>\n\n\n Four.", True, "It is 4.", "\n Four."),
        ("<think>It is 4.</think>Four.", False, "It is 4.", "Four."),
        (" \n<think>x</think>y</think>", False, "x", "y</think>"),
        ("\n\nFour.", False, "", "\n\nFour."),
        ("Is <think>this</think> so?", False, "", "Is <think>this</think> so?"),
        ("Not done </thin", True, "Not done </thin", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
@given(cuts=st.lists(st.integers(0, 40)))
def test_reasoning_and_content_part_alike_however_the_text_is_cut(text, opened, reasoning, content, cuts):
    thinking = Thinking(opened)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parted = [thinking.feed(text[a:b]) for a, b in itertools.pairwise(edges)] + [thinking.flush()]
    assert ("".join(p.reasoning for p in parted), "".join(p.content for p in parted)) == (reasoning, content)
