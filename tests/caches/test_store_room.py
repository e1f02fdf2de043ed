"""The state store's room: bytes are accounted for before they exist, and what is worth least goes first."""

import tracemalloc

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.caches.store import USES, StateStore, snapshot_bytes
from qjax.pages import PagePool
from qjax.state import BLOCK, Layout, Section, View
from tests.bits import assert_bits_equal
from tests.caches.snapshots import LAYOUT, PLENTY, fetch, has, ids, lengths, made, other, put
from tests.models import prompt


@pytest.fixture
def pool() -> PagePool:
    return PagePool(LAYOUT, 8)


def test_sizes_are_known_before_a_byte_is_copied(pool):
    store = StateStore(pool, PLENTY, PLENTY)
    for length in (1, 63, 64, 65, 200):
        for logits in (None, np.zeros(50, np.float32)):
            store.clear()
            assert put(store, prompt(length), logits=logits)
            assert store.nbytes == store.stats()["bytes"] == snapshot_bytes(LAYOUT, length, logits)


def live_bytes() -> int:
    """Bytes that numpy and pinned host memory hold now; tracemalloc runs."""
    pinned = sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == "pinned_host")
    return tracemalloc.get_traced_memory()[0] + pinned


def test_bytes_are_the_live_ones_and_the_peak_is_within_the_budget():
    """G1, G2: 16 snapshots of 2 MB go through a budget of four; a page on its way is all that comes on top."""
    layout = Layout((Section("S", (1 << 18,), "float32"),), (), (View("K", 4, 4, 128, "bfloat16"),), grid=64)
    pool, tokens = PagePool(layout, 4), [ids(other(250, seed)) for seed in range(16)]
    one = snapshot_bytes(layout, 250)
    store = StateStore(pool, 4 * one + 100, one)
    sequence = made(pool, prompt(250))
    tracemalloc.start()
    try:
        before = live_bytes()
        for keys in tokens:
            assert store.offer(keys, "", sequence)
            assert abs(live_bytes() - before - store.nbytes) <= 0.01 * store.nbytes
        assert store.stats()["bytes"] == 4 * one
        # the peak of numpy's share: sections lie in pinned memory
        assert tracemalloc.get_traced_memory()[1] - before <= 4 * (one - layout.section_bytes) + layout.page_bytes
        store.clear()
        assert store.stats()["bytes"] == store.stats()["entries"] == 0
        assert live_bytes() - before < 0.01 * one
    finally:
        tracemalloc.stop()


def test_room_is_made_before_the_copy_and_too_large_is_refused_before_it(pool, monkeypatch):
    one = snapshot_bytes(LAYOUT, 200)
    store = StateStore(pool, 2 * one, one)
    copied = []

    def watched(pages, length, copy_out=pool.copy_out):
        assert store.nbytes + snapshot_bytes(LAYOUT, length) <= store.budget_bytes
        copied.append(length)
        return copy_out(pages, length)

    monkeypatch.setattr(pool, "copy_out", watched)
    for seed in range(3):
        assert put(store, other(200, seed))
    assert not put(store, prompt(201))
    assert not put(store, prompt(200), logits=np.zeros(1, np.float32))
    assert copied == [200] * 3
    assert lengths(store) == [200, 200]  # a refused offer evicts nothing
    stats = store.stats()
    assert (stats["refused_too_large"], stats["evicted"], stats["offers"]) == (2, 1, 5)


def test_an_entry_is_at_most_the_budget(pool):
    store = StateStore(pool, snapshot_bytes(LAYOUT, 100) - 1, PLENTY)
    assert not put(store, prompt(100))
    assert store.stats()["refused_too_large"] == 1
    assert not put(StateStore(pool, 0, 0), prompt(1))


def test_the_least_recently_used_goes_first(pool):
    store = StateStore(pool, 3 * snapshot_bytes(LAYOUT, 100), PLENTY)
    a, b, c, d, e = (other(100, seed) for seed in range(5))
    assert all(put(store, one) for one in (a, b, c))
    assert fetch(store, a) == 100  # used
    assert store.find(ids([*b, 1]), "").start == 100  # only looked at
    assert put(store, d)
    assert [has(store, one) for one in (a, b, c, d)] == [True, False, True, True]
    assert put(store, c)  # offered again: used
    assert put(store, e)
    assert [has(store, one) for one in (a, c, d, e)] == [False, True, True, True]
    assert store.stats()["evicted"] == 2


def test_a_session_that_a_later_turn_went_on_from_goes_first(pool):
    def begin(**more):
        store = StateStore(pool, snapshot_bytes(LAYOUT, 130) + 2 * snapshot_bytes(LAYOUT, 64), PLENTY)
        assert put(store, other(64, 5))  # the least recently used
        assert put(store, prompt(64), **more)
        return store

    store = begin()
    assert put(store, prompt(130))
    assert put(store, other(64, 6))
    assert [has(store, one) for one in (other(64, 5), prompt(64), prompt(130))] == [True, False, True]

    store = begin()
    assert put(store, prompt(130))
    assert fetch(store, prompt(64)) == 64  # asked for after that turn: of worth again
    assert put(store, other(64, 6))
    assert [has(store, one) for one in (other(64, 5), prompt(64))] == [False, True]

    for more in ({"use": "prefix"}, {"tenant": "another"}):  # a head that many begin with, and another's session, are not passed
        store = begin(**more)
        assert put(store, prompt(130))
        assert put(store, other(64, 6))
        assert [has(store, other(64, 5)), has(store, prompt(64), more.get("tenant", ""))] == [False, True]


def test_an_equal_offer_copies_nothing_and_adds_what_it_knows(pool, monkeypatch):
    store = StateStore(pool, PLENTY, PLENTY)
    logits = np.arange(50, dtype=np.float32)
    assert put(store, prompt(100))
    monkeypatch.setattr(pool, "copy_out", None)
    assert put(store, prompt(100))
    assert not store.find(ids(prompt(100)), "").whole
    assert put(store, prompt(100), logits=logits)
    hit = store.find(ids(prompt(100)), "")
    assert hit.whole
    assert_bits_equal(store.take(hit).logits, logits)
    assert put(store, prompt(100), logits=logits + 1, use="prefix")
    stats = store.stats()
    assert (stats["entries"], stats["prefix_entries"], stats["offers"]) == (1, 1, 4)
    assert stats["bytes"] == stats["prefix_bytes"] == snapshot_bytes(LAYOUT, 100, logits)
    assert_bits_equal(store.take(store.find(ids(prompt(100)), "")).logits, logits)


def test_logits_that_do_not_fit_are_left_out(pool):
    store = StateStore(pool, PLENTY, snapshot_bytes(LAYOUT, 100))
    assert put(store, prompt(100))
    assert put(store, prompt(100), logits=np.zeros(1, np.float32))
    assert not store.find(ids(prompt(100)), "").whole
    assert store.nbytes == store.entry_bytes


def test_many_turns_leave_no_array_behind(pool):
    """G4: entries come and go; live arrays and held pages stay as many."""
    store = StateStore(pool, 3 * snapshot_bytes(LAYOUT, 70), PLENTY)
    counts = set()
    for turn in range(60):
        assert put(store, other(70, turn))
        assert fetch(store, other(70, turn)) == 70
        if turn >= 5:
            counts.add((len(jax.live_arrays()), pool.free, store.nbytes))
    assert len(counts) == 1


OPERATIONS = st.tuples(
    st.sampled_from(["offer", "offer", "fetch", "clear"]),
    st.sampled_from([1, 64, 65, 100, 130]),
    st.integers(0, 2),
    st.sampled_from(["", "b"]),
    st.sampled_from(USES),
)


@settings(max_examples=100)
@given(st.lists(OPERATIONS, min_size=10, max_size=25))
def test_it_does_what_a_plain_model_does(operations):
    """A20: a list of entries, everything recomputed after every operation."""
    pool = PagePool(LAYOUT, 8)
    store = StateStore(pool, 2 * snapshot_bytes(LAYOUT, 130), PLENTY)
    model, evicted, hits = [], 0, 0  # [length, seed, tenant, use, passed], the least recently used first
    for act, length, seed, tenant, use in operations:
        tokens = other(length, seed)
        if act == "clear":
            store.clear()
            model = []
        elif act == "fetch":
            best = max((e[0] for e in model if (e[1], e[2]) == (seed, tenant) and e[0] <= length), default=0)
            cut = max((min(length, e[0]) for e in model if (e[1], e[2]) == (seed, tenant) and e[0] // BLOCK * BLOCK <= length), default=0)
            start = fetch(store, tokens, tenant)
            assert start == max(best, cut)
            if start:
                hits += 1
                able = [e for e in model if (e[1], e[2]) == (seed, tenant) and min(length, e[0]) == start and e[0] // BLOCK * BLOCK <= start]
                able[-1][4] = False
                model = [e for e in model if e is not able[-1]] + able[-1:]
        else:
            assert put(store, tokens, tenant, use=use)
            same = [e for e in model if tuple(e[:3]) == (length, seed, tenant)]
            if same:
                same[0][3:] = ["prefix" if "prefix" in (use, same[0][3]) else "session", False]
                model = [e for e in model if e is not same[0]] + same
            else:
                for e in model:
                    e[4] |= use == e[3] == "session" and (e[1], e[2]) == (seed, tenant) and e[0] < length
                while sum(snapshot_bytes(LAYOUT, e[0]) for e in model) + snapshot_bytes(LAYOUT, length) > store.budget_bytes:
                    model.remove(next((e for e in model if e[4]), model[0]))
                    evicted += 1
                model.append([length, seed, tenant, use, False])
        assert [(e.length, e.tenant, e.use) for e in store._entries] == [(e[0], e[2], e[3]) for e in model]
        assert all(e.keys.size == e.tokens.size == rows.shape[2] for e in store._entries for rows in e.rows.values())  # A10
        stats = store.stats()
        assert stats["bytes"] == sum(snapshot_bytes(LAYOUT, e[0]) for e in model) <= store.budget_bytes
        assert (stats["entries"], stats["evicted"], stats["hits"]) == (len(model), evicted, hits)
        assert pool.free == pool.pages
