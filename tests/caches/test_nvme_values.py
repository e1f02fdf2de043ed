"""Values: a head is worth what others like it were before it, given up or not; and what others hold stays when one goes."""

import numpy as np
import pytest

from qjax.caches.nvme.filed import DISK
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.values import FIRST, GONE, Values
from qjax.caches.returns import Returns
from tests.caches.filed import GRID, Files, anchor, chain, pages
from tests.models import prompt

COUNTS = {}


@pytest.fixture
def index(monkeypatch) -> Index:
    """Of no entries, at second 0 of a clock that a test sets; lines are counted in COUNTS."""
    COUNTS.clear()
    index = Index(Files(), GRID, lambda line: COUNTS.get(line, 0))
    index.clock = 0.0
    monkeypatch.setattr(Index, "now", lambda self: self.clock)
    return index


def write(index: Index, seed: int):
    """The head of a prompt of one page, written now."""
    of = chain(prompt(GRID, seed=seed))
    entry = anchor(of, GRID, used=index.clock)
    index._storage.add(*pages(of, GRID), entry)
    index.expect(filed := Index(Files(*pages(of, GRID), entry), GRID).anchors[entry.key])
    index.arrived(filed.key, entry)
    return of, index.anchors[filed.key]


def after(index: Index, seconds: float) -> float:
    index.clock += seconds
    return index.clock


def test_untold_it_is_the_returns_of_any_session(index):
    _, filed = write(index, 0)
    expected = [Returns(GRID, FIRST).worth(1, age) for age in (0, 5, 3600)]
    assert [index.returns(filed, age) for age in (0.0, 5.5, 3600.0)] == pytest.approx(expected, rel=0.2)
    assert index.returns(filed, -60.0) == index.returns(filed, 0.0)  # the clock was set back


def test_heads_that_serve_are_worth_more(index):
    """What 20 heads served after 100 s, each for the first time, makes a new one worth more after 90 s, and less once that has passed."""
    _, untold = write(index, 99)
    before = index.returns(untold, 90.0)
    for seed in range(20):
        _, filed = write(index, seed)
        after(index, 100.0)
        index.served(filed)
        assert (filed.hits, filed.used) == (1, index.clock)
    now = index.clock
    _, new = write(index, 50)
    assert index.returns(new, now + 90) > 2 * before
    assert index.returns(new, now + 1000) < index.returns(new, now + 90) / 10


def test_one_that_served_is_another_kind(index):
    """Heads serve once and never again: one that has served is worth less than a new one."""
    for seed in range(20):
        _, filed = write(index, seed)
        after(index, 10.0)
        index.served(filed)
        after(index, 10.0)
    _, new = write(index, 50)
    assert index.returns(new, index.clock + 8) > 3 * index.returns(filed, filed.used + 8)
    assert index.returns(filed, filed.used + 8) < Returns(GRID, FIRST).worth(2, 8)


@pytest.mark.parametrize("missed", [False, True])
def test_what_was_given_up_is_learned_from(index, missed):
    """Heads that go after 10 s, and whose prompts come after 40: as if they had served."""
    for seed in range(20):
        of, _ = write(index, seed)
        after(index, 10.0)
        assert index.evict(DISK, 0)
        after(index, 30.0)
        for _ in range(2):  # it counts once
            if missed:
                index.missed(chain(np.concatenate([of.keys, prompt(100, seed=77)])), 0)
        index.missed(of, GRID)  # served up to there: nothing was missed
    _, new = write(index, 50)
    worth = index.returns(new, index.clock + 33), Returns(GRID, FIRST).worth(1, 33)
    assert worth[0] > 2 * worth[1] if missed else worth[0] < worth[1]


def test_a_line_that_was_forwarded_cold_before_counts(index):
    """A head that prompts ask for again is known as such, though it was given up between: its kind is that of one that served."""
    for seed in range(20):
        _, filed = write(index, seed)
        COUNTS[filed.line] = 2
        after(index, 10.0)
        index.served(filed)
    (_, new), (_, again) = write(index, 50), write(index, 51)
    COUNTS[again.line] = 2
    assert index.returns(again, index.clock + 8) > 3 * index.returns(new, index.clock + 8)


def test_so_many_that_are_gone_are_known(index):
    values = Values(GRID, lambda line: 0)
    _, filed = write(index, 0)
    for number in range(GONE + 10):
        filed.line = f"{number:032x}"
        values.given_up(filed, filed.line)
    assert len(values._gone) == GONE
    values.missed([f"{n:032x}" for n in (9, 10)], 5.0)
    assert len(values._gone) == GONE - 1
    values.missed([f"{n:032x}" for n in (9, 10)], 5.0)
    assert len(values._gone) == GONE - 1


def test_an_anchor_goes_whose_page_another_waits_for(index):
    """The page stays for the one that is about to stand on it; else nothing that shares a head with what is being written could ever go."""
    of, filed = write(index, 0)
    (page,) = pages(of, GRID)
    index.hold([page.key])
    assert index.evict(DISK, page.nbytes)
    assert (index.anchors, index.has(page.key), index.bytes(DISK)) == ({}, True, page.nbytes)
    assert index._storage.dropped == [filed.key]
    index.let_go([page.key])
    assert (index.has(page.key), index.bytes(DISK), index._storage.there) == (False, 0, {})
