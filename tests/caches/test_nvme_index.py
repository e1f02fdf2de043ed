"""The index: what is found, what it counts, and what goes first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.caches.nvme.filed import DISK, SPILL
from qjax.caches.nvme.index import DAY, Index
from qjax.config import GRID as LEVEL_GRID
from qjax.config import TOKEN
from tests.caches.filed import GRID, Files, anchor, chain, entry, pages, session
from tests.models import prompt

NOW = 1_000 * DAY


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(Index, "now", lambda self: NOW)


def lengths(index: Index, use: str | None = None) -> list[int]:
    return sorted(a.length for a in index.anchors.values() if use in (None, a.use))


def found(index: Index, tokens, level=TOKEN, tenant=""):
    """(start, whole) of the best anchor, None where there is none."""
    hit = index.find(chain(tokens, tenant), level)
    return hit and (hit[1].start, hit[1].whole)


def test_what_is_there_at_the_start():
    """An anchor without a page below it, a page without an anchor and a session without an anchor are of no use, and go; others stay."""
    of, other = chain(prompt(300)), chain(prompt(300, seed=1))
    lost = pages(other, 128)[:1]
    files = Files(*pages(of, 256), anchor(of, 128), anchor(of, 256), *lost, anchor(other, 128), session("x", other, [128]), session("y", of, [128]))
    files.add(entry("b-1", 5), entry("golden", 0))
    index = Index(files, GRID)
    assert lengths(index) == [128, 256]
    assert list(index.sessions) == ["s-y"]
    assert sorted(files.dropped) == sorted([lost[0].key, anchor(other, 128).key, "s-x"])
    assert {"b-1", "golden"} <= set(files.there)
    assert (index.bytes(DISK), index.bytes(SPILL)) == (4 * 100 + 2 * 10, 0)


@pytest.mark.parametrize("level", [TOKEN, LEVEL_GRID])
def test_the_longest_anchor_is_found(level):
    of = chain(prompt(300))
    index = Index(Files(*pages(of, 256), anchor(of, 64), anchor(of, 192), anchor(of, 256, logits=True)), GRID)
    assert [found(index, prompt(n), level) for n in (63, 64, 65, 191, 192, 193, 255, 256, 257, 300)] == [
        None,
        None,
        (64, False),
        (64, False),
        (64, False),
        (192, False),
        (192, False),
        (256, True),
        (256, False),
        (256, False),
    ]
    edited = prompt(300)
    edited[200] ^= 1
    assert found(index, edited, level) == (192, False)
    assert found(index, prompt(300), level, tenant="b") is None


def test_an_end_off_a_line_serves_its_block_at_level_token_and_a_session_resume_at_level_grid():
    of = chain(prompt(300))
    exact, tainted = anchor(of, 200), anchor(of, 200, tainted=True)
    for end, level, starts in (
        (exact, TOKEN, [None, 192, 195, 200, 200]),
        (exact, LEVEL_GRID, [None] * 5),
        (tainted, LEVEL_GRID, [None, None, None, None, 200]),
    ):
        index = Index(Files(*pages(of, 200), end), GRID)
        hits = [found(index, prompt(n), level) for n in (192, 193, 196, 201, 300)]
        assert [hit and hit[0] for hit in hits[:3] + hits[4:]] == starts[:3] + starts[4:]


def test_a_page_below_both_is_the_disks_until_its_last_one_goes():
    of = chain(prompt(300))
    index = Index(Files(*pages(of, 200), anchor(of, 128), anchor(of, 200, use=SPILL), session("x", of, [200])), GRID)
    assert (index.bytes(DISK), index.bytes(SPILL)) == (210, 210)
    index.drop(next(a for a in index.anchors.values() if a.use == DISK), "test")
    assert (index.bytes(DISK), index.bytes(SPILL)) == (0, 410)
    index.drop_all()
    assert (index.bytes(DISK), index.bytes(SPILL), index.stats()["pages"]) == (0, 0, 0)
    assert index._storage.there == {}


WORTH = st.tuples(st.integers(0, 4), st.floats(0, 20), st.integers(1, 500))


@settings(max_examples=40)
@given(st.lists(WORTH, min_size=2, max_size=6), st.lists(WORTH, min_size=0, max_size=3), st.integers(0, 3))
def test_the_least_valuable_goes_first(first, second, shared):
    """Computed anew before each eviction: prompts that will start there, times the tokens that it saves them, for each byte that it holds."""
    a = chain(prompt(64 * len(first)))
    b = chain(np.concatenate([prompt(64 * shared), prompt(64 * (len(second) + 1), seed=1)]))
    there, hits_of = [], {}
    for of, some in ((a, first), (b, second)):
        for number, (hits, days, size) in enumerate(some, 1):
            one = anchor(of, 64 * number, size, used=NOW - days * DAY)
            if one.key not in hits_of:  # of the head that both have
                there += [*pages(of, 64 * number), one]
                hits_of[one.key] = hits
    index = Index(Files(*there), GRID)
    for key, hits in hits_of.items():
        index.anchors[key].hits = hits

    def value(key: str) -> float:
        one = index.anchors[key]
        shorter = [o.length for o in index.anchors.values() if o is not one and o.length < one.length and set(o.pages) <= set(one.pages)]
        own = [page for page in one.pages if sum(page in o.pages for o in index.anchors.values()) == 1]
        return index.returns(one, NOW) * (one.length - max(shorter, default=0)) / (one.nbytes + 100 * len(own))

    while index.anchors:
        values = {key: value(key) for key in index.anchors}
        for key, expected in values.items():
            assert index.value(index.anchors[key], NOW) == pytest.approx(expected)
        left, limit = set(values), index.bytes(DISK) - 1
        assert index.evict(DISK, limit)
        (gone,) = left - set(index.anchors)
        assert values[gone] == pytest.approx(min(values.values()))
        assert index.bytes(DISK) <= limit
        assert index.bytes(DISK) == sum(e.nbytes for e in index._storage.there.values())


@pytest.mark.parametrize(("older", "newer"), [(100, 10), (3600, 60), (6 * DAY, DAY)])
def test_of_two_heads_the_one_that_was_used_longer_ago_goes(older, newer):
    one, other = chain(prompt(64)), chain(prompt(64, seed=1))
    there = [e for of, age in ((one, older), (other, newer)) for e in (*pages(of, 64), anchor(of, 64, used=NOW - age))]
    index = Index(Files(*there), GRID)
    assert index.evict(DISK, 110)
    assert list(index.anchors) == [anchor(other, 64).key]


def test_of_the_spill_whole_sessions_go_and_of_equal_ones_that_used_longest_ago():
    chains = [chain(prompt(200, seed=seed)) for seed in range(3)]
    files = Files()
    for number, (of, age) in enumerate(zip(chains, (3000, 2000, 1), strict=True)):
        used = NOW - age
        files.add(*pages(of, 200), anchor(of, 192, use=SPILL), anchor(of, 200, use=SPILL), session(str(number), of, [192, 200], used=used))
    index = Index(files, GRID)
    index.served(index.anchors[anchor(chains[0], 200).key])  # the oldest is used now
    assert index.evict(SPILL, index.bytes(SPILL) - 1)
    assert sorted(index.sessions) == ["s-0", "s-2"]
    assert lengths(index) == [192, 192, 200, 200]
    assert index.bytes(SPILL) == 2 * (4 * 100 + 20) == sum(e.nbytes for e in files.there.values())


@settings(max_examples=40)
@given(st.lists(WORTH, min_size=1, max_size=4), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), WORTH), min_size=1, max_size=4))
def test_heads_and_conversations_go_by_one_value(heads, talks):
    """Tokens that are lost past what stays, for each byte that is won, times the prompts that will start there. A session's states go with
    it, not those that are another's too; one that has none of its own goes first.
    """
    of = chain(prompt(64 * 8))
    files = Files(*pages(of, 64 * 8))
    for number, (_, days, size) in enumerate(heads, 1):
        files.add(anchor(of, 64 * number, size, used=NOW - days * DAY))
    for name, (first, more, (_, days, size)) in enumerate(talks):
        has = [64 * first, 64 * (first + more)]
        files.add(*(anchor(of, n, size, use=SPILL) for n in has if n > 64 * len(heads)), session(str(name), of, has, used=NOW - days * DAY))
    index = Index(files, GRID)

    def goes(key: str) -> set[str]:
        if key in index.anchors:
            return {key}
        others = {a for s in index.sessions.values() if s.key != key for a in s.anchors}
        return {a for a in index.sessions[key].anchors if a in index.anchors and index.anchors[a].use == SPILL and a not in others}

    def value(key: str) -> float:
        gone = goes(key)
        if not gone:
            return 0.0
        stay = [a for name, a in index.anchors.items() if name not in gone]
        last = max((index.anchors[a] for a in gone), key=lambda a: a.length)
        pages = {p for a in gone for p in index.anchors[a].pages} - {p for a in stay for p in a.pages}
        lost = last.length - max((a.length for a in stay if a.length <= last.length), default=0)
        one = index.anchors.get(key) or index.sessions[key]
        return index.returns(one, NOW) * lost / (sum(index.anchors[a].nbytes for a in gone) + 100 * len(pages))

    while index.anchors:
        of_sessions = {a for s in index.sessions.values() for a in s.anchors}
        values = {key: value(key) for key in (*index.sessions, *(index.anchors.keys() - of_sessions))}
        for key, expected in values.items():
            assert index.value(index.anchors.get(key) or index.sessions[key], NOW) == pytest.approx(expected)
        assert index.evict(None, index.bytes(), iter([False, True]).__next__)  # one of them
        (gone,) = values.keys() - {*index.sessions, *index.anchors}
        assert values[gone] == pytest.approx(min(values.values()))
        assert index.bytes() == sum(e.nbytes for e in files.there.values())
    assert not index.sessions


def test_what_is_held_stays_and_nothing_goes_in_vain():
    of, other = chain(prompt(200)), chain(prompt(200, seed=1))
    index = Index(Files(*pages(of, 192), anchor(of, 192), *pages(other, 192), anchor(other, 192)), GRID)
    held = index.anchors[anchor(of, 192).key]
    with index.holding(held):
        assert not index.evict(DISK, 309)  # what is held is more
        assert len(index.anchors) == 2
        assert index.evict(DISK, 310)
        assert list(index.anchors.values()) == [held]
        assert not index.evict(DISK, 620, enough=lambda: False)
        assert list(index.anchors.values()) == [held]
    assert index.evict(DISK, 0)
    assert index._storage.there == {}


def test_a_page_on_its_way_is_kept_for_whoever_holds_it():
    """Held before its anchor is there: it is counted, not evicted, and goes when nobody wants it."""
    of = chain(prompt(64))
    (page,) = pages(of, 64)
    index = Index(Files(), GRID)
    index.hold([page.key])
    index._storage.add(page)
    index.add_page(page, DISK)
    assert (index.bytes(DISK), index.has(page.key)) == (100, True)
    assert not index.evict(DISK, 0)
    index.let_go([page.key])
    assert (index.bytes(DISK), index.has(page.key), index._storage.dropped) == (0, False, [page.key])
    index._storage.add(page)
    index.add_page(page, DISK)  # nobody waits for it any more
    assert (index.bytes(DISK), index._storage.there) == (0, {})


def test_an_anchor_on_its_way_is_found():
    of = chain(prompt(200))
    coming = Index(Files(*pages(of, 192), anchor(of, 192)), GRID).anchors[anchor(of, 192).key]
    files = Files()
    index = Index(files, GRID)
    index.expect(coming)
    assert found(index, prompt(200)) == (192, False)
    assert index.bytes(DISK) == 0
    index.served(coming)
    files.add(*pages(of, 192), anchor(of, 192))
    index.arrived(coming.key, anchor(of, 192))
    assert [(a.length, a.hits) for a in index.anchors.values()] == [(192, 1)]
    index.expect(coming)
    index.arrived(coming.key, None)
    assert not index._coming
    index.drop_all()
    index.expect(coming)
    index.drop_over(coming.pages[1], "test")
    assert found(index, prompt(200)) is None


def test_what_was_not_used_for_so_many_days_goes():
    old, new = chain(prompt(200)), chain(prompt(200, seed=1))
    files = Files(*pages(old, 200), anchor(old, 64, used=NOW - 8 * DAY), anchor(old, 200, use=SPILL, used=NOW - 8 * DAY))
    files.add(session("old", old, [200], used=NOW - 6 * DAY), *pages(new, 192), anchor(new, 192, used=NOW - 6 * DAY))
    index = Index(files, GRID)
    index.drop_unused(7)
    assert (lengths(index), list(index.sessions)) == ([192, 200], ["s-old"])  # the state of a session that is used stays
    index.drop_unused(5)
    assert (lengths(index), list(index.sessions), files.there) == ([], [], {})


def test_a_damaged_page_takes_the_longer_ones_of_its_chain_along():
    of = chain(prompt(300))
    index = Index(Files(*pages(of, 256), *(anchor(of, n) for n in (64, 128, 192, 256)), session("x", of, [192, 256])), GRID)
    index.drop_over(pages(of, 256)[2].key, "damaged")
    assert (lengths(index), list(index.sessions), index.bytes(DISK)) == ([64, 128], [], 220)
    assert sorted(index._storage.there) == sorted(e.key for e in (*pages(of, 128), anchor(of, 64), anchor(of, 128)))


@pytest.mark.parametrize(("history", "goes"), [(200, True), (190, True), (193, True)])
def test_a_session_supersedes_those_that_it_goes_on_with(history, goes):
    """The older one's history is a prefix of the new one; another tenant's, and one that parts before, stay."""
    old, new = chain(prompt(204)), chain(np.concatenate([prompt(204), prompt(60, seed=1)]))
    apart = chain(np.concatenate([prompt(150), prompt(60, seed=2)]))
    elsewhere = chain(prompt(204), "b")
    files = Files()
    for name, of, length in (("old", old, 204), ("apart", apart, 210), ("b", elsewhere, 204), ("new", new, 264)):
        files.add(*pages(of, length), anchor(of, length, use=SPILL))
        files.add(session(name, of, [length], history=history if name == "old" else None))
    index = Index(files, GRID)
    index.supersede("s-new", new.keys, NOW - 7)
    assert sorted(index.sessions) == ["s-apart", "s-b", "s-new"] if goes else ["s-apart", "s-b", "s-new", "s-old"]
    assert index.sessions["s-new"].used == NOW - 7
    assert index.bytes(SPILL) == sum(e.nbytes for e in files.there.values())


def test_a_record_that_is_written_again_is_one():
    of = chain(prompt(200))
    record = session("x", of, [200])
    index = Index(Files(*pages(of, 200), anchor(of, 200, use=SPILL), record), GRID)
    index.add_session(record)
    assert [a.length for a in index.own(index.sessions["s-x"])] == [200]
    assert index.evict(SPILL, 0)
    assert (index.anchors, index.sessions, index._storage.there) == ({}, {}, {})


def test_a_session_keeps_the_states_that_others_have_too():
    of, longer = chain(prompt(200)), chain(prompt(264))
    files = Files(*pages(of, 200), *pages(longer, 264), *(anchor(longer, n, use=SPILL) for n in (128, 192, 264)), anchor(of, 200, use=SPILL))
    files.add(session("short", of, [128, 192, 200], used=1), session("long", longer, [128, 192, 264], used=2))
    index = Index(files, GRID)
    index.evict(SPILL, index.bytes(SPILL) - 1)
    assert (list(index.sessions), lengths(index)) == (["s-long"], [128, 192, 264])
