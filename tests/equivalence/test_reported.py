"""Faults that users of other engines reported, as cases over the resident tier: the hit is asserted, then every bit against a cold run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.state import BLOCK
from tests.bits import assert_bits_equal
from tests.equivalence.test_resident import answer, assert_warm_is_cold, cached, cold, followed
from tests.models import prompt
from tests.runs import cold as alone
from tests.runs import kept


@pytest.fixture
def resident(tiny_engine):
    """The resident tier alone: nothing comes back from the state store."""
    with cached(tiny_engine, cache_budget_gb=0) as caches:
        yield caches.resident


def joined(*parts) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


def ask(engine, tokens, **more):
    """The record of a request whose bits are a cold run's."""
    record, generated, state = answer(engine, tokens, **more)
    expected = cold(engine, tokens)
    assert generated == expected[0]
    assert_bits_equal(state, expected[1])
    return record


def spoil(pool) -> None:
    """Writes NaN over every page that nobody holds, and over the rows past the fill mark of those that somebody does."""
    rows = np.arange(pool.layout.grid) >= np.where(pool.holders > 0, pool.fill, 0)[:, None]  # [pages, grid]
    mask = jnp.asarray(rows[:, None, None, :, None])
    nan = {name: view.dtype.type(0x7FC0) if view.dtype == np.uint16 else np.nan for name, view in pool.views.items()}
    pool.views = {name: jnp.where(mask, jnp.asarray(nan[name], view.dtype), view) for name, view in pool.views.items()}


@pytest.mark.parametrize("first", [1, 7, 30])
def test_a2_conversations_that_take_turns_inside_a_block(tiny_engine, resident, first):
    """A2: four requests at once, a row each in turn, each at another offset of its block; then each goes on where it ended."""
    prompts = [joined(prompt(64), prompt(first + 11 * i, seed=i)) for i in range(4)]
    runs = [tiny_engine.generate(tokens, max_tokens=12) for tokens in prompts]
    loops = [iter(run) for run in runs]
    for turn in range(15):
        for loop in loops if turn % 2 else loops[::-1]:
            next(loop, None)
    offsets = {int(run.sequence.length) % BLOCK for run in runs}
    for tokens, run in zip(prompts, runs, strict=True):
        assert (run.tokens, kept(tiny_engine.pool, run.sequence)["tokens"].size) == (cold(tiny_engine, tokens, 12)[0], tokens.size + 11)
        assert_bits_equal(kept(tiny_engine.pool, run.sequence), cold(tiny_engine, tokens, 12)[1])
        tiny_engine.release(run.sequence)
    assert len(offsets) == 4
    for tokens, run in zip(prompts, runs, strict=True):
        following = followed(tokens, run.tokens, prompt(9, seed=8))
        assert ask(tiny_engine, following).start == following.size - 9


def test_a3_a_line_without_a_state_serves_nothing(tiny_engine, resident):
    """A3: rows of every line are there, and only where a state was taken can be resumed. Control: with the anchors, the hit."""
    tokens = prompt(300)
    other = joined(tokens[:250], prompt(30, seed=1))
    answer(tiny_engine, tokens)
    taken, resident.resident.anchors = resident.resident.anchors, []
    assert resident.find(other.astype(np.int64), "") is None
    record = ask(tiny_engine, other)
    assert (record.source, record.start, record.agrees, record.why) == ("cold", 0, 250, "no_anchor")
    resident.clear()
    answer(tiny_engine, tokens)
    assert [a.length for a in resident.resident.anchors] == [a.length for a in taken] == [64, 128, 192, 256, 300, 304]
    assert_warm_is_cold(tiny_engine, other, "resident", 192)


@pytest.mark.parametrize(("before", "forwards"), [*((0, n) for n in range(5)), *((150, n) for n in range(3))])
def test_a4_an_aborted_prefill_is_tried_again(tiny_engine, resident, before, forwards):
    """A4: cancelled after each forward, from nothing and from a hit inside a block; the retry resumes at what was finished, no further."""
    if before:
        answer(tiny_engine, prompt(before))
    tokens = joined(prompt(before), prompt(300 - before, seed=1))
    asked = iter(range(100))
    run = tiny_engine.generate(tokens, max_tokens=5, cancel=lambda: next(asked) >= forwards)
    assert not list(run)
    tiny_engine.release(run.sequence)
    reached = int(run.sequence.length)
    assert before <= reached < 300
    assert (reached > before) == (forwards > 0)
    assert ask(tiny_engine, tokens).start == reached


def test_a4_an_aborted_answer_is_tried_again(tiny_engine, resident):
    tokens = prompt(126)
    for length in range(1, 6):
        for _ in (run := tiny_engine.generate(tokens, max_tokens=9)):
            if len(run.tokens) == length:
                break
        assert run.finish == "cancelled"
        assert_bits_equal(kept(tiny_engine.pool, run.sequence), cold(tiny_engine, tokens, length)[1])
        tiny_engine.release(run.sequence)
        assert_warm_is_cold(tiny_engine, tokens, "prompt", 126)
        kept_rows = 126 + length - 1
        assert ask(tiny_engine, followed(tokens, run.tokens, prompt(5, seed=2))).start == (kept_rows if kept_rows >= 128 else 126)


def test_a4_cancelled_inside_the_last_block(tiny_engine, resident):
    """A4: the hit was cut out of the end's block, and nothing was forwarded: the retry starts where the first try did."""
    tokens = prompt(140)
    _, generated, _ = answer(tiny_engine, tokens, 11)
    following = joined(tokens, generated[:8], prompt(30, seed=3))
    run = tiny_engine.generate(following, cancel=lambda: True)
    assert not list(run)
    tiny_engine.release(run.sequence)
    assert (run.start, int(run.sequence.length)) == (148, 148)
    assert ask(tiny_engine, following).start == 148


@pytest.mark.parametrize("length", [1, 64, 100, 128, 190])
def test_a5_nothing_is_read_before_it_is_written(tiny_engine, resident, length):
    """A5: NaN in every row that nobody has written or that was given up, before a fresh request, before a hit, after a clear."""
    pool = tiny_engine.pool
    answer(tiny_engine, prompt(300, seed=3), tenant="before")
    resident.clear()
    spoil(pool)
    assert np.isnan(pool.rows("K", [0], 64).view(jnp.bfloat16).astype(np.float32)).all()
    tokens = prompt(length)
    assert ask(tiny_engine, tokens).start == 0
    spoil(pool)
    following = followed(tokens, cold(tiny_engine, tokens)[0], prompt(70, seed=1))
    assert ask(tiny_engine, following).start == length + 4
    spoil(pool)
    assert ask(tiny_engine, joined(following[: length + 2], prompt(70, seed=2))).start > 0 or length == 1


def test_a5_control_a_row_that_is_read_shows(tiny_engine, resident):
    """NaN in the last row that was written, and the next turn is another one."""
    tokens = prompt(100)
    _, generated, _ = answer(tiny_engine, tokens)
    pool = tiny_engine.pool
    pool.fill[resident.resident.pages[-1]] -= 1
    spoil(pool)
    pool.fill[resident.resident.pages[-1]] += 1
    run = tiny_engine.generate(followed(tokens, generated, prompt(5, seed=1)))
    with pytest.raises(ValueError, match="logits are NaN"):
        list(run)
    assert run.start == 104
    tiny_engine.release(run.sequence)


@pytest.mark.parametrize("length", [20, 128, 145])
def test_a5_a_page_that_was_given_up_is_another_tenants(tiny_engine, resident, length):
    """The same prompt again and again copies its last page each time; somebody else takes the one before, and no anchor reads it any more."""
    tokens = prompt(length)
    for turn in range(4):
        assert ask(tiny_engine, tokens, tenant="a").start == (length if turn else 0)
        answer(tiny_engine, prompt(100, seed=turn + 5), tenant="b")
        mine = {p for s in resident.sessions if s.tenant == "a" for p in s.pages}
        assert mine.isdisjoint(p for s in resident.sessions if s.tenant == "b" for p in s.pages)
        assert all(mine.issuperset(a.sequence.pages.tolist()) for s in resident.sessions if s.tenant == "a" for a in s.anchors)


def test_a9_the_same_head_with_another_system_prompt(engine_256):
    """A9: A, A, B, A, A over a long common head: every A has the same bytes, whatever B left at the boundary."""
    head = prompt(700)
    a, b = joined(head, prompt(60, seed=1)), joined(head, prompt(75, seed=2))
    with cached(engine_256):
        expected = cold(engine_256, a)
        for turn, tokens in enumerate((a, a, b, a, a)):
            record, generated, state = answer(engine_256, tokens)
            assert (record.start > 0) == (turn > 0)
            if tokens is a:
                assert generated == expected[0]
                assert_bits_equal(state, expected[1])
                assert record.start == (760 if turn else 0)
            else:
                assert (record.start, generated != expected[0]) == (512, True)


def test_a10_a_key_longer_than_its_state_is_refused(tiny_engine, resident):
    """A10: keys forged past the rows: the hit ends where the state does. Control: the true next turn starts there too, with the same bits."""
    tokens = prompt(150)
    _, generated, _ = answer(tiny_engine, tokens)
    session = resident.resident
    assert all(a.length == a.sequence.tokens.size <= session.length == 154 for a in session.anchors)
    following = followed(tokens, generated, prompt(100, seed=2))
    session.keys = following.astype(np.int64)[:220]
    hit = resident.find(following.astype(np.int64), "")
    assert hit.start == 154
    assert_warm_is_cold(tiny_engine, following, "end", 154)


def test_a14_anchors_stay_as_they_were(tiny_engine, resident):
    """A14: 64 tokens decoded from an anchor, and a branch of it; donation is on. Control: an anchor's neighbour in time differs."""
    tokens = prompt(100)
    _, generated, _ = answer(tiny_engine, tokens)
    anchors = list(resident.resident.anchors)
    before = [kept(tiny_engine.pool, a.sequence) for a in anchors]
    logits = [None if a.logits is None else a.logits.copy() for a in anchors]
    old = tiny_engine.pool.views["K"]
    following = followed(tokens, generated, prompt(3, seed=1))
    assert answer(tiny_engine, following, 64)[0].start == 104
    assert old.is_deleted()  # the rows were written in place
    assert answer(tiny_engine, joined(tokens, prompt(40, seed=2)))[0].start == 100
    for anchor, state, row in zip(anchors, before, logits, strict=True):
        assert_bits_equal(
            jax.tree.map(np.array, {"sections": anchor.sequence.sections, "open": anchor.sequence.open}), {k: state[k] for k in ("sections", "open")}
        )
        assert row is None or np.array_equal(anchor.logits, row)
    for anchor in (a for s in resident.sessions for a in s.anchors):
        assert_bits_equal(kept(tiny_engine.pool, anchor.sequence), alone(tiny_engine, anchor.sequence.tokens))
    with pytest.raises(AssertionError, match="differ"):
        assert_bits_equal(before[-1]["open"], before[-2]["open"])


@pytest.mark.parametrize("length", [63, 127, 191, 300])
def test_a15_no_state_is_rewound(tiny_engine, resident, length):
    """A15: a shorter prompt of a kept one resumes at a state of its own length or less; a partial trim raises."""
    answer(tiny_engine, prompt(302))
    end = resident.resident.anchors[-1].sequence
    for wrong in (303 // BLOCK * BLOCK - 1, int(end.length) + 1, 0):
        with pytest.raises(ValueError, match="can be cut to"):
            end.cut(wrong, 64)
    tokens = prompt(length)
    record = ask(tiny_engine, tokens)
    assert (record.agrees, record.start) == (length, length - 1 if length == 300 else length // 64 * 64)
    for session in resident.sessions:
        assert all(a.length == a.sequence.tokens.size <= session.length for a in session.anchors)
        assert len(session.pages) == -(-session.length // 64)


def test_b1_a_chat_of_twenty_turns(engine_256):
    """B1: every turn reads its new tokens alone."""
    with cached(engine_256) as caches:
        tokens, new = prompt(300), 25
        for turn in range(20):
            record, generated, _ = answer(engine_256, tokens)
            assert record.prompt_tokens - record.start == (new if turn else 300)
            assert (record.read_again, record.source) == (0, "end" if turn else "cold")
            tokens = followed(tokens, generated, prompt(new, seed=turn + 1))
        assert_warm_is_cold(engine_256, tokens, "end", tokens.size - new)
        assert len(caches.resident.sessions) == 1


def test_b3_prompts_that_share_most_of_themselves(engine_256):
    """B3: the first line of the shared part is missed by the second prompt, which leaves an anchor there for all after it."""
    head = prompt(500)
    with cached(engine_256) as caches:
        starts = [answer(engine_256, joined(head, prompt(230, seed=i + 1)))[0].start for i in range(8)]
        assert starts == [0, 256, *[448] * 6]
        assert caches.ledger.totals()["by_source"]["cold"] == 1
        assert ask(engine_256, joined(head, prompt(230, seed=20))).start == 448


def test_b4_prompts_below_one_grid_line(tiny_engine, engine_256, resident):
    """B4: the block that a short prompt ended in serves the next one; where it cannot, the ledger says why."""
    answer(tiny_engine, prompt(50))
    assert_warm_is_cold(tiny_engine, joined(prompt(50), prompt(9, seed=1)), "prompt", 50)
    record = ask(tiny_engine, joined(prompt(40), prompt(9, seed=2)))
    assert (record.start, record.agrees, record.why) == (0, 40, "below_grid")
    with cached(engine_256, cache_budget_gb=0) as caches:
        answer(engine_256, prompt(200))
        record = ask(engine_256, joined(prompt(150), prompt(15, seed=1)))
        assert (record.start, record.agrees, record.why) == (0, 150, "below_grid")
        assert caches.ledger.totals()["by_why"]["below_grid"] == 1
        record = ask(engine_256, joined(prompt(150), prompt(15, seed=2)))
        assert (record.start, record.why) == (150, "differs")  # the second one ended in the block where they part


def test_b7_four_at_once_with_one_head(tiny_engine, resident):
    """B7: all four begin before the first has ended, and nobody waits: the others start on what the first has read by then, and the ledger
    says so; the fifth shares what they left. Where requests run by Parallel the head is read once: test_parallel_caches.py.
    """
    head = prompt(128)
    prompts = [joined(head, prompt(20, seed=i + 1)) for i in range(5)]
    runs = [tiny_engine.generate(tokens, max_tokens=3) for tokens in prompts[:4]]
    loops = [iter(run) for run in runs]
    for _ in range(6):
        for loop in loops:
            next(loop, None)
    for tokens, run in zip(prompts, runs, strict=False):
        assert_bits_equal(kept(tiny_engine.pool, run.sequence), cold(tiny_engine, tokens, 3)[1])
        tiny_engine.release(run.sequence)
    records = tiny_engine.caches.ledger.records
    assert [(r.source, r.start, r.why) for r in records] == [("cold", 0, "empty")] + [("running", 128, "none")] * 3
    assert ask(tiny_engine, prompts[4]).start == 128
    assert [ask(tiny_engine, tokens).start for tokens in prompts[:4]] == [148] * 4


def test_b13_a_loop_of_tools_moves_its_frontier(engine_256):
    """B13: ten tool results, no user message among them: each resumes at the end of the answer before it."""
    with cached(engine_256):
        tokens, starts = prompt(400), []
        for turn in range(11):
            record, generated, _ = answer(engine_256, tokens, user=380)
            starts.append(record.start)
            tokens = followed(tokens, generated, prompt(15, seed=turn + 50))
        assert starts == [0, *(404 + 19 * turn for turn in range(10))]
