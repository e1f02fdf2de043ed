"""Warm against cold over the resident tier: what a request leaves after a hit has the bits of a run that never saw a cache."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from qjax.caches.lookup import Caches
from qjax.config import GRID, TOKEN, CacheConfig
from qjax.engine import Engine
from qjax.pages import PagePool
from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import kept

GB = 2**30


@contextmanager
def cached(engine: Engine, **config):
    """The engine with caches of its own on a new pool; afterwards nothing is held."""
    engine.pool = PagePool(engine.layout, engine.pool.pages)
    engine.caches = Caches(engine.pool, CacheConfig(**config), engine.level, engine.model.tokenizer.decode)
    try:
        yield engine.caches
    finally:
        engine.caches.clear()
        free, engine.caches = engine.pool.free, None
    assert free == engine.pool.pages


@pytest.fixture(params=[TOKEN, GRID], autouse=True)
def level(request, tiny_engine, engine_256):
    """Every test at both levels. This machine is pure, so at level grid too all bits must be a cold run's, session resumes included."""
    for engine in (tiny_engine, engine_256):
        engine.level = request.param
    yield request.param
    for engine in (tiny_engine, engine_256):
        engine.level = TOKEN


@pytest.fixture
def caches(tiny_engine, level):
    with cached(tiny_engine) as caches:
        yield caches


def answer(engine: Engine, tokens, max_tokens=5, **more):
    """(record, generated tokens, all that the end's sequence keeps) of a greedy request."""
    generation = engine.generate(tokens, max_tokens=max_tokens, **more)
    list(generation)
    state = kept(engine.pool, generation.sequence)
    engine.release(generation.sequence)
    return (engine.caches.ledger.records[-1] if engine.caches else None), generation.tokens, state


def cold(engine: Engine, tokens, max_tokens=5):
    """What `answer` gives without caches, on a pool of its own."""
    caches, pool = engine.caches, engine.pool
    engine.caches, engine.pool = None, PagePool(engine.layout, pool.pages)
    try:
        return answer(engine, tokens, max_tokens)[1:]
    finally:
        engine.caches, engine.pool = caches, pool


def assert_warm_is_cold(engine, tokens, source, start, **more):
    """Runs a prompt through the caches: the hit is the named one, and every bit is a cold run's."""
    record, *warm = answer(engine, tokens, **more)
    assert (record.source, record.start) == (source, start), record
    expected = cold(engine, tokens)
    assert warm[0] == expected[0]
    assert_bits_equal(warm[1], expected[1])
    return record


def followed(tokens, generated, new):
    """The next turn's prompt: the last one, its answer as far as it was forwarded, and new tokens."""
    return np.concatenate([tokens, np.array(generated[:-1], np.int32), new]).astype(np.int32)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 191, 192, 193])
def test_the_next_turn_goes_on_at_the_end(tiny_engine, caches, length):
    """B1: the turn reads its new tokens only."""
    tokens = prompt(length)
    record, generated, _ = answer(tiny_engine, tokens)
    assert (record.source, record.start, record.why) == ("cold", 0, "empty")
    new = prompt(20, seed=9)
    record = assert_warm_is_cold(tiny_engine, followed(tokens, generated, new), "end", length + 4)
    assert (record.read_again, record.why) == (0, "none")


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 191, 192])
def test_the_same_prompt_again_needs_no_forward(tiny_engine, caches, length, monkeypatch):
    """D2: zero new tokens; the first token comes from the kept logits."""
    tokens = prompt(length)
    answer(tiny_engine, tokens)
    forward, steps = tiny_engine.forward, []
    step = forward.step
    monkeypatch.setattr(forward, "chunk", None)
    monkeypatch.setattr(forward, "step", lambda *arguments: steps.append(1) or step(*arguments))
    record, *warm = answer(tiny_engine, tokens)
    monkeypatch.undo()
    assert len(steps) == 4  # of the five tokens the first came from the kept logits
    assert (record.source, record.start) == ("prompt", length)
    expected = cold(tiny_engine, tokens)
    assert warm[0] == expected[0]
    assert_bits_equal(warm[1], expected[1])


@pytest.mark.parametrize("length", [1, 58, 59, 60, 123, 187])
def test_a_prompt_that_ends_where_an_answer_did_needs_no_forward(tiny_engine, caches, level, length, monkeypatch):
    """D2: the end anchor keeps its logits. At level grid it is a session resume."""
    tokens = prompt(length)
    _, generated, _ = answer(tiny_engine, tokens)
    following = followed(tokens, generated, tokens[:0])
    monkeypatch.setattr(tiny_engine.forward, "chunk", None)
    monkeypatch.setattr(tiny_engine.forward, "step", None)
    record, *warm = answer(tiny_engine, following, max_tokens=1)
    monkeypatch.undo()
    assert (record.source, record.start, record.exact) == ("end", following.size, level == TOKEN)
    expected = cold(tiny_engine, following, max_tokens=1)
    assert warm[0] == expected[0] == generated[-1:]
    assert_bits_equal(warm[1], expected[1])


@pytest.mark.parametrize("parts", [1, 40, 63, 64, 65, 100, 128, 150, 190, 199])
def test_an_edit_in_the_middle_resumes_below_it(tiny_engine, caches, level, parts):
    """Rows agree up to the edit: the anchor is the grid line below it, or the block that the prompt ended in."""
    tokens = prompt(200)
    answer(tiny_engine, tokens)
    edited = np.concatenate([tokens[:parts], prompt(60, seed=4)])
    start = parts if parts >= 192 and level == TOKEN else parts // 64 * 64  # a few tokens that all prompts begin with are no hit
    record = assert_warm_is_cold(tiny_engine, edited, "resident" if start else "cold", start)
    assert (record.agrees, record.read_again) == (parts, parts - start)
    assert record.differs_at == parts
    assert record.why == ("differs" if start == parts else "no_anchor" if parts >= 64 else "below_grid")


def test_a_branch_gets_an_anchor_on_the_next_pass(engine_256, level):
    """Rows agree further than the last anchor: taken while the second prompt passes, found by the third. At level grid it is the line below."""
    with cached(engine_256):
        tokens = prompt(700)
        answer(engine_256, tokens)
        first = np.concatenate([tokens[:460], prompt(100, seed=1)])
        record, *_ = answer(engine_256, first)
        assert (record.start, record.agrees) == (256, 460)
        assert record.anchors_taken.get("branch", 0) == (level == TOKEN)
        assert_warm_is_cold(engine_256, np.concatenate([tokens[:460], prompt(90, seed=2)]), "resident", 448 if level == TOKEN else 256)


def test_boundaries_that_the_caller_names_are_captured(engine_256, level):
    """The start of the last user message and the history boundary, without cutting the prefill."""
    with cached(engine_256):
        tokens = prompt(900)
        record, *_ = answer(engine_256, tokens, user=400, history=850)
        grid = {"user": 1, "grid": 1, "history": 1, "prompt": 1, "end": 1}
        assert record.anchors_taken == (grid | {"grid": 3} if level == TOKEN else grid)
        assert_warm_is_cold(engine_256, np.concatenate([tokens[:400], prompt(30, seed=1)]), "resident", 384 if level == TOKEN else 256)


def test_control_a_damaged_anchor_changes_the_answer(tiny_engine, caches):
    """One section of the end anchor zeroed: the comparison above would have seen it."""
    tokens = prompt(150)
    _, generated, _ = answer(tiny_engine, tokens)
    following = followed(tokens, generated, prompt(20, seed=9))
    expected = cold(tiny_engine, following)
    for name in tiny_engine.layout.sections:
        session = caches.resident.resident
        anchor = session.anchors[-1]
        sequence = anchor.sequence
        broken = sequence.sections | {name.name: jax.numpy.zeros_like(sequence.sections[name.name])}
        object.__setattr__(anchor, "sequence", sequence.replace(sections=broken))
        record, _, state = answer(tiny_engine, following)
        assert record.source == "end"
        assert any(not np.array_equal(state["sections"][key], expected[1]["sections"][key]) for key in state["sections"])
        caches.clear()
        answer(tiny_engine, tokens)


def test_a_guest_leaves_the_conversation_where_it_was(tiny_engine, caches):
    """C6: a short request in between writes into pages of its own."""
    tokens = prompt(300)
    _, generated, _ = answer(tiny_engine, tokens)
    session = caches.resident.resident
    before = {name: np.array(tiny_engine.pool.views[name][np.array(session.pages)]) for name in tiny_engine.pool.views}
    record = assert_warm_is_cold(tiny_engine, prompt(60, seed=5), "cold", 0)
    assert caches.resident.resident is session
    assert [s.role for s in caches.resident.sessions] == ["resident", "guest"]
    for name, rows in before.items():
        assert_bits_equal(np.array(tiny_engine.pool.views[name][np.array(session.pages)]), rows)
    assert_warm_is_cold(tiny_engine, followed(tokens, generated, prompt(20, seed=9)), "end", 304)
    assert record.why == "differs"
    again, *_ = answer(tiny_engine, prompt(60, seed=5))  # beyond the chapter: a guest is found again too
    assert (again.source, again.start) == ("guest", 60)


def test_a_guest_that_may_say_much_takes_pages_as_it_says_it(tiny_engine, caches):
    """A client that asks for the longest answer there is for a title: nothing is given up for what it does not say."""
    answer(tiny_engine, prompt(300))
    pool = tiny_engine.pool
    taken = [pool.take() for _ in range(pool.free - 2)]
    try:
        generation = tiny_engine.generate(prompt(50, seed=5), max_tokens=32_000)
        for said, _ in enumerate(generation, 1):
            if said == 5:
                break
        tiny_engine.release(generation.sequence)
        assert [(s.role, len(s.pages)) for s in caches.resident.sessions] == [("resident", 5), ("guest", 1)]
        assert caches.resident.dropped["pool"] == 0
    finally:
        pool.release(taken)


def test_sessions_in_turn_come_back_where_they_left(engine_256):
    """A, B, A, C, B, A with a common head: no row is read again, and the pages of the head are held once."""
    head = prompt(256)
    sessions = {name: np.concatenate([head, prompt(150, seed=seed)]) for seed, name in enumerate("ABC", 1)}
    with cached(engine_256) as caches:
        length = {}
        for name in "ABACBA":
            tokens = sessions[name]
            if name in length:
                assert_warm_is_cold(engine_256, tokens, "parked", length[name])
            else:
                assert_warm_is_cold(engine_256, tokens, *(("resident", 256) if length else ("cold", 0)))
            _, generated, _ = answer(engine_256, tokens)
            length[name] = tokens.size + len(generated) - 1
            sessions[name] = followed(tokens, generated, prompt(10, seed=7))
        pages = [s.pages for s in caches.resident.sessions]
        assert len(pages) == 3
        assert len({p[0] for p in pages}) == 1  # the head's page
        assert engine_256.pool.holders[pages[0][0]] == 3


def test_a_session_that_the_park_cannot_hold_leaves_its_head(engine_256):
    with cached(
        engine_256, resident_park_gb=0, resident_pin_gb=(2 * engine_256.layout.page_bytes + 2.5 * engine_256.layout.section_bytes) / GB
    ) as caches:
        tokens = prompt(700)
        answer(engine_256, tokens)
        answer(engine_256, prompt(700, seed=3))
        assert [s.role for s in caches.resident.sessions] == ["pinned", "resident"]
        assert_warm_is_cold(engine_256, np.concatenate([tokens[:600], prompt(50, seed=4)]), "pinned", 512)


def test_tenants_do_not_see_each_other(tiny_engine, caches):
    """F4: the same prompt of another tenant is cold; of the same one it is a hit."""
    tokens = prompt(130)
    answer(tiny_engine, tokens, tenant="a")
    record, *_ = answer(tiny_engine, tokens, tenant="b")
    assert (record.source, record.agrees, record.kept_text) == ("cold", 0, None)
    record, *_ = answer(tiny_engine, tokens, tenant="a")
    assert (record.start, record.prompt_tokens) == (130, 130)


def test_a_cancelled_prefill_is_gone_on_with(tiny_engine, caches):
    """A4: cancelled at every forward, tried again at once."""
    tokens = prompt(300)
    for forwards in range(1, 5):
        caches.clear()
        calls = iter(range(100))
        generation = tiny_engine.generate(tokens, max_tokens=5, cancel=lambda calls=calls, n=forwards: next(calls) >= n)
        assert not list(generation)
        tiny_engine.release(generation.sequence)
        reached = int(generation.sequence.length)
        assert caches.ledger.records[-1].finish == "cancelled"
        assert_warm_is_cold(tiny_engine, tokens, *(("resident", reached) if reached else ("cold", 0)))


@pytest.mark.parametrize("budget", [0, 1])
def test_a_full_pool_gives_up_what_is_kept(tiny_engine, level, budget):
    """16 pages of 64 tokens: five sessions of 200 tokens do not fit. What goes comes back from the state store, if there is one (B8), and
    of a session that was cut its head from the pool.
    """
    with cached(tiny_engine, cache_budget_gb=budget) as caches:
        for seed in range(5):
            answer(tiny_engine, prompt(200, seed=seed))
        assert_warm_is_cold(tiny_engine, prompt(440, seed=8), "cold", 0)
        assert caches.resident.dropped["pool"] > 0
        record = assert_warm_is_cold(tiny_engine, prompt(210, seed=0), *(("store", 200 if level == TOKEN else 192) if budget else ("pinned", 64)))
        assert record.why == ("none" if budget and level == TOKEN else "evicted")
        caches.clear()
        record, *_ = answer(tiny_engine, prompt(200, seed=0))
        assert (record.source, record.why) == ("cold", "cleared")


def test_the_store_keeps_the_longest_head_of_a_session_that_is_too_large_for_it(tiny_engine):
    layout = tiny_engine.layout
    entry = (layout.section_bytes + 140 * (layout.row_bytes + 12)) / GB
    with cached(tiny_engine, store_entry_gb=entry) as caches:
        tokens = prompt(200)
        answer(tiny_engine, tokens)
        for seed in range(1, 5):
            answer(tiny_engine, prompt(300, seed=seed))
        assert caches.store.stats()["prefix_entries"] >= 1
        assert_warm_is_cold(tiny_engine, np.concatenate([tokens, prompt(20, seed=9)]), "store", 128)


def test_stats_are_the_live_bytes(tiny_engine, caches):
    """G2: what the stats say is what is held, and after a clear nothing is."""
    answer(tiny_engine, prompt(200))
    answer(tiny_engine, prompt(30, seed=2))
    stats = caches.stats()["resident"]
    layout = tiny_engine.layout
    assert stats["page_bytes"] == (tiny_engine.pool.pages - tiny_engine.pool.free) * layout.page_bytes
    arrays = {id(x): x for s in caches.resident.sessions for a in s.anchors for x in a.arrays()}
    assert stats["anchor_bytes"] == sum(x.nbytes for x in arrays.values()) > 0
    caches.clear()
    stats = caches.stats()["resident"]
    assert (stats["page_bytes"], stats["anchor_bytes"], tiny_engine.pool.free) == (0, 0, tiny_engine.pool.pages)


@pytest.mark.parametrize("length", [140, 145, 190])
def test_the_same_prompt_many_times_names_pages_that_are_held(tiny_engine, caches, length):
    """Resuming inside a page copies it: the anchors that are inherited must name the copy, not the page that goes."""
    tokens = prompt(length)
    for seed in range(4):
        assert_warm_is_cold(tiny_engine, tokens, *(("parked", length) if seed else ("cold", 0)))
        answer(tiny_engine, prompt(100, seed=5 + seed), tenant="another")  # takes any page that was given up


def test_a_pool_of_one_sequence_gives_up_the_session_that_shares_all_its_pages(tiny_engine, caches, level):
    tokens = prompt(150)
    _, generated, _ = answer(tiny_engine, tokens)
    pool = tiny_engine.pool
    taken = [pool.take() for _ in range(pool.free)]
    edited = followed(tokens, generated, prompt(10, seed=9))
    edited[153] ^= 1
    try:
        record, *_ = answer(tiny_engine, edited, max_tokens=2)
    finally:
        pool.release(taken)
    assert (record.source, record.start) == ("resident", 153 if level == TOKEN else 128)
    assert caches.resident.dropped["pool"] > 0


def test_heads_of_many_sessions_are_pinned_once(tiny_engine):
    """G4: twelve conversations over one head leave one pinned session, not twelve."""
    layout = tiny_engine.layout
    budget = (2 * layout.page_bytes + 1.2 * layout.section_bytes) / GB
    with cached(tiny_engine, resident_park_gb=0, resident_pin_gb=budget) as caches:
        for seed in range(12):
            answer(tiny_engine, np.concatenate([prompt(128), prompt(40, seed=seed)]))
        assert [s.role for s in caches.resident.sessions].count("pinned") <= 1


def test_a_request_that_leaves_nothing_takes_nothing(tiny_engine, caches):
    """Cancelled before its first forward: no empty session, and the resident one is resident again."""
    tokens = prompt(150)
    answer(tiny_engine, tokens)
    for seed in range(1, 5):
        generation = tiny_engine.generate(prompt(190, seed=seed), cancel=lambda: True)
        assert not list(generation)
        tiny_engine.release(generation.sequence)
    assert [(s.role, s.length) for s in caches.resident.sessions] == [("resident", 154)]

    def broken(now):
        raise OSError("progress")

    with pytest.raises(OSError, match="progress"):
        list(tiny_engine.generate(prompt(190, seed=7), progress=broken))
    assert caches.ledger.records[-1].finish == "failed"
    assert [(s.role, s.length) for s in caches.resident.sessions] == [("resident", 154)]


def test_logits_that_an_anchor_keeps_are_its_own(tiny_engine, caches):
    """Not a row of a larger array that would live as long, uncounted (G4)."""
    for length in (20, 65, 140):
        answer(tiny_engine, prompt(length))
    anchors = [a for s in caches.resident.sessions for a in s.anchors if a.logits is not None]
    assert anchors
    assert all(a.logits.base is None for a in anchors)


def test_a_store_hit_is_taken_though_making_room_for_it_costs_its_place(tiny_engine):
    """Room for its pages is made by demoting a session, whose snapshot takes the place of the one that was found."""
    layout = tiny_engine.layout
    with cached(tiny_engine, cache_budget_gb=(layout.section_bytes + layout.open_bytes + 330 * (layout.row_bytes + 12)) / GB) as caches:
        answer(tiny_engine, prompt(300, seed=0))
        for seed in range(1, 4):
            answer(tiny_engine, prompt(300, seed=seed))
        assert caches.store.stats()["entries"] == 1
        kept = next(iter(caches.store._entries))
        following = np.concatenate([kept.tokens, prompt(10, seed=9)])
        record, *warm = answer(tiny_engine, following)
        assert (record.source, record.start, record.agrees, record.failed) == ("store", 304, 304, [])
        assert_bits_equal(warm[1], cold(tiny_engine, following)[1])
