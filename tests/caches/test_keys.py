"""How far two id arrays agree, against a loop over their elements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.caches.keys import MOST, STEP, common


def by_loop(a, b) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


ids = st.lists(st.integers(0, 2), max_size=12)


@given(head=ids, a=ids, b=ids)
def test_short_arrays(head, a, b):
    a, b = head + a, head + b
    assert common(np.array(a, np.int64), np.array(b, np.int64)) == by_loop(a, b)


EDGES = [STEP, 3 * STEP, 7 * STEP, 15 * STEP, 31 * STEP, 31 * STEP + MOST]
"""Where the pieces end: each is twice the one before it, up to MOST."""


@pytest.mark.parametrize("length", [0, 1, *(edge + n for edge in EDGES for n in (-1, 0, 1))])
def test_equal_and_prefix(length):
    a = np.arange(length)
    for b in (a, a.copy(), np.arange(length + 1), np.arange(length + 2 * MOST)):
        assert common(a, b) == common(b, a) == length


@pytest.mark.parametrize("at", [0, 1, *(edge + n for edge in EDGES for n in (-1, 0, 99))])
def test_one_difference(at):
    """It is found wherever it lies in the pieces that are compared, and one behind it changes nothing."""
    a = np.arange(EDGES[-1] + 100)
    b = a.copy()
    b[at] = -1
    assert common(a, b) == common(b, a) == at
    b[at + 1 :: 7] = -1
    assert common(a, b) == at


def test_ids_are_compared_whole():
    """F5's kind: ids that agree in their low 32 bits are different ids."""
    a = np.array([5, 7], np.int64)
    assert common(a, a + np.array([0, 1 << 32])) == 1


def test_nothing_is_changed():
    a, b = np.arange(5), np.arange(5)
    a.flags.writeable = b.flags.writeable = False
    assert common(a, b) == 5
