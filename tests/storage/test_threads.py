"""Threads: one writes while another reads. And processes that fork."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from storage import Storage, StorageError
from storage.directory import Directory
from tests.storage.children import run
from tests.storage.content import FINGERPRINT, content, key, names, reads


def test_reads_while_another_thread_writes_and_drops(opened, root):
    """Every entry that the writer has told of holds its bits, or is not there where it was dropped meanwhile; none is called damaged."""
    store, told, dropped, done = opened(), [], set(), threading.Event()

    def write():
        try:
            for i in range(60):
                store.put(key(i), content(i), number=i)
                told.append(i)
                if i % 3 == 2:
                    dropped.add(i - 2)
                    assert store.drop(key(i - 2))
        finally:
            done.set()

    seen = 0
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not done.is_set():
            for i in list(told)[-5:]:
                there = reads(store, i)
                assert there or i in dropped
                seen += there
        writer.result()
    assert seen > 0
    assert [i for i in range(60) if reads(store, i)] == [i for i in range(60) if i not in dropped]
    assert names(root) == set(store.entries())
    assert store.stats()["damaged"] == {}  # a read that a drop overtook is none


def test_a_write_under_way_holds_no_read_and_is_not_there_yet(opened, root, monkeypatch):
    """The write stands still before its `meta`: another entry is read and a third one written, and closing waits for it."""
    reached, go, closed = threading.Event(), threading.Event(), threading.Event()
    written, close = Directory.written, Directory.close

    def slow(directory, wanted, arrays):
        if wanted == key(1):
            reached.set()
            assert go.wait(60)
        written(directory, wanted, arrays)

    def closes(directory):
        close(directory)
        closed.set()

    monkeypatch.setattr(Directory, "written", slow)
    monkeypatch.setattr(Directory, "close", closes)
    store = opened()
    store.put(key(0), content(0))
    with ThreadPoolExecutor(3) as pool:
        writer = pool.submit(store.put, key(1), content(1))
        assert reached.wait(60)
        assert (reads(store, 0), reads(store, 1), store.find(key(1))) == (True, False, None)
        store.put(key(2), content(2))
        assert reads(store, 2)
        assert not store.drop(key(1))  # nothing is there to be dropped
        again = pool.submit(store.put, key(1), content(1))
        closing = pool.submit(store.close)
        assert not closed.wait(0.2)
        go.set()
        assert writer.result().key == key(1)
        assert again.exception() is None or isinstance(again.exception(), StorageError)  # whichever came first, it or the close
        closing.result()
    assert names(root) == {key(0), key(1), key(2)}
    with opened() as store:
        assert all(reads(store, i) for i in range(3))


def test_an_entry_that_is_touched_is_there_all_the_time(opened):
    store, done = opened(), threading.Event()
    store.put("k", {"one": np.ones(1)})

    def touch():
        while not done.is_set():
            store.touch("k")

    with ThreadPoolExecutor(1) as pool:
        toucher = pool.submit(touch)
        there = [store.find("k") is not None for _ in range(20000)]
        done.set()
        toucher.result()
    assert all(there)


def test_threads_that_put_one_key_write_it_once(opened):
    store = opened()
    with ThreadPoolExecutor(4) as pool:
        entries = list(pool.map(lambda _: store.put(key(1), content(1)), range(8)))
    assert len({id(entry) for entry in entries}) == 1
    assert store.stats()["put"] == 1
    assert reads(store, 1)


def test_threads_that_read_a_damaged_entry_say_so_once(opened, root, caplog):
    store = opened()
    store.put(key(1), content(1))
    for path in (root / store.fingerprint.digest / key(1) / "S").iterdir():
        path.write_bytes(b"x")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: reads(store, 1), range(8))) == [False] * 8
    assert names(root) == set(store.entries()) == set()
    assert (store.stats()["damaged"], len(caplog.records)) == ({"size": 1}, 1)
    store.put(key(1), content(1))
    assert reads(store, 1)


FORKED = """
import os, sys
from storage import Storage, StorageError
from tests.storage.content import *
store = Storage.open(sys.argv[1], FINGERPRINT)
store.put(key(1), content(1))
child = os.fork()
if child == 0:
    for act in (lambda: store.put(key(2), content(2)), lambda: reads(store, 1), lambda: store.drop(key(1)), lambda: store.find(key(1))):
        try:
            act()
            os._exit(1)
        except StorageError as error:
            if "a child by os.fork() must not use it" not in str(error):
                os._exit(2)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert reads(store, 1)
store.put(key(2), content(2))
assert reads(store, 2)
print("both")
"""


def test_a_forked_child_is_told_in_words(root):
    """TensorStore alone would abort it. The parent goes on."""
    assert run(FORKED, root) == "both\n"
    with Storage.open(root, FINGERPRINT) as store:
        assert all(reads(store, i) for i in (1, 2))


def test_an_error_inside_the_context_lets_the_next_one_in(root):
    def fails() -> None:
        with Storage.open(root, FINGERPRINT) as store:
            store.put(key(1), content(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    with Storage.open(root, FINGERPRINT) as store:
        assert reads(store, 1)
