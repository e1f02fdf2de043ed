"""The writer: what waits is bounded, found and written in an order in which nothing stands on what is not there."""

import threading

import numpy as np
import pytest

from qjax.caches.nvme.writer import THREADS, Writer
from storage import Entry, StorageError

TEN = {"a": np.zeros(10, np.uint8)}


class Store:
    """A storage in memory: puts wait for `go`, where they are to; those of `broken` fail."""

    def __init__(self):
        self.there: dict[str, Entry] = {}
        self.order: list[str] = []
        self.go, self.broken, self.began = threading.Event(), set(), threading.Semaphore(0)
        self.go.set()

    def find(self, key):
        return self.there.get(key)

    def put(self, key, arrays, /, **fields):
        self.began.release()
        assert self.go.wait(60)
        if key in self.broken:
            raise StorageError(f"{key} cannot be written")
        self.order.append(key)
        entry = self.there[key] = Entry(key, {}, {**fields, "arrays": arrays}, 0.0, 0.0)
        return entry


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def writer(store):
    """Room for 50 bytes."""
    writer = Writer(store, 50, lambda nbytes: True)
    yield writer
    store.go.set()
    writer.close()


def test_an_entry_is_written_and_its_owner_told(store, writer):
    told = []
    writer.put("x", TEN, {"rows": 3}, done=told.append)
    writer.drain()
    assert told == [store.there["x"]]
    assert store.there["x"].fields["rows"] == 3
    assert writer.stats() == {"staged_bytes": 0, "written": 1, "written_bytes": 10, "skipped": 0, "failed": 0}


def test_what_waits_is_bounded_and_found(store, writer):
    store.go.clear()
    for name in "abcde":
        assert writer.has_room(10)
        writer.put(name, TEN, {})
    assert not writer.has_room(1)
    assert not writer.has_room(1, seconds=0.01)
    assert writer.staged == 50
    assert writer.pending("c") is TEN
    store.go.set()
    assert writer.has_room(10, seconds=60)
    writer.drain()
    assert (writer.staged, writer.pending("c"), sorted(store.order)) == (0, None, list("abcde"))


def test_more_than_there_is_room_for_may_wait_alone(store, writer):
    assert writer.has_room(1000)
    store.go.clear()
    writer.put("a", TEN, {})
    assert not writer.has_room(1000)


def test_an_entry_waits_for_those_that_it_stands_on(store, writer):
    store.go.clear()
    writer.put("p", TEN, {})
    writer.put("q", TEN, {})
    writer.put("a", TEN, {}, after=["p", "q"])
    for _ in range(THREADS):
        store.began.acquire()
    assert not store.began.acquire(timeout=0.05)
    store.go.set()
    writer.drain()
    assert store.order[-1] == "a"


@pytest.mark.parametrize("why", ["broken", "missing", "no room"])
def test_what_an_entry_stands_on_is_not_there(store, why, caplog):
    """It is not written, its owner is told, and one line is logged of what failed; what stands on it in turn is not written either."""
    writer = Writer(store, 50, lambda nbytes: why != "no room" or nbytes != 11)
    told = []
    store.broken = {"p"} if why == "broken" else set()
    if why != "missing":
        writer.put("p", {"a": np.zeros(11, np.uint8)}, {}, done=told.append)
    writer.put("a", TEN, {}, after=["p"], done=told.append)
    writer.put("s", {}, {}, after=["a"], done=told.append)
    writer.put("x", TEN, {}, done=told.append)
    writer.close()
    assert store.order == ["x"]
    assert [entry.key for entry in told if entry] == ["x"]
    assert len(told) == (3 if why == "missing" else 4)
    assert (writer.counts["failed"], writer.counts["skipped"]) == {"broken": (1, 2), "missing": (0, 2), "no room": (0, 3)}[why]
    assert [r.message.split(" ")[0] for r in caplog.records if r.levelname == "WARNING"] == (["p"] if why == "broken" else [])


def test_an_owner_who_cannot_use_it_is_no_end_of_the_writer(store, writer, caplog):
    def refuses(entry):
        raise ValueError("a page is gone")

    writer.put("a", TEN, {}, done=refuses)
    writer.drain()
    writer.put("b", TEN, {})
    writer.drain()
    assert store.order == ["a", "b"]
    assert "a was written and is not used: a page is gone" in caplog.text


def test_room_that_was_given_to_one_thread_is_not_given_to_another(store):
    """Two entries at once where one fits: one is written, though neither is there yet when the other asks."""
    asked, held, most = [], [0], 15

    def make_room(nbytes):
        asked.append(nbytes)
        return held[0] + nbytes <= most

    def told(entry):
        held[0] += 10 * (entry is not None)

    writer = Writer(store, 50, make_room)
    store.go.clear()
    for name in "ab":
        writer.put(name, TEN, {}, done=told)
    store.began.acquire()
    assert not store.began.acquire(timeout=0.05)
    store.go.set()
    writer.drain()
    assert (asked, len(store.order), held) == ([10, 20], 1, [10])
    writer.put("c", {"a": TEN["a"][:5]}, {})  # what was written is counted once
    writer.close()
    assert (asked[2:], len(store.order)) == ([5], 2)


def test_the_bytes_of_jax_arrays_are_fetched_by_the_thread(store, writer):
    import jax

    rows = jax.numpy.arange(12, dtype=np.uint16).reshape(3, 4)
    writer.put("a", {"rows": rows}, {})
    writer.drain()
    found = store.there["a"].fields["arrays"]["rows"]
    assert type(found) is np.ndarray
    assert np.array_equal(found, np.arange(12, dtype=np.uint16).reshape(3, 4))
