"""The state store: what is found and what is not, what is refused, and what is counted."""

import numpy as np
import pytest

from qjax.caches.store import EVENTS, USES, StateStore, snapshot_bytes
from qjax.caches.tier import Unusable
from qjax.pages import PagePool
from tests.bits import assert_bits_equal
from tests.caches.snapshots import LAYOUT, PLENTY, fetch, ids, made, other, put
from tests.models import prompt


@pytest.fixture
def pool() -> PagePool:
    return PagePool(LAYOUT, 8)


def test_tenants_do_not_see_each_other(pool):
    """F4: with the same prompt; the pair to it is that the tenant itself hits."""
    store = StateStore(pool, PLENTY, PLENTY)
    assert put(store, prompt(100), "a", np.zeros(4, np.float32))
    for tenant in ("b", "", "A", "a "):
        assert store.find(ids(prompt(100)), tenant) is None
        assert fetch(store, prompt(100), tenant) == 0
    assert store.stats()["hits"] == 0
    assert fetch(store, prompt(100), "a") == 100
    assert put(store, prompt(100), "b")
    assert store.stats()["entries"] == 2


def test_every_key_is_compared(pool):
    """F5: no hash answers; keys that collide in their low 32 bits, their sum or their order do not hit past where they differ."""
    store = StateStore(pool, PLENTY, PLENTY)
    keys = ids(prompt(130))
    assert put(store, keys)
    for at in range(130):
        for forged in (keys[at] + 2**32, keys[at] ^ -(2**63), ~keys[at]):
            asked = keys.copy()
            asked[at] = forged
            hit = store.find(np.append(asked, 5), "")
            assert (hit and hit.start) == (at if at >= 128 else None)
    swapped = keys.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    for asked in (swapped, np.roll(keys, 1), keys[1:], keys[:128], keys[:0]):
        assert store.find(asked, "") is None
    assert store.find(np.append(keys, 5), "").start == 130


def test_the_longest_snapshot_is_found_and_whole_ones_before_others(pool):
    store = StateStore(pool, PLENTY, PLENTY)
    for length in (64, 129, 128, 100):
        assert put(store, prompt(length), logits=np.zeros(4, np.float32) if length == 100 else None)
    assert [store.find(ids(prompt(n)), "").start for n in (65, 100, 110, 129, 130, 300)] == [64, 100, 100, 128, 129, 129]
    assert store.find(ids(prompt(100)), "").whole
    assert fetch(store, prompt(129)[:128]) == 128
    assert store.find(ids([*prompt(128), 1001]), "").entry.length == 128  # of two that serve a start, the last used
    assert fetch(store, prompt(129)) == 129
    assert store.find(ids([*prompt(128), 1001]), "").entry.length == 129


def test_a_state_that_is_not_the_keys_is_refused(pool):
    """A3, A10: no state, another length, or pages that somebody released."""
    store = StateStore(pool, PLENTY, PLENTY)
    sequence = made(pool, prompt(100))
    forged = [
        (prompt(101), sequence),
        (prompt(99), sequence),
        (prompt(101), sequence.replace(length=np.int32(101))),
        (prompt(101), sequence.replace(tokens=prompt(101))),
        (prompt(200), sequence.replace(tokens=prompt(200), length=np.int32(200))),
        (prompt(100), None),
        (prompt(0), made(pool, prompt(0))),
    ]
    for keys, state in forged:
        assert not store.offer(ids(keys), "", state)
    pool.release(sequence.pages)
    assert not store.offer(ids(prompt(100)), "", sequence)
    stats = store.stats()
    assert (stats["skipped_no_state"], stats["entries"]) == (len(forged) + 1, 0)
    assert store.find(ids(prompt(200)), "") is None
    assert put(store, prompt(100))


def test_a_snapshot_is_its_own(pool):
    """What the caller does with the arrays that were stored is the caller's."""
    store, sequence, logits = StateStore(pool, PLENTY, PLENTY), made(pool, prompt(100)), np.ones(4, np.float32)
    keys = ids(prompt(100)).copy()
    sequence = sequence.replace(tokens=sequence.tokens.copy())
    assert store.offer(keys, "", sequence, logits)
    for array in (keys, sequence.tokens, logits):
        array[:] = 0
    restored = store.take(store.find(ids(prompt(100)), ""))
    assert_bits_equal((restored.sequence.tokens, restored.logits), (prompt(100), np.ones(4, np.float32)))


def test_a_full_pool_leaves_nothing_held(pool):
    store = StateStore(pool, PLENTY, PLENTY)
    assert put(store, prompt(200))
    hit = store.find(ids(prompt(300)), "")
    for free in range(4):
        taken = [pool.take() for _ in range(pool.pages - free)]
        holders = pool.holders.copy()
        with pytest.raises(Unusable, match=r"all 8 pages of 64 tokens are held"):
            store.take(hit)
        assert pool.free == free
        assert_bits_equal(pool.holders, holders)
        pool.release(taken)
    assert store.stats()["hits"] == 0
    assert len(store.take(hit).sequence.pages) == 4
    assert store.stats()["hits"] == 1


def test_a_snapshot_that_lost_its_place_since_is_whole(pool):
    """Room for the pages of a hit may cost the snapshot its place: the hit has it still, and what is restored is whole."""
    store = StateStore(pool, PLENTY, PLENTY)
    assert put(store, prompt(100))
    hit = store.find(ids(prompt(200)), "")
    store.clear()
    restored = store.take(hit)
    assert int(restored.sequence.length) == 100
    assert store.stats()["entries"] == 0
    pool.check(restored.sequence)
    pool.release(restored.sequence.pages)


def test_finding_moves_nothing(pool):
    """B16: a lookup takes no page and changes no order, also while the pool is full."""
    store = StateStore(pool, PLENTY, PLENTY)
    for seed in range(3):
        assert put(store, other(100, seed))
    taken = [pool.take() for _ in range(8)]
    before = [*store._entries], pool.views
    assert store.find(ids(prompt(200)), "").start == 100
    assert [*store._entries] == before[0]
    assert pool.views is before[1]
    pool.release(taken)


def test_which_lengths_may_be_a_head(pool):
    cap = snapshot_bytes(LAYOUT, 256)
    store = StateStore(pool, PLENTY, cap)
    assert [n for n in range(64, 500) if store.may_be_head(n)] == [64, 128, 192, 256]
    assert not StateStore(pool, PLENTY, cap - 1).may_be_head(256)
    assert not StateStore(pool, cap - 1, PLENTY).may_be_head(256)
    assert [n for n in range(64, 500) if StateStore(pool, PLENTY, PLENTY, 128).may_be_head(n)] == [128, 256, 384]
    assert not StateStore(pool, PLENTY, PLENTY, 0).may_be_head(64)
    assert put(store, prompt(256), use="prefix")  # it does fit


@pytest.mark.parametrize(
    ("more", "message"), [((-1, 1), "0 or more"), ((1, -1), "0 or more"), ((1, 1, 32), "multiple of the grid, 64"), ((1, 1, -64), "grid")]
)
def test_settings_out_of_range_are_named(pool, more, message):
    with pytest.raises(ValueError, match=message):
        StateStore(pool, *more)


def test_another_use_is_refused(pool):
    with pytest.raises(ValueError, match="use must be one of session, prefix, not 'turn'"):
        StateStore(pool, 1, 1).offer(ids(prompt(1)), "", None, use="turn")


def test_the_two_uses_are_counted_apart(pool):
    store = StateStore(pool, PLENTY, PLENTY)
    assert put(store, prompt(64), use="prefix")
    assert put(store, prompt(130))
    assert fetch(store, prompt(64)) == 64
    assert fetch(store, prompt(130)) == 130
    assert fetch(store, prompt(130)) == 130
    assert not store.offer(ids(prompt(3)), "", None, use="prefix")
    stats = store.stats()
    assert (stats["prefix_hits"], stats["session_hits"], stats["hits"]) == (1, 2, 3)
    assert (stats["prefix_offers"], stats["session_offers"], stats["prefix_skipped_no_state"]) == (2, 1, 1)
    for event in (*EVENTS, "entries", "bytes"):
        assert stats[event] == sum(stats[f"{use}_{event}"] for use in USES)
