"""Requests beside others through the caches: a common head is read once, guests disturb nobody, and random use equals cold runs."""

from collections import Counter

import numpy as np
import pytest

from qjax.caches.lookup import Caches
from qjax.config import GRID
from qjax.parallel import Parallel
from qjax.slot import Slot
from tests.bits import assert_bits_equal
from tests.equivalence.counting import recount
from tests.equivalence.test_resident import answer, cached, cold, followed
from tests.impure import impure_steps
from tests.models import prompt
from tests.runs import kept


def joined(*parts) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


class Rows:
    """Prompt rows that went through prefill forwards, by the page pool that they were written to."""

    def __init__(self, monkeypatch):
        self._counts, real = Counter(), Slot.prefill

        def counted(slot, tokens, *more, **named):
            self._counts[id(slot._pool)] += len(tokens)
            return real(slot, tokens, *more, **named)

        monkeypatch.setattr(Slot, "prefill", counted)

    def read(self, engine) -> int:
        """On the engine's own pool: cold runs to compare with have pools of theirs."""
        return self._counts[id(engine.pool)]


@pytest.fixture
def rows(monkeypatch):
    return Rows(monkeypatch)


def ask(engine, prompts, most=4, **options):
    """Runs prompts side by side; each one's bits are a cold run's. Their ledger records, in the order of the prompts."""
    runs = Parallel(engine, most)
    before = len(engine.caches.ledger.records)
    generations = [runs.submit(tokens, max_tokens=5, **options | own) for tokens, own in prompts]
    records = {}
    for generation, token in runs:
        if token is None:
            assert generation.error is None
            records[generation] = engine.caches.ledger.records[-1]
    assert len(engine.caches.ledger.records) == before + len(prompts)
    for generation, (tokens, _) in zip(generations, prompts, strict=True):
        expected = cold(engine, tokens)
        assert generation.tokens == expected[0]
        assert_bits_equal(kept(engine.pool, generation.sequence), expected[1])
        engine.release(generation.sequence)
    recount(engine.caches, [])
    return [records[generation] for generation in generations]


TAILS = [prompt(40, seed=seed) for seed in range(1, 5)]


@pytest.mark.parametrize("most", [2, 4])
def test_b7_four_at_once_with_one_head_read_it_once(tiny_engine, rows, most):
    """B7: one reads the head, the others wait until it has passed the last line that they share, and go on there beside it."""
    with cached(tiny_engine):
        records = ask(tiny_engine, [(joined(prompt(200), tail), {}) for tail in TAILS], most)
        assert [(r.source, r.start) for r in records[:2]] == [("cold", 0), ("running", 192)]
        assert {r.start for r in records[2:]} <= {192, 200}
        assert [r.read_again for r in records] == [0, 0, 0, 0]
        assert rows.read(tiny_engine) <= 240 + 3 * 48


def test_b7_control_without_the_wait_the_head_is_read_four_times(tiny_engine, rows, monkeypatch):
    monkeypatch.setattr(Caches, "is_coming", lambda self, *of: False)
    with cached(tiny_engine):
        records = ask(tiny_engine, [(joined(prompt(200), tail), {}) for tail in TAILS])
        assert [r.source for r in records] == ["cold"] * 4
        assert rows.read(tiny_engine) > 4 * 192


@pytest.mark.parametrize("length", [64, 130, 192, 300])
def test_b7_the_same_prompt_four_times_is_read_once(tiny_engine, rows, length):
    """B7: the first one's state at the prompt's end, with its logits, serves the others: they need no forward."""
    with cached(tiny_engine):
        records = ask(tiny_engine, [(prompt(length), {})] * 4)
        assert [(r.source, r.start) for r in records] == [("cold", 0)] + [("running", length)] * 3
        assert rows.read(tiny_engine) <= length


@pytest.mark.parametrize("shared", [64, 100, 128, 290, 300])
def test_one_that_comes_later_goes_on_beside_the_first(tiny_engine, shared):
    """While the first answers: it starts at once, at the last anchor that both share. One prompt is the beginning of the other, too."""
    with cached(tiny_engine) as caches:
        runs, second = Parallel(tiny_engine, 2), None
        first = runs.submit(prompt(300), max_tokens=9)
        for generation, token in runs:
            if len(first.tokens) == 2 and second is None:
                second = runs.submit(joined(prompt(shared), prompt(30, seed=1)), max_tokens=5)
            if token is None:
                tiny_engine.release(generation.sequence)
        (record,) = (r for r in caches.ledger.records if r.prompt_tokens == shared + 30)
        assert (record.source, record.start) == ("running", shared if shared >= 290 else shared // 64 * 64)
        assert first.tokens == cold(tiny_engine, prompt(300), 9)[0]
        assert second.tokens == cold(tiny_engine, joined(prompt(shared), prompt(30, seed=1)))[0]


def test_at_level_grid_what_is_shared_is_exact(tiny_engine):
    """With impure steps: a prompt that goes on past another's end shares its last line, the same prompt all of it."""
    with impure_steps(tiny_engine, GRID) as engine:
        engine.caches = Caches(engine.pool, level=GRID)
        prompts = [prompt(150), prompt(150), joined(prompt(150), prompt(30, seed=1)), joined(prompt(130), prompt(40, seed=2))]
        records = ask(engine, [(tokens, {}) for tokens in prompts])
        assert [(r.source, r.start, r.exact) for r in records] == [
            ("cold", 0, True),
            ("running", 150, True),
            ("running", 128, True),
            ("running", 128, True),
        ]
        engine.caches.clear()


def test_a_short_common_head_is_not_waited_for(tiny_engine):
    """Less than a grid, where there is no anchor: requests that only begin alike read at once."""
    read = []
    with cached(tiny_engine):
        records = ask(tiny_engine, [(joined(prompt(50), tail), {"progress": lambda now: read.append(now.done)}) for tail in TAILS])
        assert [r.source for r in records] == ["cold"] * 4
    assert read[:4] == [0] * 4


def test_others_pass_one_that_waits_for_a_head(tiny_engine):
    with cached(tiny_engine):
        runs = Parallel(tiny_engine, 2)
        long, waits = runs.submit(prompt(400), max_tokens=1), runs.submit(joined(prompt(390), prompt(9, seed=1)), max_tokens=1)
        other = runs.submit(prompt(60, seed=2), max_tokens=1)
        ended = [generation for generation, token in runs if token is None]
        assert ended[0] is other
        assert set(ended[1:]) == {long, waits}
        assert waits.start == 384
        for generation in ended:
            tiny_engine.release(generation.sequence)


def test_tenants_share_nothing_while_they_run(tiny_engine):
    """F4: the same prompt of two tenants is read twice, and neither waits for the other; of the same tenant it is shared."""
    read = []
    with cached(tiny_engine):
        prompts = [(prompt(200), {"tenant": name, "progress": lambda now, name=name: read.append((name, now.done))}) for name in "abab"]
        records = ask(tiny_engine, prompts)
        assert [(r.tenant, r.source, r.start) for r in records] == [("a", "cold", 0), ("b", "cold", 0), ("a", "running", 200), ("b", "running", 200)]
    assert read.index(("b", 64)) < read.index(("a", 128)) < read.index(("b", 128)) < read.index(("a", 200))


def test_another_tenant_finds_nothing_of_what_runs(tiny_engine):
    with cached(tiny_engine) as caches:
        runs, others = Parallel(tiny_engine, 3), []
        first = runs.submit(prompt(200), max_tokens=9, tenant="a")
        for generation, token in runs:
            if len(first.tokens) == 2 and not others:
                others = [runs.submit(prompt(210), max_tokens=2, tenant=name) for name in "ba"]
            if token is None:
                tiny_engine.release(generation.sequence)
        found = {r.tenant: (r.source, r.start) for r in caches.ledger.records if r.prompt_tokens == 210}
        assert found == {"b": ("cold", 0), "a": ("running", 200)}


def test_a_line_whose_anchor_was_given_up_is_not_waited_for(tiny_engine):
    """The budget holds the newest anchors only: the head's is gone, so that the second reads it again, and at once."""
    with cached(tiny_engine, resident_gb=0) as caches:
        runs, second = Parallel(tiny_engine, 2), None
        first = runs.submit(prompt(440), max_tokens=8)
        for generation, token in runs:
            if len(first.tokens) == 2 and second is None:
                second = runs.submit(joined(prompt(64), prompt(30, seed=1)), max_tokens=2)
            if token is None:
                tiny_engine.release(generation.sequence)
        assert [(r.prompt_tokens, r.source) for r in caches.ledger.records] == [(94, "cold"), (440, "cold")]


def test_a_next_turn_does_not_wait_for_another_that_reads_its_beginning(tiny_engine):
    """Of the session the newest anchors are left: the other request reads the head again, and the next turn needs none of it."""
    with cached(tiny_engine, resident_gb=0):
        _, generated, _ = answer(tiny_engine, prompt(400))
        read = []
        branch = joined(prompt(200), prompt(150, seed=1)), {"progress": lambda now: read.append(now.done)}
        turn = followed(prompt(400), generated, prompt(20, seed=2)), {"progress": lambda now: read.append("turn")}
        records = ask(tiny_engine, [branch, turn])
        assert [(r.source, r.start) for r in records] == [("cold", 0), ("parked", 404)]
        assert read.index("turn") < read.index(64)


def test_an_anchor_is_served_from_the_pages_that_its_request_has_now(engine_256):
    """Another one goes on from it first and writes in its page; the request copies that page; and the page that it was taken over has
    become a third one's when a fourth request finds the anchor."""
    with cached(engine_256) as caches:
        first, third = prompt(140), prompt(64)
        one = engine_256.generate(first, max_tokens=2, history=64)
        steps = one.steps()
        assert [next(steps), next(steps)] == [None, None]  # it is about to read, then it has read 64 rows
        second = engine_256.generate(joined(prompt(64), prompt(20, seed=1)), max_tokens=2)
        list(second)
        assert (caches.ledger.records[0].source, caches.ledger.records[0].start) == ("running", 64)
        page = int(second.sequence.pages[0])
        next(steps)
        assert page not in caches.running.requests[0].slot.pages
        engine_256.release(second.sequence)
        caches.resident.clear()
        other, _ = engine_256.prefill(prompt(200, seed=2))
        assert page in other.pages
        fourth = engine_256.generate(joined(third, prompt(30, seed=3)), max_tokens=2)
        list(fourth)
        record = caches.ledger.records[-1]
        assert (record.source, record.start) == ("running", 64)
        assert_bits_equal(kept(engine_256.pool, fourth.sequence), cold(engine_256, joined(third, prompt(30, seed=3)), 2)[1])
        list(steps)
        assert_bits_equal(kept(engine_256.pool, one.sequence), cold(engine_256, first, 2)[1])
        for sequence in (other, fourth.sequence, one.sequence):
            engine_256.release(sequence)


def test_what_runs_is_counted(tiny_engine):
    """G2: requests, hits and the bytes of anchors while they run, and nothing of it afterwards."""
    with cached(tiny_engine) as caches:
        generation = tiny_engine.generate(prompt(200), max_tokens=3)
        for _ in generation:
            arrays = {id(a): a for anchor in caches.running.requests[0].anchors for a in anchor.arrays()}
            assert caches.stats()["running"] == {"requests": 1, "hits": 0, "anchor_bytes": sum(a.nbytes for a in arrays.values())}
            assert len(arrays) > 6
        tiny_engine.release(generation.sequence)
        assert caches.stats()["running"] == {"requests": 0, "hits": 0, "anchor_bytes": 0}


def test_what_runs_is_not_found_after_a_clear(tiny_engine):
    with cached(tiny_engine) as caches:
        runs, second = Parallel(tiny_engine, 2), None
        first = runs.submit(prompt(200), max_tokens=9)
        for generation, token in runs:
            if len(first.tokens) == 2 and second is None:
                caches.clear()
                second = runs.submit(prompt(210), max_tokens=2)
            if token is None:
                tiny_engine.release(generation.sequence)
        (record,) = (r for r in caches.ledger.records if r.prompt_tokens == 210)
        assert (record.source, record.start) == ("cold", 0)


def test_a_head_whose_reader_is_cancelled_is_read_by_the_next(tiny_engine):
    """A4: what it had read is kept, and the one that waited goes on there."""
    with cached(tiny_engine) as caches:
        runs = Parallel(tiny_engine, 2)
        first = runs.submit(prompt(300), max_tokens=2, progress=lambda now: now.done == 128 and runs.cancel(first))
        second = runs.submit(prompt(310), max_tokens=2)
        for generation, token in runs:
            if token is None:
                tiny_engine.release(generation.sequence)
        assert (first.finish, second.finish) == ("cancelled", "length")
        assert [(r.prompt_tokens, r.start) for r in caches.ledger.records] == [(300, 0), (310, 128)]
        assert second.tokens == cold(tiny_engine, prompt(310), 2)[0]


def test_a_head_whose_reader_fails_is_read_by_the_next(tiny_engine):
    with cached(tiny_engine) as caches:

        def broken(now):
            if now.done == 128:
                raise OSError("gone")

        runs = Parallel(tiny_engine, 2)
        first, second = runs.submit(prompt(300), max_tokens=2, progress=broken), runs.submit(prompt(310), max_tokens=2)
        assert {generation for generation, token in runs if token is None} == {first, second}
        assert isinstance(first.error, OSError)
        tiny_engine.release(second.sequence)
        assert second.tokens == cold(tiny_engine, prompt(310), 2)[0]
        assert caches.ledger.records[-1].prompt_tokens == 310


def test_c6_guests_beside_the_conversation_leave_it_alone(tiny_engine):
    """C6: title requests while the next turn runs: the turn goes on at its end, its rows and its place stay as they are."""
    with cached(tiny_engine) as caches:
        tokens = prompt(300)
        _, generated, _ = answer(tiny_engine, tokens)
        session = caches.resident.resident
        pages = session.pages[:4]
        before = {name: np.array(view[np.array(pages)]) for name, view in tiny_engine.pool.views.items()}
        turn = followed(tokens, generated, prompt(40, seed=9))
        records = ask(tiny_engine, [(turn, {}), (prompt(60, seed=5), {}), (prompt(50, seed=6), {})], 3)
        assert [(r.source, r.start) for r in records] == [("end", 304), ("cold", 0), ("cold", 0)]
        now = caches.resident.resident
        assert now.length == turn.size + 4
        assert sorted(s.role for s in caches.resident.sessions) == ["guest", "guest", "resident"]
        assert now.pages[:4] == pages
        for name, kept_rows in before.items():
            assert_bits_equal(np.array(tiny_engine.pool.views[name][np.array(pages)]), kept_rows)
