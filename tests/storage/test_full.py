"""A write that fails in the middle, wherever that is, leaves nothing behind, and what was there stays."""

import errno

import pytest

from storage import Full
from storage.directory import Directory
from tests.storage.children import run, run_with_mounts
from tests.storage.content import content, key, names, reads

SMALL = """
import subprocess, sys
from pathlib import Path
import numpy as np
from storage import Full, Storage
from tests.storage.content import *
root = Path(sys.argv[1])
root.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", root], check=True)

def put(store, number):
    try:
        store.put(key(number), content(number))
    except Full as error:
        assert str(error).startswith(f"{key(number)} cannot be written: ") and "No space left on device" in str(error), error
        return False
    return True

with Storage.open(root, FINGERPRINT) as store:
    there = 0
    while put(store, there):
        there += 1
    assert there > 10
    for _ in range(3):
        assert not put(store, there)
        assert names(root) == set(store.entries()) == {key(i) for i in range(there)}
        assert all(reads(store, i) for i in range(there))
    store.drop(key(0))
    assert put(store, there) and reads(store, there)
with Storage.open(root, FINGERPRINT) as store:   # on a full disk too
    assert store.stats()["entries"] == there and store.stats()["unfinished"] == 0
    assert all(reads(store, i) for i in range(1, there + 1))
    for i in range(2, there + 1):
        store.drop(key(i))
    fits = []
    for pages in range(16):                       # the space ends at each file in turn: leaves, then meta
        filler = root / "filler"
        filler.write_bytes(b"")
        with open(filler, "wb") as file:
            file.write(bytes((store.stats()["free"] // 4096 - pages) * 4096))
        fits.append(put(store, 100))
        assert names(root) == set(store.entries()) == {key(1)} | ({key(100)} if fits[-1] else set())
        store.drop(key(100))
        filler.unlink()
        assert reads(store, 1)
    assert fits == sorted(fits) and 4 <= fits.count(False) <= 12, fits
print("all of it")
"""


def test_a_file_system_that_is_full(root):
    """1 MiB that entries fill, and one that has room for so many pages only."""
    assert run_with_mounts(SMALL, root) == "all of it\n"


STOPS = {
    "its directories": ("begin", OSError(errno.ENOSPC, "No space left on device")),
    "a quota": ("begin", OSError(errno.EDQUOT, "Disk quota exceeded")),
    "an array": ("written", ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error_code='28']")),
    "after meta": ("committed", OSError(errno.ENOSPC, "No space left on device")),
}


@pytest.mark.parametrize("where", STOPS)
def test_no_room_for(opened, root, monkeypatch, where):
    """The same where no file system can be mounted: the system's error, and TensorStore's as it words it, at each step of a write."""
    method, error = STOPS[where]
    step = getattr(Directory, method)

    def stopped(*arguments) -> None:
        step(*arguments)
        raise error

    store = opened()
    store.put(key(0), content(0))
    with monkeypatch.context() as patch:
        patch.setattr(Directory, method, stopped)
        with pytest.raises(Full, match=f"^{key(1)} cannot be written: .*(No space left on device|Disk quota exceeded)"):
            store.put(key(1), content(1))
    assert names(root) == set(store.entries()) == {key(0)}
    assert not reads(store, 1)
    store.put(key(1), content(1))
    assert all(reads(store, i) for i in range(2))


LIMITED = """
import resource, sys
from storage import Full, Storage, StorageError
from tests.storage.content import *
with Storage.open(sys.argv[1], FINGERPRINT) as store:
    store.put(key(0), content(0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, resource.RLIM_INFINITY))
    try:
        store.put(key(1), content(1))
    except StorageError as error:
        assert not isinstance(error, Full) and str(error) == f"{key(1)} cannot be written: [Errno 27] File too large", error
        print("refused")
    assert set(store.entries()) == {key(0)} and reads(store, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.put(key(1), content(1))
    assert reads(store, 1)
"""


def test_a_file_that_is_longer_than_the_process_may_write(root):
    assert run(LIMITED, root) == "refused\n"
    assert names(root) == {key(0), key(1)}


def test_an_interrupted_write_leaves_nothing(opened, root, monkeypatch):
    """Ctrl-C comes out as itself, after the writes under way have ended."""
    store = opened()
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "written", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.put(key(1), content(1))
    assert names(root) == set(store.entries()) == set()
    store.put(key(1), content(1))
    assert reads(store, 1)


def test_what_json_cannot_hold_is_refused_before_anything_is_written(opened, root):
    store = opened()
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.put(key(1), content(1), what={1, 2})
    assert names(root) == set()
