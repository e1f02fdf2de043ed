"""What goes from the session spill, and what is written because the pool has no room for it."""

import re
from contextlib import nullcontext

import numpy as np
import pytest

from qjax.caches.nvme.disk import Nvme
from qjax.caches.resident import ResidentPrefix
from tests.equivalence.nvme import GB, SESSIONS, Slow, assert_restored, joined, on_disk, recount, started
from tests.equivalence.nvme_damage import warnings
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt

pytestmark = pytest.mark.usefixtures("level")


def test_an_older_session_that_is_gone_on_with_goes(tiny_engine, memory_path):
    """Of one conversation the last state is kept, and of two that part both."""
    tokens = prompt(200)
    for turn in range(3):
        with started(tiny_engine, memory_path, **SESSIONS):
            _, generated, _ = answer(tiny_engine, tokens)
        tokens = followed(tokens, generated, prompt(30, seed=turn))
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        assert [s.length for s in caches.nvme.index.sessions.values()] == [272]
        answer(tiny_engine, joined(prompt(150), prompt(60, seed=7)))
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        assert sorted(s.length for s in caches.nvme.index.sessions.values()) == [214, 272]
        assert caches.resident.resident.length == 214
        recount(caches, memory_path)


def test_the_budget_keeps_the_last_used(tiny_engine, memory_path):
    """Two of three conversations fit: the one that was used longest ago goes whole, and the resident one is never the one."""
    with started(tiny_engine, memory_path / "one", **SESSIONS):
        answer(tiny_engine, prompt(300))
    one = sum(on_disk(memory_path / "one").values())
    budget = {"spill_gb": 2.5 * one / GB}
    with started(tiny_engine, memory_path, **SESSIONS, **budget):
        for seed in range(3):
            answer(tiny_engine, prompt(300, seed=seed))
    assert one < sum(on_disk(memory_path).values()) <= 2.5 * one
    with started(tiny_engine, memory_path, **SESSIONS, **budget) as caches:
        recount(caches, memory_path)
        assert np.array_equal(caches.resident.resident.keys[:300], prompt(300, seed=2))
        assert caches.nvme.find(prompt(320).astype(np.int64), "") is None
        assert caches.nvme.find(joined(prompt(300, seed=1), prompt(9)).astype(np.int64), "").start >= 256


def test_conversations_take_what_heads_leave(tiny_engine, memory_path):
    """Two of three fit both budgets together, where no heads are; they keep their room in an engine that writes none. With 0 none are."""
    with started(tiny_engine, memory_path / "one", **SESSIONS):
        answer(tiny_engine, prompt(300))
    one = sum(on_disk(memory_path / "one").values()) / GB
    config = {"disk_min_tokens": 4096, "disk_gb": 1.9 * one, "spill_gb": 0.6 * one}
    with started(tiny_engine, memory_path / "both", **config) as caches:
        for seed in range(3):
            answer(tiny_engine, prompt(300, seed=seed))
    for more in ({}, {"session_spill": False, "disk_gb": 0, "spill_gb": 2.5 * one}):
        with started(tiny_engine, memory_path / "both", **config | more) as caches:
            recount(caches, memory_path / "both")
            assert len(caches.nvme.index.sessions) == 2
            assert (caches.resident.resident is None) == bool(more)
    with started(tiny_engine, memory_path / "none", **config | {"spill_gb": 0}):
        answer(tiny_engine, prompt(300))
    assert on_disk(memory_path / "none") == {}


def test_a_session_that_is_larger_than_the_budget_is_not_begun(tiny_engine, memory_path, caplog):
    """What lies there stays and serves, nothing is written for what is too large, and one line says why. Control: one that fits."""
    budget = {"spill_gb": 9 * tiny_engine.layout.section_bytes / GB}
    with started(tiny_engine, memory_path, **SESSIONS, **budget):
        _, generated, _ = answer(tiny_engine, prompt(100, seed=1))
    before = on_disk(memory_path)
    assert before
    with started(tiny_engine, memory_path, **SESSIONS, **budget):
        for seed in (2, 3):
            answer(tiny_engine, prompt(400, seed=seed))
    assert {key for key in on_disk(memory_path) if key[0] != "s"} == {key for key in before if key[0] != "s"}  # the record says: no more resident
    (line,) = warnings(caplog)
    assert re.fullmatch(
        r"a conversation of 40\d tokens is not written: it takes 0\.\d MiB, and --disk-gb and --spill-gb allow 0\.\d MiB in all", line
    )
    with started(tiny_engine, memory_path, **SESSIONS, **budget) as caches:
        recount(caches, memory_path)
        assert_restored(tiny_engine, followed(prompt(100, seed=1), generated, prompt(9, seed=9)), "spill", 104)
        answer(tiny_engine, prompt(110, seed=4))
    assert on_disk(memory_path) != before


@pytest.mark.parametrize(("length", "written"), [(250, True), (120, False)])
def test_b8_a_long_session_is_written_before_it_is_evicted(tiny_engine, memory_path, length, written):
    """B8: the pool gives it up; a short one is not worth it."""
    tokens = prompt(length)
    with started(tiny_engine, memory_path, caches={"cache_budget_gb": 0, "resident_pin_gb": 0, "resident_guest_max": 0}, **SESSIONS) as caches:
        _, generated, _ = answer(tiny_engine, tokens)
        for seed in range(1, 5):
            answer(tiny_engine, prompt(300, seed=seed))
        caches.nvme.drain()
        found = [s for s in caches.nvme.index.sessions.values() if s.length == length + 4]
        assert bool(found) == written
        assert caches.resident.dropped["pool"] > 0
        following = followed(tokens, generated, prompt(20, seed=9))
        assert_restored(tiny_engine, following, *(("spill", length + 4) if written else ("cold", 0)))


def test_a_long_session_is_written_before_the_caches_budget_takes_it(tiny_engine, memory_path):
    """Its anchors have no room, though the pool has room for its pages."""
    small = {"caches_gb": 12 * tiny_engine.layout.section_bytes / GB, "cache_budget_gb": 0}
    with started(tiny_engine, memory_path, caches=small, **SESSIONS) as caches:
        _, generated, _ = answer(tiny_engine, prompt(300))
        for seed in (1, 2):
            answer(tiny_engine, prompt(300, seed=seed))
        assert caches.resident.dropped["budget"] > 0
        assert_restored(tiny_engine, followed(prompt(300), generated, prompt(20, seed=9)), "spill", 304)


def test_b10_an_evicted_session_is_found_before_it_is_written(tiny_engine, memory_path, monkeypatch):
    """B10: given up by the pool while the disk stands still."""
    with started(tiny_engine, memory_path, caches={"cache_budget_gb": 0, "resident_pin_gb": 0}, **SESSIONS) as caches:
        with Slow(monkeypatch):
            _, generated, _ = answer(tiny_engine, prompt(300))
            for seed in range(1, 4):
                answer(tiny_engine, prompt(300, seed=seed))
            assert caches.nvme.stats()["written"] == 0
            assert_restored(tiny_engine, followed(prompt(300), generated, prompt(20, seed=9)), "spill", 304)
        recount(caches, memory_path)


@pytest.mark.parametrize("held", [True, False])
def test_what_makes_room_for_a_hit_is_not_written_in_its_place(tiny_engine, memory_path, monkeypatch, held):
    """One conversation fits the budget: to bring it back another one is evicted, and would be written over it. Control: nobody holds the hit."""
    with started(tiny_engine, memory_path / "one", **SESSIONS):
        answer(tiny_engine, prompt(300))
    budget = {"spill_gb": 1.3 * sum(on_disk(memory_path / "one").values()) / GB}
    with started(tiny_engine, memory_path, caches={"cache_budget_gb": 0, "resident_pin_gb": 0}, **SESSIONS, **budget) as caches:
        _, generated, _ = answer(tiny_engine, prompt(300))
        for seed in range(1, 4):
            answer(tiny_engine, prompt(300, seed=seed))
        caches.nvme.drain()
        assert [s.length for s in caches.nvme.index.sessions.values()] == [304]
        make_room = ResidentPrefix.make_room
        monkeypatch.setattr(ResidentPrefix, "make_room", lambda *a: (make_room(*a), caches.nvme.drain())[0])  # a disk that is fast enough
        if not held:
            monkeypatch.setattr(Nvme, "held", lambda *_: nullcontext())
        following = followed(prompt(300), generated, prompt(20, seed=9))
        if held:
            assert_restored(tiny_engine, following, "spill", 304)
        else:
            record, *_ = answer(tiny_engine, following)
            assert record.start < 304


def test_a_session_whose_states_were_all_heads_of_the_disk_tiers_goes_with_them(tiny_engine, memory_path):
    """It ended on a line that the disk tier had written. A start with a smaller budget once failed over it."""
    with started(tiny_engine, memory_path):
        answer(tiny_engine, prompt(256), max_tokens=1)
    with started(tiny_engine, memory_path, disk_gb=0) as caches:
        recount(caches, memory_path)
        session = caches.resident.resident
        assert_restored(tiny_engine, joined(prompt(256), prompt(9)), *(("spill", 256) if session else ("cold", 0)))


def test_pages_that_the_disk_tier_gives_up_count_for_the_spill(tiny_engine, memory_path, level):
    """Of a head that a conversation goes on from."""
    for _ in range(2):
        with started(tiny_engine, memory_path) as caches:
            if caches.resident.resident is None:
                answer(tiny_engine, prompt(300))
            stats = caches.nvme.stats()
    with started(tiny_engine, memory_path, disk_gb=stats["disk_bytes"] / GB, spill_gb=stats["spill_bytes"] / GB) as caches:
        assert caches.nvme.room.make(stats["disk_bytes"])
        recount(caches, memory_path)
        assert caches.nvme.index.bytes() <= stats["spill_bytes"]
