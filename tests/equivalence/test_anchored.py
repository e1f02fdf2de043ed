"""The anchors that a request leaves or takes over: over rows that are there, with the logits of their own last row."""

import numpy as np
import pytest

from qjax.config import GRID, TOKEN
from qjax.slot import Slot
from tests.bits import assert_bits_equal
from tests.equivalence.test_grid import bits, cold_state, prompt_state
from tests.equivalence.test_resident import answer, assert_warm_is_cold, cached, cold, followed
from tests.impure import impure_steps
from tests.models import prompt


@pytest.fixture(params=[TOKEN, GRID])
def engine(request, tiny_engine, monkeypatch):
    monkeypatch.setattr(tiny_engine, "level", request.param)
    return tiny_engine


def test_a_longer_edit_has_no_anchors_past_where_it_parts(engine):
    """The first prompt's end lies off a line at 200, where the edited one has no anchor of its own."""
    with cached(engine):
        tokens = prompt(200)
        answer(engine, tokens)
        edited = np.concatenate([tokens[:100], prompt(200, seed=1)])
        assert_warm_is_cold(engine, edited, "resident", 64)
        assert_warm_is_cold(engine, np.concatenate([edited[:203], prompt(30, seed=2)]), "resident", 192)


def test_a_prompts_end_at_a_line_takes_the_logits(engine):
    """The anchor that is inherited there has none: the same prompt again needs no forward."""
    with cached(engine):
        answer(engine, prompt(300))
        record, *_ = answer(engine, prompt(256))
        assert (record.start, record.agrees) == (192, 256)
        record, *warm = answer(engine, prompt(256))
        assert record.start == record.prompt_tokens == 256
        assert_bits_equal(warm[1], cold(engine, prompt(256))[1])


def cancelled(engine, tokens, after=0) -> int:
    """A request that is cancelled after so many forwards: the rows that are there."""
    asked = iter(range(100))
    run = engine.generate(tokens, cancel=lambda: next(asked) >= after)
    assert not list(run)
    engine.release(run.sequence)
    return int(run.sequence.length)


def test_a_cancelled_request_keeps_no_anchor_past_its_rows(engine):
    """It agrees with a session up to a line whose logits are not known, and was cancelled before it had read what lies below."""
    with cached(engine) as caches:
        answer(engine, prompt(400))
        before = [(s.role, s.length) for s in caches.resident.sessions]
        assert cancelled(engine, prompt(64)) == 0
        assert [(s.role, s.length) for s in caches.resident.sessions] == before
        assert cancelled(engine, prompt(320)) == 256
        session = caches.resident.resident
        assert (session.length, [a.length for a in session.anchors]) == (256, [64, 128, 192, 256])
        assert_warm_is_cold(engine, prompt(320), "resident", 256)


def test_a_cancelled_prefill_is_the_session_that_the_retry_goes_on_with(engine):
    """And not one that is parked beside it."""
    with cached(engine) as caches:
        assert cancelled(engine, prompt(300), 2) == 128
        assert_warm_is_cold(engine, prompt(300), "resident", 128)
        assert [(s.role, s.length, s.turns) for s in caches.resident.sessions] == [("resident", 304, 2)]


def test_at_level_grid_a_prefill_that_is_cancelled_off_a_line_leaves_nothing(engine_256, monkeypatch):
    """There a state off a line serves what goes on with an answer, or a whole prompt with its logits. Control: at level token it serves."""
    for level, left in ((GRID, []), (TOKEN, [64])):
        monkeypatch.setattr(engine_256, "level", level)
        with cached(engine_256) as caches:
            assert cancelled(engine_256, prompt(150), 1) == 64
            assert [s.length for s in caches.resident.sessions] == left


def test_what_was_taken_before_a_clear_does_not_come_back(engine):
    """The caches are emptied while a request runs: of what it has it leaves its end alone."""
    with cached(engine) as caches:
        answer(engine, prompt(300))
        tokens = np.concatenate([prompt(200), prompt(200, seed=1)])
        run = engine.generate(tokens, max_tokens=5)
        steps = run.steps()
        for _ in range(3):
            assert next(steps) is None
        assert len(caches.running.requests[0].anchors) == 2
        caches.clear()
        list(steps)
        engine.release(run.sequence)
        assert [a.length for s in caches.resident.sessions for a in s.anchors] == [404]
        assert answer(engine, prompt(250))[0].start == 0
        assert_warm_is_cold(engine, followed(tokens, run.tokens, prompt(9, seed=2)), "parked", 404)


def test_an_interrupted_step_leaves_no_logits_of_the_row_before(tiny_engine, monkeypatch):
    """Ctrl-C waits for the end of `accept`: the row is there by then, and the logits that are known are not its own."""
    accept, count = Slot.accept, iter(range(100))

    def pressed(slot, tokens):
        accept(slot, tokens)
        if next(count) == 2:
            raise KeyboardInterrupt

    with cached(tiny_engine):
        run = tiny_engine.generate(prompt(128), max_tokens=9)
        monkeypatch.setattr(Slot, "accept", pressed)
        with pytest.raises(KeyboardInterrupt):
            list(run)
        monkeypatch.undo()
        tiny_engine.release(run.sequence)
        assert (int(run.sequence.length), len(run.tokens)) == (131, 3)
        assert_warm_is_cold(tiny_engine, np.concatenate([prompt(128), np.array(run.tokens, np.int32)]), "resident", 130)


def test_a_few_tokens_that_all_begin_with_are_no_hit(tiny_engine):
    """Of a request that runs: less than a block of its prompt is found as a whole only."""
    with cached(tiny_engine) as caches:
        for _ in (run := tiny_engine.generate(prompt(30), max_tokens=2)):
            starts = [caches.find(np.append(prompt(n), prompt(20, seed=1)).astype(np.int64), "") for n in (10, 29, 30)]
            assert [[hit.start for hit in found] for found in starts] == [[], [], [30]]
        tiny_engine.release(run.sequence)


def test_a_hit_inside_a_block_has_no_logits(tiny_engine):
    """While the request runs, and of what it left. Control: the whole prompt has them."""
    with cached(tiny_engine) as caches:

        def found(tokens):
            (hit,) = caches.find(tokens.astype(np.int64), "")
            restored = caches.take(hit)
            tiny_engine.release(restored.sequence)
            return hit.source, hit.start, restored.logits is not None

        edited = np.append(prompt(199), prompt(100, seed=1))
        for _ in (run := tiny_engine.generate(prompt(200), max_tokens=1)):
            assert [found(edited), found(prompt(200))] == [("running", 199, False), ("running", 200, True)]
        tiny_engine.release(run.sequence)
        assert [found(edited), found(prompt(200))] == [("resident", 199, False), ("prompt", 200, True)]


def test_a_request_that_failed_runs_no_more(tiny_engine):
    with cached(tiny_engine) as caches:
        run = tiny_engine.generate(prompt(150), progress=lambda now: 1 // (now.done == 0))
        with pytest.raises(ZeroDivisionError):
            list(run)
        assert caches.stats()["running"] == {"requests": 0, "hits": 0, "anchor_bytes": 0}


def test_a_request_whose_end_broke_off_is_not_found_as_running(tiny_engine, monkeypatch):
    """Its slot has given its pages up, so that its anchors are nobody's, and nothing is promised to it. Control: while it runs it is found."""
    with cached(tiny_engine) as caches:
        run = tiny_engine.generate(prompt(150), max_tokens=3)
        for _ in run:
            assert caches.find(prompt(160).astype(np.int64), "")[0].source == "running"
            monkeypatch.setattr(tiny_engine, "hold", None)
            with pytest.raises(TypeError):
                run.close()
        monkeypatch.undo()
        assert (caches.running.requests, caches.ledger.records[-1].finish) == ([], "failed")
        assert caches.find(prompt(160).astype(np.int64), "") == []
        assert_warm_is_cold(tiny_engine, prompt(160), "cold", 0)


def test_at_level_grid_an_anchor_stays_with_the_rows_that_it_was_taken_over(tiny_engine):
    """A request goes on with an answer's rows, and agrees further with a prompt's: that one's end is exact over its own rows alone."""
    with impure_steps(tiny_engine, GRID) as engine, cached(engine) as caches:
        tokens = prompt(200)
        _, generated, _ = answer(engine, tokens, max_tokens=10)
        whole = np.concatenate([tokens, np.array(generated, np.int32)])
        caches.clear()
        assert answer(engine, whole, max_tokens=1)[0].start == 0  # all 210 read by prefills
        assert answer(engine, tokens, max_tokens=10)[1] == generated  # 209 rows, the last nine by steps
        record, *_ = answer(engine, np.concatenate([whole, prompt(20, seed=1)]), max_tokens=1)
        assert (record.start, record.agrees, record.exact) == (209, 210, False)
        record, state = prompt_state(engine, whole)
        assert (record.start, record.exact) == (209, False)
        assert bits(state, cold_state(engine, whole)) > 0
