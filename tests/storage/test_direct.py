"""Files past the page cache: from and into memory at any address, in the bytes that TensorStore would write, durable before `meta` is."""

import errno
import fcntl
import gc
import mmap
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage import Storage, direct, host
from storage import arrays as tensorstore_files
from storage.directory import Directory
from tests.bits import assert_bits_equal
from tests.storage.content import FINGERPRINT, content, key, names, random_bits, reads

SIZES = [1, 4095, 4096, 4097, 8192, 8193, 3 * 8192 + 5]
"""Bytes around those of a page and of a block, which is 8,192 here."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(direct, "BLOCK", 8192)


def at(offset: int, array: np.ndarray) -> np.ndarray:
    """The same array so many bytes past the beginning of a page."""
    room = host((array.nbytes + offset,), np.uint8)[offset:]
    room[:] = array.reshape(-1).view(np.uint8)
    return room.view(array.dtype).reshape(array.shape)


def layouts(size: int) -> dict[str, np.ndarray]:
    """Arrays of bytes that lie in memory in every way: at a page's start, at XLA's alignment, at none, apart, turned, read-only."""
    flat = random_bits(np.random.default_rng(size), (size,), np.uint8)
    apart = np.zeros((size, 2), np.uint8)
    apart[:, 0] = flat
    fixed = at(64, flat)
    fixed.flags.writeable = False
    wide = random_bits(np.random.default_rng(size + 1), (3, 5, size), np.uint8)
    return {"page": at(0, flat), "64": fixed, "odd": at(1, flat), "apart": apart[:, 0], "back": flat[::-1], "turned": wide.T, "slice": wide[:, 1:4]}


@pytest.mark.parametrize("size", SIZES)
def test_any_memory_is_written_as_tensorstore_writes_it(opened, root, size):
    """The same files with the same bytes, which it can read; and what it wrote can be read here."""
    store, tree = opened(), layouts(size)
    store.put("ours", tree)
    inside = root / store.fingerprint.digest
    for write in tensorstore_files.write(store._place.kv, "theirs", tree):
        write.result()
    files = [{str(path.relative_to(inside / who)): path.read_bytes() for path in (inside / who).glob("*/*")} for who in ("ours", "theirs")]
    assert files[0] == files[1]
    assert sorted(map(len, files[0].values())) == sorted(a.nbytes for a in tree.values())
    found = store.entries()["ours"].empty()
    for read in tensorstore_files.read(store._place.kv, "ours", found).values():
        read.result()
    assert_bits_equal(found, tree)
    for name, array in tree.items():
        direct.read(inside / "theirs" / name / tensorstore_files.file_name(array), again := np.zeros_like(array, order="C"))
        assert_bits_equal(again, array)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_read_into_any_memory(opened, size):
    """And nothing beside it is touched."""
    store, (_, array) = opened(), next(iter(layouts(size).items()))
    store.put("k", {"a": array, "rows": np.stack([array] * 3)})
    for offset in (0, 64, 1):
        room = host((size + offset + 8,), np.uint8)
        assert store.get([("k", {"a": room[offset : offset + size]})]) == 1
        assert_bits_equal(room, np.concatenate([np.zeros(offset, np.uint8), array, np.zeros(8, np.uint8)]))
    wide = np.zeros((3, size, 2), np.uint8)
    assert store.get([("k", {"a": wide[1, :, 1], "rows": wide[..., 0]})]) == 1
    assert (wide[..., 0] == array).all()
    assert (wide[1, :, 1] == array).all()
    assert not wide[[0, 2], :, 1].any()


def refusing(call):
    """As a file system does that opens a file so and then cannot read or write it."""

    def refused(file, *arguments):
        if direct.O_DIRECT and fcntl.fcntl(file, fcntl.F_GETFL) & direct.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(file, *arguments)

    return refused


def short(call, most: int = 1000):
    """As a system does that moves a part of what it is given."""
    return lambda file, what, at: call(file, [what[0][:most]] if isinstance(what, list) else what[:most], at)


@pytest.mark.parametrize("how", [refusing, short])
def test_where_the_system_does_not_do_what_it_is_asked(opened, monkeypatch, how):
    store, tree = opened(), layouts(3 * 8192)
    monkeypatch.setattr(direct.os, "pwrite", how(os.pwrite))
    monkeypatch.setattr(direct.os, "preadv", how(os.preadv))
    store.put("k", tree)
    found = store.entries()["k"].empty()
    assert store.get([("k", found)]) == 1
    assert_bits_equal(found, tree)


def test_a_file_that_ends_while_it_is_read(opened, monkeypatch):
    store = opened()
    store.put(key(1), content(1))
    monkeypatch.setattr(direct.os, "preadv", lambda *_: 0)
    assert not reads(store, 1)
    assert store.stats()["damaged"] == {"size": 1}


@pytest.mark.parametrize(("number", "stays"), [(errno.EMFILE, True), (errno.ENOMEM, True), (errno.EIO, False), (errno.EACCES, False)])
def test_what_cannot_be_read_now_may_be_there_all_the_same(opened, root, monkeypatch, number, stays):
    """Without a descriptor left the entry is a miss and stays; on a disk that fails it goes."""
    store = opened()
    store.put(key(1), content(1))

    def fails(*_) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "preadv", fails)
        assert not reads(store, 1)
    assert store.stats()["damaged"] == {"unreadable": 1}
    assert (names(root) == {key(1)}) is stays
    assert reads(store, 1) is stays


@pytest.fixture
def record(monkeypatch) -> Iterator[list[tuple[str, str]]]:
    """(what, path) of every write and sync of a descriptor and of every write by TensorStore, in their order."""
    done, lock = [], threading.Lock()

    def recorded(what, call):
        def run(file, *arguments):
            result = call(file, *arguments)
            with lock:
                done.append((what, os.readlink(f"/proc/self/fd/{file}")))
            return result

        return run

    monkeypatch.setattr(direct.os, "pwrite", recorded("write", os.pwrite))
    monkeypatch.setattr(direct.os, "fsync", recorded("sync", os.fsync))
    written = Directory.written

    def then_meta(directory, name, arrays) -> None:
        written(directory, name, arrays)
        assert not (directory.path / name / "meta").exists()
        with lock:
            done.append(("meta", str(directory.path / name)))

    monkeypatch.setattr(Directory, "written", then_meta)
    return done


def unsynced(done: list[tuple[str, str]], made: list[Path]) -> set[str]:
    """What of an entry was not synced after it was written last and before its `meta`."""
    before = done[: [what for what, _ in done].index("meta")]
    last = {path: what for what, path in before}
    return {str(path) for path in made if last.get(str(path)) != "sync"}


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not tell what a descriptor is of")
@pytest.mark.parametrize("left_out", [None, "0.0", "S", ""])
def test_all_of_an_entry_is_durable_before_its_meta(opened, root, monkeypatch, record, left_out):
    """Files, their directories, and the one that the entry stands in. The control: a sync that leaves one of them out."""
    store, sync = opened(), direct.sync
    inside = Path(os.path.realpath(root)) / store.fingerprint.digest
    if left_out is not None:
        skipped = {"0.0": inside / key(1) / "S" / "0.0", "S": inside / key(1) / "S", "": inside}[left_out]
        monkeypatch.setattr(direct, "sync", lambda path: None if path == skipped else sync(path))
    record.clear()
    store.put(key(1), content(1))
    made = [path for path in (inside / key(1)).rglob("*") if path.name != "meta"]
    assert len(made) == 2 * len(content(1))
    assert unsynced(record, [inside, *made]) == (set() if left_out is None else {str(skipped)})


def test_the_threads_of_a_closed_storage_end(root):
    def ours() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("storage-")]

    for i in range(3):
        with Storage.open(root, FINGERPRINT) as store:
            store.put(key(i), content(i))
            assert reads(store, i)
            threads = ours()
    assert threads
    del store
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert ours() == []


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without huge pages")
def test_memory_to_read_into_asks_for_huge_pages():
    """Its mapping's flags have "hg", and not "sh": for memory that is shared they would not count. The control: memory as it comes."""

    def flags(mapped) -> set[str]:
        address, found = np.frombuffer(mapped, np.uint8).ctypes.data, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                found = begin <= address < end
            elif found and line.startswith("VmFlags:"):
                return set(line.split()[1:])
        raise AssertionError(f"no mapping has address {address:x}")

    assert "hg" in flags(host((2**22,), np.uint8))
    assert "sh" not in flags(host((2**22,), np.uint8))
    plain = flags(mmap.mmap(-1, 2**22))
    assert "hg" not in plain
    assert "sh" in plain


def test_the_time_that_sums_take_is_told(opened):
    store = opened()
    store.put(key(1), content(1))
    assert store.stats()["verify_s"] == 0
    assert reads(store, 1)
    assert store.stats()["verify_s"] > 0
