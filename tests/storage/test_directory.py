"""The directory: who may use it and read it, and that its troubles cost entries and no more."""

import ctypes
import mmap
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from storage import Locked, Storage, StorageError
from tests.storage.children import ROOT, run, run_with_mounts
from tests.storage.content import FINGERPRINT, content, key, names, reads


def test_a_fresh_path_becomes_a_directory_that_others_cannot_read(tmp_path):
    """E5 (reported faults): nothing has to be there, and the free space is known from the start."""
    with Storage.open(tmp_path / "not" / "there" / "yet", FINGERPRINT) as store:
        assert store.stats()["free"] > 0
        store.put(key(1), content(1))
    assert stat.S_IMODE((tmp_path / "not" / "there" / "yet").stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", ["0", "0o22", "0o77"])
def test_modes_whatever_the_umask(root, umask):
    script = """
import os, sys
from storage import Storage
from tests.storage.content import *
os.umask(int(sys.argv[2], 0))
with Storage.open(sys.argv[1], FINGERPRINT) as store:
    store.put(key(1), content(1))
"""
    run(script, root, umask)
    found = list(root.rglob("*"))
    assert len(found) == 13
    assert {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found} == {(True, 0o700), (False, 0o600)}


def test_the_mode_of_a_directory_that_was_there_is_the_users(root, opened):
    root.mkdir(0o755)
    root.chmod(0o755)
    opened().put(key(1), content(1))
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir() if path.is_dir()} == {0o700}


HOLDER = """
import sys
from storage import Storage
from tests.storage.content import *
store = Storage.open(sys.argv[1], FINGERPRINT)
store.put(key(1), content(1))
print("open", flush=True)
for line in sys.stdin:
    store.put(key(2), content(2))
    print("put", flush=True)
"""


def test_a_second_process_is_refused_or_reads_only(root, opened):
    """E7 (reported faults). The reader sees what the writer adds; the writer's end, even by kill -9, lets the next one in."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, root], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "open\n"
        for fingerprint in (FINGERPRINT, {"weights": "another"}):
            with pytest.raises(Locked, match=rf"in use by another engine \(process {holder.pid}\)$"):
                opened(fingerprint)
        reader = opened(read_only=True)
        assert [reads(reader, i) for i in (1, 2)] == [True, False]
        holder.stdin.write("more\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "put\n"
        assert [reads(reader, i) for i in (1, 2)] == [True, True]
        for act in (lambda: reader.put(key(3), content(3)), lambda: reader.drop(key(1))):
            with pytest.raises(StorageError, match="opened read-only"):
                act()
        reader.touch(key(1))
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    writer = opened()
    assert [reads(writer, i) for i in (1, 2)] == [True, True]
    writer.drop(key(1))
    assert [reads(reader, i) for i in (1, 2)] == [False, True]


def test_the_same_process_is_refused_too(opened):
    store = opened()
    with pytest.raises(Locked, match=str(os.getpid())):
        opened()
    store.close()
    opened()


def test_a_closed_storage_says_so(opened):
    store = opened()
    store.close()
    for act in (lambda: store.put(key(1), content(1)), lambda: reads(store, 1), lambda: store.drop(key(1)), lambda: store.touch(key(1))):
        with pytest.raises(StorageError, match="it was closed"):
            act()
    store.close()


def test_read_only_where_nothing_is_there(root, opened):
    assert opened(read_only=True).entries() == {}
    assert not root.exists()


def test_a_directory_on_another_device(tmp_path, opened, root):
    """Through a link; set to another place while the storage is open, it changes nothing."""
    devices = [path for path in (Path("/dev/shm"), Path("/run/user") / str(os.getuid())) if os.access(path, os.W_OK)]
    other = next((path for path in devices if path.stat().st_dev != tmp_path.stat().st_dev), None)
    if other is None:
        pytest.skip("no second file system that can be written to")
    target = other / f"qjax-{os.getpid()}-{tmp_path.name}"
    target.mkdir()
    try:
        root.symlink_to(target)
        with opened() as store:
            store.put(key(1), content(1))
            root.unlink()
            root.symlink_to(tmp_path / "nowhere")
            store.put(key(2), content(2))
            assert [reads(store, i) for i in (1, 2)] == [True, True]
            store.drop(key(1))
        assert names(target) == {key(2)}
    finally:
        shutil.rmtree(target)


def cached(path: Path) -> int:
    """How many pages of a file the page cache has. (A read that may not wait would tell too, and start a readahead.)"""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-view.size // mmap.PAGESIZE), np.uint8)
        status = ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size), ctypes.c_void_p(pages.ctypes.data))
        del view
    assert status == 0
    return int((pages & 1).sum())


@pytest.mark.skipif(sys.platform != "linux", reason="the file system is read past its cache on Linux only")
def test_neither_writes_nor_reads_stay_in_the_page_cache(opened, root):
    """Of a file in whole pages. The control: after a plain read they do."""
    store = opened()
    store.put("k", {"K": np.arange(1 << 20, dtype=np.uint16)})
    (path,) = (root / store.fingerprint.digest / "k" / "K").iterdir()
    if path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("the tests' directory is in memory")
    assert cached(path) == 0
    assert store.get([("k", store.entries()["k"].empty())]) == 1
    assert cached(path) == 0
    path.read_bytes()
    assert cached(path) == path.stat().st_size // mmap.PAGESIZE


@pytest.mark.parametrize("new_writer", [False, True])
def test_a_directory_that_is_removed_under_the_open_storage(opened, root, caplog, new_writer):
    """Its entries are not there, nothing is written to whatever stands in its place, and the process goes on."""
    store = opened()
    for i in range(3):
        store.put(key(i), content(i))
    shutil.rmtree(root)
    if new_writer:
        other = opened()
        other.put(key(1), content(1))
    assert not reads(store, 0)
    assert "cannot be used" in caplog.text
    with pytest.raises(StorageError, match="removed while it was open"):
        store.put(key(7), content(7))
    store.touch(key(1))
    assert store.drop(key(1)) is True
    assert store.stats()["damaged"] == {"missing": 1}
    store.close()
    if new_writer:
        assert names(root) == {key(1)}
        assert reads(other, 1)
    else:
        assert not root.exists()
        with opened() as store:
            store.put(key(0), content(0))
            assert reads(store, 0)


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from storage import Storage, StorageError
from tests.storage.content import *
root = Path(sys.argv[1])
root.mkdir()
def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)
mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", root)
store = Storage.open(root / "store", FINGERPRINT)
for i in range(3):
    store.put(key(i), content(i))
data = bytearray(file(root / "store", 1, "S").read_bytes())
data[100] ^= 1
file(root / "store", 1, "S").write_bytes(data)
mount("--bind", root, root)
mount("-o", "remount,bind,ro", root)
def refused(act, text):
    try:
        act()
    except StorageError as error:
        assert text in str(error), error
    else:
        raise AssertionError("not refused")
refused(lambda: store.put(key(5), content(5)), "Read-only file system")
assert [reads(store, i) for i in range(3)] == [True, False, True]
store.touch(key(0))
assert store.drop(key(2)) and not reads(store, 2)
store.close()
refused(lambda: Storage.open(root / "store", FINGERPRINT), "cannot be written to: [Errno 30] Read-only file system")
refused(lambda: Storage.open(root / "elsewhere", FINGERPRINT), "Read-only file system")
with Storage.open(root / "store", FINGERPRINT, read_only=True) as store:
    assert [reads(store, i) for i in range(3)] == [True, False, True]
    assert store.stats()["damaged"] == {"sum": 1}
print("all of it")
"""


def test_a_directory_that_is_read_only(root):
    """A file system that is set read-only while the storage is open."""
    assert run_with_mounts(READ_ONLY, root) == "all of it\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every directory")
def test_a_directory_without_the_right_to_write(opened, root):
    with opened() as store:
        store.put(key(1), content(1))
        inside = root / store.fingerprint.digest
        inside.chmod(0o500)
        try:
            with pytest.raises(StorageError, match="Permission denied"):
                store.put(key(2), content(2))
            assert reads(store, 1)
        finally:
            inside.chmod(0o700)


def test_what_is_no_directory_is_refused(root):
    root.write_text("a file")
    for place, more in ((root, ""), (root / "below" / "it", f", {root}")):
        for read_only in (False, True):
            with pytest.raises(StorageError, match=f"^{place}: expected a directory, found a file{more}$"):
                Storage.open(place, FINGERPRINT, read_only)
    with pytest.raises(ValueError, match="expected a directory, or s3"):
        Storage.open("ftp://host/path", FINGERPRINT)
