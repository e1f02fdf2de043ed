"""Faults of memory and growth that users of other engines reported: budgets, counts and full pools, with the bits of a cold run."""

import gc

import jax
import pytest

from qjax.caches.anchors import NEWEST, live_bytes
from qjax.pages import PoolFull
from tests.bits import assert_bits_equal
from tests.equivalence.test_reported import ask, joined
from tests.equivalence.test_resident import GB, answer, assert_warm_is_cold, cached, cold, followed
from tests.models import prompt
from tests.runs import kept


@pytest.fixture
def resident(tiny_engine):
    """The resident tier alone: nothing comes back from the state store."""
    with cached(tiny_engine, cache_budget_gb=0) as caches:
        yield caches.resident


def test_g1_budgets_hold_before_anything_is_kept(engine_256):
    """G1: rows and anchors beyond a budget never stay, at no moment between two forwards; control: with room they do."""
    layout = engine_256.layout
    anchors = 5 * (layout.section_bytes + layout.open_bytes)
    with cached(engine_256, resident_gb=anchors / GB, resident_park_gb=0, resident_pin_gb=0, cache_budget_gb=0) as caches:
        answer(engine_256, prompt(1000, seed=1))
        held = []

        def look(progress):
            others = [s for s in caches.resident.sessions if s.role != "resident"]
            held.append((len(others), engine_256.pool.pages - engine_256.pool.free))

        answer(engine_256, prompt(900, seed=2), progress=look)
        assert held[0] == (0, 0)  # the parked session went before the first page was taken
        assert set(held) == {(0, n) for n in range(5)}
        assert live_bytes(caches.resident.resident.anchors) <= anchors
        assert caches.resident.dropped["park"] > 0
    with cached(engine_256, cache_budget_gb=0) as caches:
        answer(engine_256, prompt(1000, seed=1))
        answer(engine_256, prompt(900, seed=2))
        assert [s.role for s in caches.resident.sessions] == ["parked", "resident"]
        assert_warm_is_cold(engine_256, prompt(1000, seed=1), "parked", 1000)


def test_g1_no_budget_keeps_the_newest_alone(engine_256):
    with cached(engine_256, resident_gb=0, resident_park_gb=0, resident_pin_gb=0, resident_stash_gb=0, cache_budget_gb=0) as caches:
        tokens = prompt(900)
        _, generated, _ = answer(engine_256, tokens)
        assert len(caches.resident.resident.anchors) == NEWEST
        answer(engine_256, prompt(30, seed=1))  # a guest that finds no room
        assert [s.role for s in caches.resident.sessions] == ["resident"]
        assert_warm_is_cold(engine_256, followed(tokens, generated, prompt(9, seed=2)), "end", 904)


def device_bytes() -> int:
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays())


def test_g2_what_the_stats_say_is_what_lives(tiny_engine, resident):
    """G2: the device's arrays grow by what the stats count, and shrink to what they were."""
    answer(tiny_engine, prompt(10))
    resident.clear()
    before = device_bytes()
    for seed in range(3):
        answer(tiny_engine, prompt(200, seed=seed))
        answer(tiny_engine, prompt(30, seed=seed + 10))
    logits = {id(a.logits): a.logits.nbytes for s in resident.sessions for a in s.anchors if a.logits is not None}
    stats = resident.stats()
    assert device_bytes() - before == stats["anchor_bytes"] - sum(logits.values()) > 0
    assert all(a.logits.base is None for s in resident.sessions for a in s.anchors if a.logits is not None)  # a row of a batch keeps the batch
    assert stats["page_bytes"] == (tiny_engine.pool.pages - tiny_engine.pool.free) * tiny_engine.layout.page_bytes
    resident.clear()
    assert device_bytes() == before
    assert (resident.stats()["anchor_bytes"], resident.stats()["page_bytes"], resident.sessions) == (0, 0, [])


@pytest.mark.parametrize("budget", [{}, {"resident_park_gb": 0, "resident_pin_gb": 1.5e-4}], ids=["parked", "pinned"])
def test_g4_many_turns_keep_no_more(tiny_engine, budget):
    """G4: sessions in turn, cancels and guests over one head: sessions, anchors and live arrays stop growing."""
    with cached(tiny_engine, cache_budget_gb=0, **budget) as caches:
        seen = []
        for turn in range(60):
            tokens = joined(prompt(128), prompt(40 + turn % 3, seed=turn % 20))
            answer(tiny_engine, tokens, 2)
            run = tiny_engine.generate(prompt(150, seed=turn), cancel=lambda: True)
            assert not list(run)
            tiny_engine.release(run.sequence)
            answer(tiny_engine, prompt(20, seed=turn), 2)
            if turn % 20 == 19:
                seen.append((len(caches.resident.sessions), device_bytes()))
        assert seen[-1][0] <= seen[0][0] <= 30
        assert seen[-1][1] <= seen[0][1] * 1.1


def test_a_full_pool_in_a_prefill_and_in_an_answer(tiny_engine, resident):
    """G1's kind: somebody else holds the pages. What was begun is released, what was answered stays, and the engine goes on."""
    tokens, pool = prompt(126), tiny_engine.pool
    answer(tiny_engine, tokens, 2)
    spare = [pool.take() for _ in range(pool.free)]
    with pytest.raises(PoolFull):
        list(tiny_engine.generate(prompt(300, seed=1)))
    assert (pool.free, resident.sessions) == (2, [])  # the conversation gave way first
    run = tiny_engine.generate(tokens, max_tokens=9)
    with pytest.raises(PoolFull):
        list(run)
    assert (run.finish, int(run.sequence.length), len(run.tokens)) == ("failed", 128, 3)
    assert_bits_equal(kept(pool, run.sequence), cold(tiny_engine, tokens, 3)[1])
    tiny_engine.release(run.sequence)
    pool.release(spare)
    assert_warm_is_cold(tiny_engine, followed(tokens, run.tokens, prompt(5, seed=2)), "end", 128)


def test_a_session_gives_way_to_the_request_that_goes_on_in_its_page(tiny_engine, resident):
    """No page is free, and all of the session's are the request's too: with the session gone it writes on in place."""
    tokens, pool = prompt(150), tiny_engine.pool
    _, generated, _ = answer(tiny_engine, tokens)
    following = joined(tokens, generated[:3], prompt(10, seed=3))
    spare = [pool.take() for _ in range(pool.free)]
    assert (ask(tiny_engine, following).start, resident.dropped["pool"] > 0, pool.free) == (153, True, 0)
    pool.release(spare)


def test_an_answer_that_reaches_the_limit(tiny_engine, resident):
    """The context is used to its last row; what is kept of it is found again."""
    tokens = prompt(440)
    record, generated, state = answer(tiny_engine, tokens, 100)
    assert (record.finish, len(generated), state["tokens"].size) == ("length", 8, 447)
    again = joined(tokens, generated[:-1])
    assert answer(tiny_engine, again, 100)[0].start == 447  # the end's logits are kept with it: no forward
    assert_warm_is_cold(tiny_engine, again, "end", 447, max_tokens=1)
