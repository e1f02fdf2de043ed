"""Between the pool and the files: staging is bounded, holds nobody up, is served from, and keeps what it was given."""

import threading

import numpy as np
import pytest

from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import ANCHOR, PAGE
from storage import Storage, StorageError
from tests.equivalence.nvme import GB, HEADS, Slow, assert_restored, lengths, recount, same_state, spoil, started
from tests.equivalence.test_resident import answer, cold, followed
from tests.models import prompt

pytestmark = pytest.mark.usefixtures("level")


def watched(engine, tokens, caches, **request):
    """Runs a request; the most bytes that were staged at any of its tokens."""
    most = []
    for _ in (generation := engine.generate(tokens, max_tokens=5, **request)):
        most.append(caches.nvme._writer.staged)
    engine.release(generation.sequence)
    return max(most)


def test_a_slow_disk_holds_nobody_up(tiny_engine, memory_path, monkeypatch):
    """Not one put returns while six prompts are answered: the staged bytes stay below the limit, what has no room is dropped and counted."""
    room = 4 * tiny_engine.layout.page_bytes
    with started(tiny_engine, memory_path, staging_gb=room / GB, **HEADS) as caches, Slow(monkeypatch) as slow:
        for seed in range(6):
            assert 0 < watched(tiny_engine, prompt(300, seed=seed), caches) <= room
        assert slow.keys
        assert caches.nvme.stats()["dropped_no_room"] > 0
        slow.go()
        recount(caches, memory_path)
        caches.clear()
        found = [caches.nvme.find(prompt(300, seed=seed).astype(np.int64), "") for seed in range(6)]
        assert any(found)
        assert not all(found)
        for seed, hit in enumerate(found):
            if hit:
                assert_restored(tiny_engine, prompt(300, seed=seed), "disk", hit.start)


def test_the_book_is_staged_within_the_limit_too(tiny_engine, memory_path, monkeypatch):
    """One waits at the most, however many requests end; what they counted is there after a restart."""
    with started(tiny_engine, memory_path, **HEADS) as caches, Slow(monkeypatch, ("b-",)) as slow:
        for seed in range(8):
            answer(tiny_engine, prompt(100, seed=seed), user=0)
        assert len(slow.keys) == 1
        assert caches.nvme._writer.staged <= 24 * 8
    with started(tiny_engine, memory_path, **HEADS) as caches:
        for seed in range(8):
            answer(tiny_engine, prompt(100, seed=seed), user=0)
        assert lengths(caches) == [64] * 8


def test_nothing_is_written_where_nothing_has_changed(tiny_engine, memory_path, monkeypatch):
    """A conversation in memory counts no line: not a book for each of its turns."""
    with started(tiny_engine, memory_path, **HEADS) as caches:
        tokens = prompt(130)
        _, generated, _ = answer(tiny_engine, tokens)
        caches.nvme.drain()
        before = caches.nvme.stats()["written"]
        for _ in range(4):
            tokens = followed(tokens, generated, prompt(3))
            _, generated, _ = answer(tiny_engine, tokens, max_tokens=2)
        caches.nvme.drain()
        assert caches.nvme.stats()["written"] == before


@pytest.mark.parametrize("which", [PAGE, ANCHOR])
def test_b10_what_is_not_written_yet_is_served(tiny_engine, memory_path, monkeypatch, which):
    """B10: given up from memory while its pages, or its anchors, wait for the disk."""
    tokens = prompt(300)
    with started(tiny_engine, memory_path, **HEADS) as caches:
        with Slow(monkeypatch, (which,)) as slow:
            answer(tiny_engine, tokens)
            caches.clear()
            assert tiny_engine.pool.free == tiny_engine.pool.pages
            assert_restored(tiny_engine, tokens, "disk", 256)
            assert caches.nvme.stats()["anchors"] == 0
        recount(caches, memory_path)
        assert slow.keys
        caches.clear()
        assert_restored(tiny_engine, tokens, "disk", 256)
        assert [a.hits for a in caches.nvme.index.anchors.values() if a.length == 256] == [2]


def test_b10_control_a_pending_write_that_is_wrong_is_seen(tiny_engine, memory_path, monkeypatch):
    tokens = prompt(300)
    with started(tiny_engine, memory_path, **HEADS) as caches, Slow(monkeypatch):
        answer(tiny_engine, tokens)
        caches.clear()
        spoil(monkeypatch, tiny_engine, "gdn.S")
        record, _, state = answer(tiny_engine, tokens)
        assert record.source == "disk"
        assert not same_state(state, cold(tiny_engine, tokens)[1])


@pytest.mark.parametrize("before", [True, False])
def test_b10_a_pending_write_that_fails_is_no_hit_any_more(tiny_engine, memory_path, monkeypatch, before):
    """The first page cannot be written, while the others still wait, before or after the anchor over them was handed over: that is not found."""
    first, failed, put = Chain(prompt(300).astype(np.int64), "", 64).page(0, 300), threading.Event(), Storage.put

    def failing(storage, key, arrays, /, **fields):
        if key == first:
            raise StorageError("no such disk")
        return put(storage, key, arrays, **fields)

    monkeypatch.setattr(Storage, "put", failing)
    with started(tiny_engine, memory_path, admit_after=1, **HEADS) as caches:
        drop_over = caches.nvme.index.drop_over
        caches.nvme.index.drop_over = lambda *page: (drop_over(*page), failed.set())
        if before:
            anchor = caches.nvme._staging.anchor
            caches.nvme._staging.anchor = lambda *a, **more: failed.wait(60) and anchor(*a, **more)
        with Slow(monkeypatch, tuple(f"p-{digit:x}" for digit in range(16) if f"p-{digit:x}" != first[:3])):
            answer(tiny_engine, prompt(300), user=0)
            assert failed.wait(60)
            caches.clear()
            assert_restored(tiny_engine, prompt(300), "cold", 0, user=0)
        recount(caches, memory_path)
        assert caches.nvme.stats()["damaged"] == 0


def test_a17_the_file_has_the_rows_at_the_hand_off(tiny_engine, memory_path, monkeypatch):
    """A17: every page of the pool is overwritten while the writer has not begun."""
    tokens = prompt(300)
    with started(tiny_engine, memory_path, **HEADS) as caches, Slow(monkeypatch) as slow:
        answer(tiny_engine, tokens)
        assert caches.nvme.stats()["waiting"] == 0
        caches.clear()
        pool = tiny_engine.pool
        for page in range(pool.pages):
            pool.write_page(page, {name: np.full_like(np.asarray(rows), 9) for name, rows in pool.read_page(page).items()}, 64)
        slow.go()
        assert lengths(caches) == [64, 128, 192, 256]
    with started(tiny_engine, memory_path, **HEADS):
        assert_restored(tiny_engine, tokens, "disk", 256)
