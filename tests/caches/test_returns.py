"""Returns: which gone sessions a prompt goes on with, each once, and what a session is worth."""

import numpy as np
import pytest

from qjax.caches.returns import GONE, Returns
from tests.caches.snapshots import ids, other
from tests.models import prompt

GRID = 64


@pytest.fixture
def returns() -> Returns:
    return Returns(GRID)


def test_a_gone_session_is_found_by_its_last_whole_page(returns):
    """By the prompt that goes on with it, and not by one that parts before that page's end."""
    returns.gone(ids(prompt(200)), "", 3, 7)
    for asked in (prompt(191), other(300, 1), np.concatenate([prompt(191), other(60, 1)])):
        assert returns.find_gone(ids(asked), "", 0) is None
    assert returns.find_gone(ids(np.concatenate([prompt(192), other(60, 1)])), "", 0) == (3, 7)


def test_it_is_gone_on_with_once(returns):
    returns.gone(ids(prompt(200)), "", 3, 7)
    assert returns.find_gone(ids(prompt(300)), "", 0) == (3, 7)
    assert returns.find_gone(ids(prompt(300)), "", 0) is None


def test_the_longest_is_found_and_none_that_is_no_longer_than_what_is_kept(returns):
    for length, turns in ((70, 1), (260, 2), (130, 4)):
        returns.gone(ids(prompt(length)), "", turns, 9)
    assert returns.find_gone(ids(prompt(300)), "", 256) is None
    assert returns.find_gone(ids(prompt(300)), "", 255) == (2, 9)
    assert returns.find_gone(ids(prompt(300)), "", 100) == (4, 9)
    assert returns.find_gone(ids(prompt(300)), "", 0) == (1, 9)


def test_another_tenants_session_is_not_found(returns):
    """F4. The pair to it is that the tenant's own is."""
    returns.gone(ids(prompt(200)), "a", 3, 7)
    assert returns.find_gone(ids(prompt(300)), "b", 0) is None
    assert returns.find_gone(ids(prompt(300)), "a", 0) == (3, 7)


def test_the_same_page_at_another_place_is_not_the_session(returns):
    """Prompts that repeat themselves: a session is known by where its page lies too."""
    returns.gone(ids(prompt(64)), "", 3, 7)
    moved = np.concatenate([other(64, 1), prompt(64)])
    assert returns.find_gone(ids(moved), "", 0) is None
    assert returns.find_gone(ids(prompt(64)), "", 0) == (3, 7)


def test_a_prompt_below_a_page_is_not_remembered(returns):
    returns.gone(ids(prompt(63)), "", 3, 7)
    assert returns._gone == {}


def test_so_many_are_remembered_and_the_oldest_goes_first(returns):
    for seed in range(GONE + 1):
        returns.gone(ids([*range(GRID - 1), 5000 + seed]), "", 1, seed)
        returns.gone(ids([*range(GRID - 1), 5001]), "", 2, seed)  # the same one again and again is the newest each time
    assert len(returns._gone) == GONE
    assert returns.find_gone(ids([*range(GRID - 1), 5000]), "", 0) is None
    assert returns.find_gone(ids([*range(GRID - 1), 5001]), "", 0) == (2, GONE)
    assert returns.find_gone(ids([*range(GRID - 1), 5000 + GONE]), "", 0) == (1, GONE)


def told(kind_turns: int, age: int, back: int, sessions: int = 100) -> Returns:
    """So many sessions of so many turns, of which `back` were gone on with at an age."""
    returns = Returns(GRID)
    for _ in range(sessions):
        returns.turn(kind_turns)
    for _ in range(back):
        returns.back(kind_turns, age)
    return returns


def test_untold_a_session_is_worth_less_the_longer_nobody_came(returns):
    worth = [returns.worth(1, age) for age in (1, 2, 4, 8, 16, 64, 1024)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > worth[-1] > 0
    assert returns.worth(1, 5) == returns.worth(2, 5) == returns.worth(9, 5)  # nothing tells them apart yet


def test_what_goes_on_again_is_worth_more():
    """Sessions of three turns go on, those of one do not; and each kind learns for itself."""
    returns = told(1, 1, 0)
    for _ in range(100):
        returns.turn(3)
        returns.back(3, 2)
    assert returns.worth(3, 1) > 10 * returns.worth(1, 1)
    assert returns.worth(2, 1) == returns.worth(3, 1)  # of two or three turns: one kind


def test_when_they_come_back_is_learned():
    """Back after 30 requests: worth more at 20 than one whose kind comes back at once, and less at 1."""
    late, soon = told(1, 30, 90), told(1, 2, 90)
    assert late.worth(1, 20) > soon.worth(1, 20)
    assert late.worth(1, 1) < soon.worth(1, 1)
    assert late.worth(1, 40) < late.worth(1, 20)


@pytest.mark.parametrize("age", [1, 3, 100, 2**22, 2**30])
def test_worth_is_a_number_at_every_age(returns, age):
    assert 0 < returns.worth(1, age) < 10
