"""Warm against cold over the session spill: conversations that a planned stop wrote to files are gone on with after a new start."""

import time

import pytest

from qjax.config import TOKEN
from tests.bits import assert_bits_equal
from tests.equivalence.nvme import SESSIONS, assert_restored, on_disk, recount, same_state, spoil, started
from tests.equivalence.test_resident import answer, cold, followed
from tests.models import prompt

pytestmark = pytest.mark.usefixtures("level")


@pytest.mark.parametrize("length", [64, 65, 123, 124, 125, 187, 188, 300])
def test_d1_d7_the_next_turn_after_a_restart_reads_its_new_tokens(tiny_engine, tmp_path, level, length):
    """D1, D7: a planned stop and a new start, with ends on a line and beside it; the conversation is in the pool before the first request."""
    tokens = prompt(length)
    with started(tiny_engine, tmp_path) as caches:
        _, generated, _ = answer(tiny_engine, tokens)
    with started(tiny_engine, tmp_path) as caches:
        session = caches.resident.resident
        assert (session.length, session.role, session.turns, session.history) == (length + 4, "resident", 1, length)
        assert tiny_engine.pool.free == tiny_engine.pool.pages - -(-session.length // 64)
        record, _ = assert_restored(tiny_engine, followed(tokens, generated, prompt(20, seed=9)), "spill", length + 4)
        assert (record.read_again, record.why, record.exact) == (0, "none", level == TOKEN)
        recount(caches, tmp_path)


@pytest.mark.parametrize("length", [300, 512, 700])
def test_pages_of_several_blocks(engine_256, tmp_path, length):
    tokens = prompt(length)
    with started(engine_256, tmp_path):
        _, generated, _ = answer(engine_256, tokens)
    with started(engine_256, tmp_path):
        assert_restored(engine_256, followed(tokens, generated, prompt(20, seed=9)), "spill", length + 4)


def test_only_short_conversations_are_not_written(tiny_engine, tmp_path):
    with started(tiny_engine, tmp_path) as caches:
        answer(tiny_engine, prompt(58))
        assert [s.length for s in caches.resident.sessions] == [62]
    assert on_disk(tmp_path) == {}


def test_a1_what_was_read_back_is_gone_on_with_twice(tiny_engine, tmp_path):
    """A1: turn after turn, each of a new start and run twice there, equals cold."""
    tokens = prompt(200)
    for turn in range(4):
        with started(tiny_engine, tmp_path, **SESSIONS) as caches:
            _, generated = assert_restored(tiny_engine, tokens, *(("spill", tokens.size - 20) if turn else ("cold", 0)))
            assert assert_restored(tiny_engine, tokens, "prompt", tokens.size)[1] == generated
            tokens = followed(tokens, generated, prompt(20, seed=5 + turn))
            recount(caches, tmp_path)


def test_a_guest_is_written_too(tiny_engine, tmp_path):
    """The newest conversation is a guest where a longer one is the resident one."""
    with started(tiny_engine, tmp_path, **SESSIONS) as caches:
        answer(tiny_engine, prompt(400))
        _, generated, _ = answer(tiny_engine, prompt(80, seed=1))
        assert sorted(s.role for s in caches.resident.sessions) == ["guest", "resident"]
    with started(tiny_engine, tmp_path, **SESSIONS):
        assert_restored(tiny_engine, followed(prompt(80, seed=1), generated, prompt(20, seed=9)), "spill", 84)


def test_a_conversation_was_used_when_it_was_used_and_not_when_it_was_written(tiny_engine, tmp_path, monkeypatch):
    """Three of one size, and room for two: the one that nobody asked for goes, whichever is written last."""
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with started(tiny_engine, tmp_path, **SESSIONS) as caches:
        for seed, pause in enumerate((0.0, 5000.0, 1.0)):
            clock[0] += pause
            answer(tiny_engine, prompt(200, seed=seed))
        assert len(caches.resident.sessions) == 3
    with started(tiny_engine, tmp_path, **SESSIONS) as caches:
        found = sorted(caches.nvme.index.sessions.values(), key=lambda s: s.used)
        assert [round(found[-1].used - s.used) for s in found] == [5001, 1, 0]
        assert found[-1].resident
        size = caches.nvme.index.bytes()
        caches.nvme.index.evict(None, size - 1)
        assert found[0].key not in caches.nvme.index.sessions


def test_a_start_without_a_request_changes_nothing(tiny_engine, tmp_path):
    """What it has read back is not written again: else regular restarts would keep it for ever."""
    with started(tiny_engine, tmp_path, **SESSIONS):
        answer(tiny_engine, prompt(300))
    there = {}
    for turn in range(3):
        with started(tiny_engine, tmp_path, **SESSIONS) as caches:
            found = {s.key: (s.used, s.turns, s.resident) for s in caches.nvme.index.sessions.values()}
            assert caches.resident.resident.length == 304
        assert turn == 0 or found == there
        there = found
    assert len(there) == 1


def test_the_parked_ones_are_found(tiny_engine, tmp_path):
    """Two conversations: the last one is read back, the other stays in its files until somebody asks."""
    sessions = {}
    with started(tiny_engine, tmp_path, **SESSIONS) as caches:
        for seed in range(3):
            _, sessions[seed], _ = answer(tiny_engine, prompt(200, seed=seed))
        assert [s.role for s in caches.resident.sessions] == ["parked", "parked", "resident"]
    with started(tiny_engine, tmp_path, **SESSIONS) as caches:
        assert [(s.role, s.length) for s in caches.resident.sessions] == [("resident", 204)]
        for seed in (0, 2, 1):
            assert_restored(tiny_engine, followed(prompt(200, seed=seed), sessions[seed], prompt(20, seed=9)), "spill", 204)
        assert caches.nvme.stats()["spill_hits"] == 2  # of the files; one was in the pool


@pytest.mark.parametrize("length", [256, 300])
def test_d2_the_same_prompt_again_needs_no_forward(tiny_engine, tmp_path, monkeypatch, length):
    """D2: with its logits, also where a longer prompt had written its line without them; and a prompt that ends where the answer did."""
    tokens = prompt(length)
    with started(tiny_engine, tmp_path):
        answer(tiny_engine, prompt(400), user=380)
        _, generated, _ = answer(tiny_engine, tokens)
    with started(tiny_engine, tmp_path):
        for again in (tokens, followed(tokens, generated, tokens[:0])):
            monkeypatch.setattr(tiny_engine.forward, "chunk", None)
            monkeypatch.setattr(tiny_engine.forward, "step", None)
            record, *warm = answer(tiny_engine, again, max_tokens=1)
            monkeypatch.undo()
            assert (record.source, record.start) == ("spill", again.size)
            expected = cold(tiny_engine, again, max_tokens=1)
            assert warm[0] == expected[0]
            assert_bits_equal(warm[1], expected[1])


def test_several_tenants_who_said_the_same(tiny_engine, tmp_path):
    """Each has its own conversation, also where a session's files are named by their content; a third one has none."""
    tokens = prompt(200)
    with started(tiny_engine, tmp_path) as caches:
        for tenant in "ab":
            _, generated, _ = answer(tiny_engine, tokens, tenant=tenant)
    following = followed(tokens, generated, prompt(20, seed=9))
    with started(tiny_engine, tmp_path) as caches:
        assert sorted(s.tenant for s in caches.nvme.index.sessions.values()) == ["a", "b"]
        assert caches.resident.resident.tenant == "b"
        for tenant in "ab":
            assert_restored(tiny_engine, following, "spill", 204, tenant=tenant)
        assert_restored(tiny_engine, following, "cold", 0, tenant="c")
        assert caches.nvme.stats()["damaged"] == 0


@pytest.mark.parametrize("part", ["gdn.S", "gdn.conv", "K", "V"])
def test_control_a_part_that_comes_back_wrong_changes_the_state(tiny_engine, tmp_path, monkeypatch, part):
    """One section, or one view's rows, zeroed while a parked session is restored."""
    tokens = prompt(300)
    with started(tiny_engine, tmp_path, **SESSIONS):
        _, generated, _ = answer(tiny_engine, tokens)
        answer(tiny_engine, prompt(200, seed=1))
    following = followed(tokens, generated, prompt(20, seed=9))
    with started(tiny_engine, tmp_path, **SESSIONS):
        expected = cold(tiny_engine, following)[1]
        spoil(monkeypatch, tiny_engine, part)
        record, _, state = answer(tiny_engine, following)
        assert (record.source, record.start) == ("spill", 304)
        new = [{view: rows[:, :, 304:] for view, rows in one["rows"].items()} for one in (state, expected)]
        assert not same_state(*new)


@pytest.mark.parametrize("view", ["K", "V"])
def test_control_a_page_that_is_read_back_wrong_changes_the_state(tiny_engine, tmp_path, monkeypatch, view):
    """Of the resident session, before the first request."""
    tokens = prompt(300)
    with started(tiny_engine, tmp_path, **SESSIONS):
        _, generated, _ = answer(tiny_engine, tokens)
    spoil(monkeypatch, tiny_engine, view)
    following = followed(tokens, generated, prompt(20, seed=9))
    with started(tiny_engine, tmp_path, **SESSIONS):
        record, _, state = answer(tiny_engine, following)
        assert (record.source, record.start) == ("spill", 304)
        assert not same_state(state["rows"], cold(tiny_engine, following)[1]["rows"])
