"""What a start finds: the entries, in the order of their last use, what another fingerprint left, and what is not ours."""

import shutil
import time

import pytest

from storage import Storage
from storage.entry import Entry, seal
from tests.storage.content import FINGERPRINT, content, entry_path, file, key, names, reads


def test_entries_are_there_at_the_next_start(opened):
    with opened() as store:
        written = {i: store.put(key(i), content(i), number=i) for i in range(5)}
    with opened() as store:
        assert set(store.entries()) == {key(i) for i in range(5)}
        assert all(reads(store, i) for i in range(5))
        for i, entry in written.items():
            found = store.entries()[key(i)]
            assert (found.leaves, found.fields, found.written, found.nbytes) == (entry.leaves, {"number": i}, entry.written, entry.nbytes)


def test_another_fingerprint_is_swept_and_says_what_differed(opened, root, caplog):
    """E1, E2 (reported faults): no entry of it is found, and the log and the counts name the fields."""
    changes = {"weights": "5e1e", "jax": "0.10.3", "grid": "64"}
    with opened() as store:
        store.put(key(1), content(1))
        assert store.stats()["swept"] == []
    for name, value in changes.items():
        caplog.clear()
        with opened(FINGERPRINT | {name: value}) as store:
            assert (store.entries(), reads(store, 1)) == ({}, False)
            assert store.stats()["swept"] == [{name: (FINGERPRINT.get(name), value)}]
            assert len(list(root.iterdir())) == 2
        assert f"{name} was {FINGERPRINT.get(name)}, is {value}" in caplog.text
        with opened() as store:
            assert store.entries() == {}
            store.put(key(1), content(1))
    with opened(dict(reversed(FINGERPRINT.items()))) as store:
        assert reads(store, 1)  # the control: the same fields are the same fingerprint


def test_a_sweep_that_was_cut_short_is_finished(opened, root):
    with opened() as store:
        store.put(key(1), content(1))
    (old,) = [path for path in root.iterdir() if path.is_dir()]
    file(root, 1, "meta").unlink()
    shutil.rmtree(entry_path(root, 1) / "K")
    with opened({"weights": "another"}) as store:
        assert [list(differs) for differs in store.stats()["swept"]] == [["jax", "weights"]]
    old.mkdir()
    with opened({"weights": "another"}) as store:
        assert store.stats()["swept"] == [{}]
    assert not old.exists()


def test_fields_of_a_fingerprint_are_text(root):
    with pytest.raises(TypeError, match="'layers': 24"):
        Storage.open(root, {"layers": 24})


def test_foreign_files_stay_and_do_no_harm(opened, root, tmp_path):
    """In the root: names that look like a fingerprint's, links and very many files. Beside the entries: files, and names that no key has."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "fingerprint.json").write_text("{}")
    with opened() as store:
        store.put(key(1), content(1))
        inside = root / store.fingerprint.digest
    (root / ("a" * 32)).mkdir()
    (root / ("a" * 32) / "photograph").write_text("x")
    (root / ("b" * 32)).symlink_to(elsewhere)
    (root / ("c" * 32)).write_text("x")
    (root / "music").mkdir()
    for i in range(5000):
        (root / f"{i}.txt").touch()
    (inside / "a.directory").mkdir()
    (inside / "file").touch()
    (inside / "link").symlink_to(elsewhere)
    before = sorted(root.rglob("*"))
    with opened() as store:
        assert set(store.entries()) == {key(1)}
        assert reads(store, 1)
        assert (store.stats()["swept"], store.stats()["unfinished"]) == ([], 0)
        store.put("link", content(2))  # a key whose place a foreign link has
        assert (inside / "link" / "meta").is_file()
    assert sorted(path for path in root.rglob("*") if inside / "link" not in path.parents) == before
    assert (elsewhere / "fingerprint.json").read_text() == "{}"


def test_a_thousand_entries_are_found_at_the_start(opened, root):
    """Of 1,000 finished ones none is lost, of 50 unfinished ones none is kept."""
    with opened() as store:
        store.put(key(0), content(0))
        inside = root / store.fingerprint.digest
        leaves = store.entries()[key(0)].leaves
    for i in range(1, 1000):
        shutil.copytree(inside / key(0), inside / f"copy-{i}")
        (inside / f"copy-{i}" / "meta").write_bytes(seal(Entry(f"copy-{i}", leaves, {"number": i}, 1e9, 1e9)))
    for i in range(50):
        (inside / f"unfinished-{i}" / "K").mkdir(parents=True)
        (inside / f"unfinished-{i}" / "K" / "0.0.0.__lock").touch()
    with opened() as store:
        stats = store.stats()
        assert (stats["entries"], stats["unfinished"], stats["damaged"]) == (1000, 50, {})
        assert stats["nbytes"] == 1000 * sum(a.nbytes for a in content(0).values())
        assert all(entry.fields == {"number": int(name[5:])} for name, entry in store.entries().items() if name != key(0))
    assert len(names(root)) == 1000


def test_entries_come_least_recently_used_first(opened):
    with opened() as store:
        for i in range(4):
            store.put(key(i), content(i))
        store.touch(key(1))
        store.touch("not there")
        assert list(store.entries()) == [key(i) for i in (0, 2, 3, 1)]
        used = [entry.used for entry in store.entries().values()]
        assert used == sorted(set(used))
    with opened() as store:
        assert list(store.entries()) == [key(i) for i in (0, 2, 3, 1)]
        assert [entry.used for entry in store.entries().values()] == pytest.approx(used, abs=1e-5)


def test_a_clock_that_jumps_does_no_harm(opened, monkeypatch):
    """Set back a year while the storage is open, forward by a century before the next start, and back again: nothing is lost, what was used
    later stays later, and no time of use lies ahead of the clock."""
    jump, clock = 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    with opened() as store:
        store.put(key(3), content(3))
        store.put(key(0), content(0))
        jump = -365 * 86400
        store.put(key(1), content(1))
        store.touch(key(0))
        assert list(store.entries()) == [key(3), key(1), key(0)]
    jump = 100 * 365 * 86400
    with opened() as store:
        assert list(store.entries()) == [key(3), key(1), key(0)]
        store.put(key(2), content(2))
        store.touch(key(1))
    jump = 0.0
    for _ in range(2):
        with opened() as store:
            assert list(store.entries()) == [key(3), key(0), key(2), key(1)]
            assert all(entry.used <= clock() for entry in store.entries().values())
            assert all(reads(store, i) for i in range(4))
