"""What goes where there is no room, and what does not: order, tenants, and what others hold."""

import numpy as np
import pytest

from qjax.caches.anchors import live_bytes
from qjax.caches.tier import Unusable
from qjax.pages import PagePool
from tests.equivalence.test_resident import GB, answer, assert_warm_is_cold, cached, followed
from tests.models import prompt


def rest(pool, left: int) -> list[int]:
    """All free pages but so many, for somebody else."""
    return [pool.take() for _ in range(pool.free - left)]


def roles(caches) -> list[tuple[str, int]]:
    return [(s.role, s.length) for s in caches.resident.sessions]


def test_the_conversation_goes_last(tiny_engine):
    """A guest finds no page free: the parked session gives way, and the resident one goes on at its end."""
    with cached(tiny_engine, cache_budget_gb=0) as caches:
        answer(tiny_engine, prompt(200, seed=1))
        tokens = prompt(300)
        _, generated, _ = answer(tiny_engine, tokens)
        assert roles(caches) == [("parked", 204), ("resident", 304)]
        spare = rest(tiny_engine.pool, 0)
        answer(tiny_engine, prompt(60, seed=2))
        assert roles(caches)[0] == ("pinned", 192)
        assert roles(caches)[1] == ("resident", 304)
        tiny_engine.pool.release(spare)
        assert_warm_is_cold(tiny_engine, followed(tokens, generated, prompt(20, seed=9)), "end", 304)


def test_nothing_gives_way_to_a_request_that_has_its_page(tiny_engine):
    """The prompt takes the last five pages, and its answer stays in the fifth."""
    with cached(tiny_engine, cache_budget_gb=0) as caches:
        answer(tiny_engine, prompt(200, seed=1))
        spare = rest(tiny_engine.pool, 5)
        answer(tiny_engine, prompt(300))
        assert (roles(caches), tiny_engine.pool.free) == ([("parked", 204), ("resident", 304)], 0)
        tiny_engine.pool.release(spare)


def test_a_session_that_frees_no_page_is_spared(tiny_engine):
    """Somebody else holds all its pages: it goes on being found, and another one gives way though it was used later."""
    with cached(tiny_engine, cache_budget_gb=0) as caches:
        run = tiny_engine.generate(prompt(200, seed=1), max_tokens=5)
        list(run)  # and what it left is not released yet
        answer(tiny_engine, prompt(200, seed=2))
        answer(tiny_engine, prompt(300))
        spare = rest(tiny_engine.pool, 0)
        answer(tiny_engine, prompt(60, seed=3))
        assert roles(caches)[:3] == [("parked", 204), ("pinned", 192), ("resident", 304)]
        tiny_engine.pool.release(spare)
        tiny_engine.release(run.sequence)


def test_nothing_is_given_up_for_a_snapshot_that_does_not_fit_all_the_same(tiny_engine):
    """It needs five pages: three are free, and the two of the session are a caller's too, so that giving it up frees none."""
    with cached(tiny_engine, resident_park_gb=0, resident_pin_gb=0) as caches:
        answer(tiny_engine, prompt(300))
        run = tiny_engine.generate(prompt(100, seed=1), max_tokens=5)
        list(run)
        assert caches.store.stats()["entries"] == 1
        spare = rest(tiny_engine.pool, 3)
        before = caches.resident.sessions[:], tiny_engine.pool.holders.tolist()
        (hit,) = caches.find(prompt(310).astype(np.int64), "")
        with pytest.raises(Unusable, match="expected 5 pages that nobody else holds, found 3"):
            caches.take(hit)
        assert (caches.resident.sessions, tiny_engine.pool.holders.tolist()) == before
        tiny_engine.release(run.sequence)  # control: now the session's two pages make five
        tiny_engine.pool.release(caches.take(hit).sequence.pages)
        assert caches.resident.sessions == []
        tiny_engine.pool.release(spare)


@pytest.mark.parametrize(("spared", "why"), [(3, "no_room"), (8, "none")])
def test_a_hit_without_pages_is_not_told_as_damage(tiny_engine, spared, why):
    """With eight pages to spare, the control, it is taken."""
    with cached(tiny_engine, resident_park_gb=0, resident_pin_gb=0) as caches:
        answer(tiny_engine, prompt(300))
        run = tiny_engine.generate(prompt(100, seed=1), max_tokens=5)
        list(run)
        spare = rest(tiny_engine.pool, spared)
        request = caches.begin(prompt(310))
        assert (request.record.source, request.record.why) == ("cold" if spared == 3 else "store", why)
        request.fail()
        tiny_engine.release(run.sequence)
        tiny_engine.pool.release(spare)


def test_why_a_prompt_is_read_again_is_not_told_of_another_tenants(tiny_engine):
    """F4: that somebody else's prompt was kept once is nobody's business."""
    with cached(tiny_engine) as caches:
        answer(tiny_engine, prompt(150), tenant="a")
        caches.clear()
        record, *_ = answer(tiny_engine, prompt(150), tenant="b")
        assert (record.source, record.why) == ("cold", "empty")
        record, *_ = answer(tiny_engine, prompt(150), tenant="a")
        assert (record.source, record.why) == ("cold", "cleared")


def test_each_tenants_head_is_pinned(tiny_engine):
    """F4: a session is kept once a tenant, whoever else has the same."""
    layout = tiny_engine.layout
    with cached(tiny_engine, resident_park_gb=0, resident_pin_gb=10 * layout.section_bytes / GB, cache_budget_gb=0) as caches:
        for tenant in "abc":
            answer(tiny_engine, prompt(168), tenant=tenant)
        assert sorted((s.role, s.tenant) for s in caches.resident.sessions) == [("pinned", "a"), ("pinned", "b"), ("resident", "c")]
        for tenant in "ab":
            record, *_ = answer(tiny_engine, np.concatenate([prompt(128), prompt(40, seed=9)]), tenant=tenant)
            assert (record.source, record.start) == ("pinned", 128)


def test_what_a_guest_shares_with_the_conversation_is_not_its_own(tiny_engine):
    """Both begin alike: the guests' budget is what they keep beyond the conversation. Control: a byte less, and something goes."""
    conversation, guest = prompt(400), np.concatenate([prompt(64), prompt(10, seed=1)])
    with cached(tiny_engine) as caches:
        answer(tiny_engine, conversation)
        answer(tiny_engine, guest)
        (session,) = (s for s in caches.resident.sessions if s.role == "guest")
        assert [a.length for a in session.anchors] == [64, 74, 78]
        own = caches.resident.own_bytes("guest")
        assert own == live_bytes(session.anchors) - live_bytes(session.anchors[:1])
    for less in (0, 1):
        with cached(tiny_engine, resident_stash_gb=(own - less) / GB, cache_budget_gb=0) as caches:
            answer(tiny_engine, conversation)
            answer(tiny_engine, guest)
            kept = [a.length for s in caches.resident.sessions if s.role == "guest" for a in s.anchors]
            assert (kept == [64, 74, 78]) == (less == 0)


def test_emptying_copies_nothing(tiny_engine, monkeypatch):
    """What is cleared does not go to the store on its way."""
    with cached(tiny_engine) as caches:
        answer(tiny_engine, prompt(200))
        answer(tiny_engine, prompt(300, seed=1))
        monkeypatch.setattr(PagePool, "copy_out", None)
        caches.clear()
        assert (caches.resident.sessions, caches.store.stats()["offers"]) == ([], 0)


@pytest.mark.parametrize("often", [1, 2])
def test_the_session_that_is_least_likely_to_go_on_goes_first(tiny_engine, often):
    """The park has room for an anchor of one of two: the one that has gone on stays, though it may be the one used longest ago."""
    park = 1.5 * tiny_engine.layout.section_bytes
    with cached(tiny_engine, resident_park_gb=park / GB, resident_pin_gb=0, cache_budget_gb=0) as caches:
        for seed in (1, 2):
            tokens = prompt(150, seed=seed)
            for turn in range(4 if seed == often else 1):
                _, generated, _ = answer(tiny_engine, tokens)
                tokens = followed(tokens, generated, prompt(5, seed=turn + 10))
        answer(tiny_engine, prompt(300, seed=3))
        assert [(s.role, s.turns) for s in caches.resident.sessions] == [("parked", 4), ("resident", 1)]
