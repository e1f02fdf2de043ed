"""Damaged entries are not there: each says why, is removed and counted, and costs no other entry anything.

E4 (reported faults): a flipped bit in each section, truncation at every section's edge, zero length, header only. A7: an entry that lacks
one section is refused as a whole. A10: a forged longer key.
"""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import xxhash

from storage.entry import seal, unseal
from tests.storage.content import SHAPES, content, empty, entry_path, equal, file, key, names, reads

LEAVES = sorted(SHAPES)
BAD = 1


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def cut(path, size):
    os.truncate(path, size)


FAULTS = {
    "first byte flipped": (lambda path: flip(path, 0), "sum"),
    "middle byte flipped": (lambda path: flip(path, path.stat().st_size // 2), "sum"),
    "last byte flipped": (lambda path: flip(path, -1), "sum"),
    "other bytes of the same size": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "sum"),
    "zero length": (lambda path: cut(path, 0), "size"),
    "one byte": (lambda path: cut(path, 1), "size"),
    "one byte short": (lambda path: cut(path, path.stat().st_size - 1), "size"),
    "one byte long": (lambda path: cut(path, path.stat().st_size + 1), "size"),
    "a page long": (lambda path: cut(path, path.stat().st_size + 4096), "size"),
    "missing": (lambda path: path.unlink(), "missing"),
    "its directory missing": (lambda path: shutil.rmtree(path.parent), "missing"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "missing"),
}


@pytest.fixture
def store(opened):
    store = opened()
    for i in range(4):
        store.put(key(i), content(i), number=i)
    return store


def assert_refused(store, root, caplog, kind):
    """A chain with the bad entry second: the reads before and after it hold, and it is gone for good."""
    found = [empty() for _ in range(4)]
    caplog.clear()
    assert store.get([(key(i), arrays) for i, arrays in enumerate(found)]) == BAD
    for i in {0, 1, 2, 3} - {BAD}:
        assert equal(found[i], content(i))
    assert_gone(store, root, caplog, kind)


def assert_gone(store, root, caplog, kind):
    (line,) = [record.getMessage() for record in caplog.records]
    assert key(BAD) in line
    assert "is removed: " in line
    assert store.stats()["damaged"] == {kind: 1}
    assert names(root) == set(store.entries()) == {key(i) for i in range(4) if i != BAD}
    assert not reads(store, BAD)
    assert store.stats()["damaged"] == {kind: 1}
    store.put(key(BAD), content(BAD))
    assert all(reads(store, i) for i in range(4))


def test_without_damage_the_chain_is_read(store, opened):
    """The control of all that follow, in the process that wrote it and in the next."""
    assert store.get([(key(i), empty()) for i in range(4)]) == 4
    store.close()
    store = opened()
    assert store.get([(key(i), empty()) for i in range(4)]) == 4
    assert store.stats()["damaged"] == {}


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_leaf(store, root, caplog, leaf, fault):
    damage, kind = FAULTS[fault]
    damage(file(root, BAD, leaf))
    assert_refused(store, root, caplog, kind)


@pytest.mark.parametrize("leaf", LEAVES)
def test_every_flipped_bit_is_seen(store, root, leaf):
    """Of the first and the last 3 bytes of each leaf, one at a time, while the entry is otherwise whole."""
    path = file(root, BAD, leaf)
    data = path.read_bytes()
    for at in [0, 1, 2, -3, -2, -1]:
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            path = file(root, BAD, leaf)
            path.write_bytes(flipped)
            assert not reads(store, BAD)
            store.put(key(BAD), content(BAD))
    assert reads(store, BAD)
    assert store.stats()["damaged"] == {"sum": 48}


def test_swapped_leaves(store, root, caplog):
    one, other = file(root, BAD, "K"), file(root, BAD, "V")
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    assert_refused(store, root, caplog, "sum")


def test_a_leaf_of_another_entry(store, root, caplog):
    shutil.copy(file(root, 2, "S"), file(root, BAD, "S"))
    assert_refused(store, root, caplog, "sum")


META = {
    "first byte of its sum flipped": lambda path: flip(path, 0),
    "last byte of its sum flipped": lambda path: flip(path, 7),
    "first byte of its text flipped": lambda path: flip(path, 8),
    "middle byte flipped": lambda path: flip(path, path.stat().st_size // 2),
    "last byte flipped": lambda path: flip(path, -1),
    "zero length": lambda path: cut(path, 0),
    "half of its sum": lambda path: cut(path, 4),
    "its sum only": lambda path: cut(path, 8),
    "half of its text": lambda path: cut(path, 8 + (path.stat().st_size - 8) // 2),
    "one byte short": lambda path: cut(path, path.stat().st_size - 1),
    "one byte long": lambda path: cut(path, path.stat().st_size + 1),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("fault", META)
def test_a_damaged_meta(store, opened, root, caplog, fault):
    """While the storage is open nobody reads it, and the entry is served; the next start removes it."""
    META[fault](file(root, BAD, "meta"))
    assert reads(store, BAD)
    store.close()
    assert_gone(opened(), root, caplog, "meta")


def test_a_missing_meta(store, opened, root, caplog):
    """That is what an unfinished entry looks like: it is removed without a word about damage, and counted."""
    file(root, BAD, "meta").unlink()
    store.close()
    store = opened()
    assert names(root) == set(store.entries()) == {key(i) for i in (0, 2, 3)}
    assert (store.stats()["unfinished"], store.stats()["damaged"], caplog.records) == (1, {}, [])
    assert not reads(store, BAD)


@pytest.mark.parametrize("whole", [False, True])
def test_a_meta_of_another_key(store, opened, root, caplog, whole):
    """Its own sum is right, and with the other's leaves theirs are too."""
    if whole:
        shutil.rmtree(entry_path(root, BAD))
        shutil.copytree(entry_path(root, 2), root / store.fingerprint.digest / key(BAD))
    else:
        shutil.copy(file(root, 2, "meta"), file(root, BAD, "meta"))
    store.close()
    assert_gone(opened(), root, caplog, "meta")


def test_a_forged_longer_entry(store, opened, root, caplog):
    """A `meta` with a right sum that says one row more than there is, for a reader that expects as many."""
    path = file(root, BAD, "meta")
    entry = unseal(key(BAD), path.read_bytes())
    longer = dataclasses.replace(entry.leaves["ids"], shape=(8,))
    path.write_bytes(seal(dataclasses.replace(entry, leaves={**entry.leaves, "ids": longer})))
    store.close()
    store = opened()
    assert store.get([(key(BAD), empty() | {"ids": np.empty(8, np.int32)})]) == 0
    assert_gone(store, root, caplog, "size")


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b'{"key": 1}', b"\xff", "a dtype", "a shape"])
def test_a_forged_meta_with_a_right_sum(store, opened, root, caplog, text):
    """Whatever it says, it is damage and no crash."""
    path = file(root, BAD, "meta")
    if isinstance(text, str):
        said = json.loads(path.read_bytes()[8:])
        said["leaves"]["ids"] = ["float7", [7], ""] if text == "a dtype" else ["int32", [-70000], ""]
        text = json.dumps(said).encode()
    path.write_bytes(xxhash.xxh3_64_digest(text) + text)
    store.close()
    assert_gone(opened(), root, caplog, "meta")


@pytest.mark.parametrize(("change", "text"), [
    ({"ids": np.empty(6, np.int32)}, "ids: expected int32[6], found int32[7]"),
    ({"ids": np.empty(7, np.uint32)}, "ids: expected uint32[7], found int32[7]"),
    ({"K": np.empty((3, 8, 5), np.float16)}, "K: expected float16[3, 8, 5], found bfloat16[3, 8, 5]"),
    ({"more": np.empty(1)}, "more: expected float64[1], found nothing"),
])  # fmt: skip
def test_an_entry_that_is_not_what_is_expected(store, root, caplog, change, text):
    """No array of it is read: nothing would tell which part is the right one."""
    found = {name: np.zeros_like(a) for name, a in empty().items()}
    assert store.get([(key(BAD), found | change)]) == 0
    assert text in caplog.text
    assert not any(a.view(np.uint8).any() for a in found.values())
    assert_gone(store, root, caplog, "layout")


def test_a_read_only_storage_refuses_and_leaves_what_is_damaged(store, opened, root, caplog):
    flip(file(root, BAD, "S"), 5)
    file(root, 2, "meta").unlink()
    flip(file(root, 3, "meta"), 9)
    with opened(read_only=True) as reader:
        assert set(reader.entries()) == {key(0), key(1)}
        assert [reads(reader, i) for i in range(4)] == [True, False, False, False]
        assert reader.stats()["damaged"]["sum"] == 1
        assert "is removed" not in caplog.text
    assert names(root) == {key(i) for i in range(4)}
