"""Ctrl-C around the tier on NVMe, and what is written while other things go: nothing is held, and nothing is lost."""

import os
import shutil
import signal
import sys
import threading
import time

import numpy as np
import pytest

from qjax.caches.nvme.staging import Staging
from qjax.pages import PagePool
from storage import Storage
from tests.equivalence.nvme import Slow, recount, started
from tests.equivalence.nvme_damage import assert_cold, keys, line_keys, warnings, write_heads
from tests.equivalence.test_nvme_faults import ASKED, HEAD, NOTHING_WRITTEN
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt


@pytest.fixture(scope="module")
def heads(tiny_engine, tmp_path_factory):
    return write_heads(tiny_engine, tmp_path_factory.mktemp("heads"), HEAD)


@pytest.fixture
def directory(heads, tmp_path):
    return shutil.copytree(heads, tmp_path / "states")


def interrupting(monkeypatch, where: type, method: str, at: int) -> None:
    """Ctrl-C comes while a method is called for the so-manieth time."""
    function, left = getattr(where, method), [at]

    def interrupted(*arguments, **named):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments, **named)

    monkeypatch.setattr(where, method, interrupted)


@pytest.fixture
def ctrl_c(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda *what: interrupting(monkeypatch, *what)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", [1, 3])
def test_ctrl_c_in_a_restore(tiny_engine, directory, caplog, ctrl_c, at):
    """While the first page comes in, and while a later one does: nothing is held, nothing is lost, and the next try is served."""
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        ctrl_c(PagePool, "write_page", at)
        with pytest.raises(KeyboardInterrupt):
            answer(tiny_engine, ASKED)
        assert caches.ledger.records[-1].finish == "failed"
        assert tiny_engine.pool.free == tiny_engine.pool.pages
        assert not caches.nvme.index._in_use
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start, warnings(caplog)) == ("disk", 256, [])


@pytest.mark.parametrize(("method", "at"), [("page", 1), ("page", 3), ("anchor", 1), ("anchor", 2)])
def test_ctrl_c_while_something_is_staged(tiny_engine, tmp_path, caplog, ctrl_c, method, at):
    """In the middle of an offer: it ends the answer, and not what is on its way to the files."""
    with started(tiny_engine, tmp_path, session_spill=False) as caches:
        ctrl_c(Staging, method, at)
        run = tiny_engine.generate(HEAD, max_tokens=5, user=HEAD.size)
        with pytest.raises(KeyboardInterrupt):
            list(run)
        tiny_engine.release(run.sequence)
        recount(caches, tmp_path)
        caches.clear()
        assert tiny_engine.pool.free == tiny_engine.pool.pages
        assert (assert_cold(tiny_engine, ASKED).start, warnings(caplog)) == (256, [])
    with started(tiny_engine, tmp_path, **NOTHING_WRITTEN) as caches:
        assert assert_cold(tiny_engine, ASKED).start == 256


@pytest.mark.parametrize(("method", "at"), [("page", 1), ("page", 4), ("anchor", 1), ("session", 1)])
def test_ctrl_c_in_a_planned_stop(tiny_engine, tmp_path, caplog, ctrl_c, method, at):
    """It ends the stop at once. Of the conversation all is there or nothing; the directory is free for the next engine."""
    context = started(tiny_engine, tmp_path, disk_gb=0)
    context.__enter__()
    _, generated, _ = answer(tiny_engine, HEAD)
    ctrl_c(Staging, method, at)
    with pytest.raises(KeyboardInterrupt):
        context.__exit__(None, None, None)
    tiny_engine.caches.clear()
    assert tiny_engine.pool.free == tiny_engine.pool.pages
    with started(tiny_engine, tmp_path, disk_gb=0) as caches:
        assert (caches.nvme.storage.read_only, warnings(caplog)) == (False, [])
        recount(caches, tmp_path)
        assert_cold(tiny_engine, followed(HEAD, generated, prompt(20, seed=9)))


def test_ctrl_c_while_a_planned_stop_waits(tiny_engine, tmp_path, caplog, ctrl_c, monkeypatch):
    """For the disk: what was begun is finished, what was not is left out."""
    context = started(tiny_engine, tmp_path, disk_gb=0)
    context.__enter__()
    answer(tiny_engine, HEAD)
    with Slow(monkeypatch) as slow:

        def interrupt():
            main = threading.main_thread().ident
            # not in some other place: one that arrives in a weak reference's callback is lost to Python
            while len(slow.keys) < 2 or sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
                time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGINT)
            slow.go()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            context.__exit__(None, None, None)
        thread.join()
    tiny_engine.caches.clear()
    assert 2 <= len(slow.keys) < 10
    with started(tiny_engine, tmp_path, disk_gb=0) as caches:
        assert (caches.nvme.storage.read_only, caches.resident.sessions, warnings(caplog)) == (False, [], [])
        recount(caches, tmp_path)
        assert assert_cold(tiny_engine, ASKED).source == "cold"


def test_what_is_written_again_while_its_files_go(tiny_engine, tmp_path, monkeypatch):
    """What is dropped leaves the index first and the storage later; a request that writes it in between finds it there afterwards."""
    drop, removes = Storage.drop, threading.Event()

    def late(storage, key, *more):
        if threading.current_thread() is thread:
            assert removes.wait(60)
        return drop(storage, key, *more)

    with started(tiny_engine, tmp_path, session_spill=False) as caches:
        answer(tiny_engine, HEAD, user=HEAD.size)
        caches.nvme.drain()
        thread = threading.Thread(target=caches.nvme.index.drop_all)
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "drop", late)
            thread.start()
            _until(lambda: not caches.nvme.index.anchors)
            caches.clear()
            answer(tiny_engine, HEAD, user=HEAD.size)
            caches.nvme.drain()
            removes.set()
            thread.join()
        recount(caches, tmp_path)
        caches.clear()
        assert assert_cold(tiny_engine, ASKED).start == 256


def test_two_conversations_that_share_a_state(tiny_engine, tmp_path, monkeypatch):
    """One goes on, so that what was written of it before goes; the other, written beside it, stands on a state of that: it stays."""
    with started(tiny_engine, tmp_path, disk_gb=0):
        _, generated, _ = answer(tiny_engine, HEAD[:200])
    longer, branch = followed(HEAD[:200], generated, prompt(60, seed=8)), np.concatenate([HEAD[:128], prompt(40, seed=7)])
    with started(tiny_engine, tmp_path, disk_gb=0) as caches:
        answer(tiny_engine, longer)
        answer(tiny_engine, branch)
        with Slow(monkeypatch, ("p-", "a-", "s-")) as slow:
            thread = threading.Thread(target=lambda: (_until(lambda: _sessions(caches) == 2), slow.go()))
            thread.start()
            caches.close()
            thread.join()
        index = caches.nvme.index
        assert len(index.sessions) == 2
        assert all(index.anchors.keys() >= set(session.anchors) for session in index.sessions.values())
    with started(tiny_engine, tmp_path, disk_gb=0) as caches:
        recount(caches, tmp_path)
        caches.clear()
        assert assert_cold(tiny_engine, np.concatenate([branch, prompt(9, seed=6)])).start == branch.size
        assert assert_cold(tiny_engine, np.concatenate([longer, prompt(9, seed=6)])).start == longer.size


def _sessions(caches) -> int:
    """That wait to be written."""
    return sum(key.startswith("s-") for key in list(caches.nvme._writer._pending))


def _until(holds) -> None:
    while not holds():
        time.sleep(0.001)


def test_a_second_stop_is_nothing(tiny_engine, tmp_path):
    with started(tiny_engine, tmp_path) as caches:
        answer(tiny_engine, HEAD)
        caches.close()
        before = keys(tmp_path)
        caches.close()
        assert keys(tmp_path) == before


def test_what_is_given_up_is_written_by_nobody(tiny_engine, tmp_path, caplog, monkeypatch):
    """As where a command's own directory is about to go: what was begun ends first, nothing else begins, also not by an answer that ends later."""
    context = started(tiny_engine, tmp_path / "states", disk_gb=1)
    caches = context.__enter__()
    run = tiny_engine.generate(HEAD, max_tokens=9, user=HEAD.size)
    with Slow(monkeypatch) as slow:
        steps = iter(run)
        for _ in range(3):
            next(steps)
        while not slow.keys:
            pass
        threading.Timer(0.2, slow.go).start()
        tiny_engine.abandon()
        begun = set(slow.keys)
        assert begun == keys(tmp_path / "states", "[pas]-")  # written when it returned
        assert 1 <= len(begun) <= 2 < len(line_keys(HEAD)[0])
        shutil.rmtree(tmp_path / "states")
        run.close()
    tiny_engine.release(run.sequence)
    context.__exit__(None, None, None)
    assert caches.nvme.closed
    assert not (tmp_path / "states").exists()
    assert set(slow.keys) == begun
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
