"""The third limit: all that the caches hold outside the page pool, at every moment; and what is given back only moves a start."""

from itertools import zip_longest

import numpy as np
import pytest

from qjax.caches.anchors import live_bytes, newest
from qjax.caches.lookup import Request
from qjax.config import GRID, TOKEN, CacheConfig
from qjax.pages import PagePool
from tests.equivalence.test_resident import GB, answer, assert_warm_is_cold, cached, followed
from tests.models import prompt


@pytest.fixture(params=[TOKEN, GRID])
def engine(request, tiny_engine, monkeypatch):
    monkeypatch.setattr(tiny_engine, "level", request.param)
    return tiny_engine


def most(engine) -> int:
    """Bytes of one request's anchors at the most: what the gate asks for."""
    with cached(engine) as caches:
        return caches.anchor_bytes(448)


def live(caches) -> int:
    """Bytes of anchors, snapshots and answers, added up here."""
    sessions, requests = caches.resident.sessions, caches.running.requests
    held = sum(live_bytes(a for one in some for a in one.anchors) for some in (sessions, requests))
    for e in caches.store._entries:
        arrays = [e.keys, e.tokens, *e.sections.values(), *e.open.values(), *e.rows.values(), *([] if e.logits is None else [e.logits])]
        held += sum(a.nbytes for a in arrays)
    return held + sum(size for _, size in caches.responses._entries.values())


@pytest.mark.parametrize("room", [1.0, 1.5, 3.0, 8.0])
def test_the_limit_holds_at_every_moment(engine, monkeypatch, room):
    """Twelve sessions in turn with guests in between; the control below has no limit and goes beyond it."""
    limit = int(room * most(engine))
    peaks, add, keep = [], Request.add, PagePool.copy_out

    def added(self, *arguments):
        add(self, *arguments)
        peaks.append(live(self.caches))
        assert self.caches.budget.held == peaks[-1]

    def copied(self, pages, length):
        rows = keep(self, pages, length)
        peaks.append(live(caches) + sum(a.nbytes for a in rows.values()))
        return rows

    monkeypatch.setattr(Request, "add", added)
    monkeypatch.setattr(PagePool, "copy_out", copied)
    for gb in (limit / GB, None):
        peaks.clear()
        with cached(engine, caches_gb=gb) as caches:
            for seed in range(12):
                tokens = prompt(300 + 10 * seed, seed=seed % 5)
                _, generated, _ = answer(engine, tokens)
                answer(engine, prompt(40, seed=50 + seed))
                answer(engine, followed(tokens, generated, prompt(30, seed=seed + 20)))
            counted = caches.stats()["budget"]
            assert counted["bytes"] == caches.budget.held
            if gb is not None:
                assert max(peaks) <= limit, f"{max(peaks):,} of {limit:,} bytes"
                assert counted["given_back"] > 0 or room > 3
            else:
                assert max(peaks) > limit or room > 3


def test_the_limit_holds_while_two_run(engine, monkeypatch):
    """Both begin before either reads: what the first may still take is not the second's. Control: without a limit they take more."""
    limit, add, peaks = int(1.4 * most(engine)), Request.add, []
    monkeypatch.setattr(Request, "add", lambda self, *arguments: add(self, *arguments) or peaks.append(live(self.caches)))
    for gb in (limit / GB, None):
        peaks.clear()
        with cached(engine, caches_gb=gb):
            runs = [engine.generate(prompt(440, seed=seed), max_tokens=5) for seed in (1, 2)]
            for _ in zip_longest(*(run.steps() for run in runs)):
                pass
            for run in runs:
                engine.release(run.sequence)
        assert (max(peaks) <= limit) == (gb is not None)


def test_what_is_given_back_only_moves_a_start(engine):
    """Of two sessions only one fits: the other's turn is cold or from its own, and every bit is a cold run's."""
    with cached(engine, caches_gb=1.2 * most(engine) / GB) as caches:
        for seed in (1, 2, 1, 2):
            answer(engine, prompt(300, seed=seed))
        assert caches.resident.dropped["budget"] > 0
        assert_warm_is_cold(engine, prompt(300, seed=2), "prompt", 300)
        record, *_ = answer(engine, prompt(310, seed=1))
        assert (record.start, record.why) == (0, "evicted")


def test_nothing_but_the_newest_anchors_stays_without_a_limit_to_speak_of(engine):
    """caches_gb 0: the newest anchors of the one resident session stay, as at every budget, and the next turn finds them."""
    with cached(engine, caches_gb=0) as caches:
        tokens = prompt(300)
        answer(engine, prompt(440, seed=3))
        _, generated, _ = answer(engine, tokens)
        assert [s.role for s in caches.resident.sessions] == ["resident"]
        (session,) = caches.resident.sessions
        assert_warm_is_cold(engine, followed(tokens, generated, prompt(20, seed=9)), "end", 304)
        assert len(session.anchors) == 0  # superseded by the next turn's
        (session,) = caches.resident.sessions
        caches.budget.before_prefill(0)
        assert session.anchors == newest(session.anchors)
        assert caches.store.stats()["entries"] == 0


def test_a_snapshot_that_does_not_fit_beside_the_others_is_not_copied(engine, monkeypatch):
    """Room is made before a byte is copied, and by the store alone, while a session goes."""
    with cached(engine) as caches:
        answer(engine, prompt(440, seed=1))
        held = caches.budget.held
    copies, copy_out = [], PagePool.copy_out
    monkeypatch.setattr(PagePool, "copy_out", lambda *arguments: copies.append(1) or copy_out(*arguments))
    for limit in (held / 4, GB):
        with cached(engine, resident_park_gb=0, resident_pin_gb=0, caches_gb=limit / GB) as caches:
            answer(engine, prompt(440, seed=1))
            answer(engine, prompt(440, seed=2))
            assert (caches.store.stats()["entries"] > 0) == bool(copies) == (limit == GB)


def test_the_default_is_half_of_the_memory():
    assert 0 < CacheConfig().together < 2**50
    assert CacheConfig(caches_gb=2).together == 2 * GB
    assert np.isclose(CacheConfig(caches_gb=0.5).together, GB / 2)
