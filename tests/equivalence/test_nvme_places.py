"""The place of the tier on NVMe: shared, read-only, full, gone, elsewhere, crowded, another engine's; and a clock that jumps."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.equivalence.nvme import recount, started
from tests.equivalence.nvme_damage import assert_cold, entry, file, files, flip, there, warnings
from tests.equivalence.test_nvme_faults import ANCHORS, ASKED, HEAD, NOTHING_WRITTEN, PAGES
from tests.equivalence.test_resident import answer
from tests.models import prompt

OTHER = prompt(200, seed=4)
YEAR = 365 * 86_400


def test_e7_a_second_engine_reads_and_writes_nothing(tiny_engine, kept, directory, caplog):
    """E7: it says so, serves the heads and the conversation, and no file is changed by its requests and its end."""
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        first, pool, before = tiny_engine.caches, tiny_engine.pool, files(directory)
        with started(tiny_engine, directory) as caches:
            (line,) = warnings(caplog)
            assert f"is in use by another engine (process {os.getpid()})" in line
            assert "its entries are read, and nothing is written" in line
            assert assert_cold(tiny_engine, kept[1]).source == "spill"
            assert_cold(tiny_engine, OTHER, user=OTHER.size)
            caches.clear()
            record = assert_cold(tiny_engine, ASKED)
            assert (record.source, record.start) == ("spill", 280)
            caches.clear(files=True)
            assert caches.nvme.stats()["written"] == 0
        assert files(directory) == before
        tiny_engine.caches, tiny_engine.pool = first, pool
        assert_cold(tiny_engine, ASKED)
    assert len(warnings(caplog)) == 1


def test_a_second_engine_that_finds_damage(tiny_engine, directory, caplog):
    """It leaves the files to their owner, says it once, and does not come back to them: the next shorter one serves, every time."""
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        first, pool = tiny_engine.caches, tiny_engine.pool
        flip(file(directory, PAGES[3], "V"), 7)
        with started(tiny_engine, directory, session_spill=False) as caches:
            caplog.clear()
            record = assert_cold(tiny_engine, ASKED)
            assert (record.source, record.start, record.failed) == ("disk", 128, [f"nvme: {PAGES[3]} is damaged or gone"])
            (line,) = warnings(caplog)
            assert f"entry {PAGES[3]} cannot be used: V: sum differs" in line
            caches.clear()
            record = assert_cold(tiny_engine, ASKED)
            assert (record.source, record.start, record.failed) == ("disk", 128, [])
            assert len(warnings(caplog)) == 1
            assert caches.nvme.stats()["damaged"] == 1
        assert {*PAGES[1:], *ANCHORS[1:]} <= there(directory)
        tiny_engine.caches, tiny_engine.pool = first, pool


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_directory_that_cannot_be_written(tiny_engine, kept, directory, caplog, monkeypatch, number):
    """It is read, and nothing is written."""

    def refused(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("storage.directory.Lock", refused)
    before = files(directory)
    with started(tiny_engine, directory) as caches:
        (line,) = warnings(caplog)
        assert os.strerror(number) in line
        assert "its entries are read, and nothing is written" in line
        record = assert_cold(tiny_engine, kept[1])
        assert (record.source, record.start) == ("spill", 304)
        assert_cold(tiny_engine, OTHER, user=OTHER.size)
        assert caches.nvme.stats()["written"] == 0
    assert files(directory) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every directory")
def test_a_directory_without_the_right_to_write(tiny_engine, kept, directory, caplog):
    os.chmod(directory, 0o500)
    with started(tiny_engine, directory):
        assert "its entries are read, and nothing is written" in caplog.text
        assert assert_cold(tiny_engine, kept[1]).source == "spill"
    os.chmod(directory, 0o700)


def test_a_directory_that_is_gone(tiny_engine, kept, directory, caplog):
    """rm -rf while it runs: what is missing is said entry by entry, that nothing can be written once. The next start makes it anew."""
    with started(tiny_engine, directory, session_spill=False) as caches:
        shutil.rmtree(directory)
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.why) == ("cold", "damaged")
        assert len(record.failed) == len(set(record.failed)) >= 1
        caches.clear()
        for tokens in (ASKED, HEAD, OTHER):
            record = assert_cold(tiny_engine, tokens, user=tokens.size)
            assert record.failed == []
        caches.nvme.drain()
        lines = warnings(caplog)
        missing = [line for line in lines if "cannot be used and is removed" in line]
        assert len(missing) == len(set(missing)) == len(lines) - 1
        assert "was removed while it was open" in lines[-1]
        assert caches.nvme.stats()["anchors"] == 0
    assert not directory.exists()
    with started(tiny_engine, directory):
        assert_cold(tiny_engine, HEAD, user=HEAD.size)
    with started(tiny_engine, directory):
        assert assert_cold(tiny_engine, ASKED).source == "spill"


def test_a_directory_that_another_engine_has_made_anew(tiny_engine, directory):
    """Gone, and made again by a second engine: the first one writes nothing into it."""
    with started(tiny_engine, directory, session_spill=False):
        first, pool = tiny_engine.caches, tiny_engine.pool
        shutil.rmtree(directory)
        with started(tiny_engine, directory, session_spill=False) as caches:
            second = tiny_engine.caches, tiny_engine.pool
            tiny_engine.caches, tiny_engine.pool = first, pool
            assert_cold(tiny_engine, OTHER, user=OTHER.size)
            first.nvme.drain()
            tiny_engine.caches, tiny_engine.pool = second
            recount(caches, directory)
            assert caches.nvme.stats()["pages"] == 0
        tiny_engine.caches, tiny_engine.pool = first, pool


def test_another_device_behind_a_link(tiny_engine, tmp_path):
    """A file system in memory, where there is one; the link is set to another place while the engine runs."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    place = memory / f"qjax-test-{os.getpid()}"
    place.mkdir()
    try:
        (tmp_path / "states").symlink_to(place)
        (tmp_path / "elsewhere").mkdir()
        with started(tiny_engine, tmp_path / "states", session_spill=False) as caches:
            answer(tiny_engine, HEAD, user=HEAD.size)
            caches.nvme.drain()
            (tmp_path / "states").unlink()
            (tmp_path / "states").symlink_to(tmp_path / "elsewhere")
            caches.clear()
            assert assert_cold(tiny_engine, ASKED).source == "disk"
        assert not list((tmp_path / "elsewhere").iterdir())
        with started(tiny_engine, place, **NOTHING_WRITTEN):
            assert assert_cold(tiny_engine, ASKED).start == 256
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
def test_a_clock_that_jumps_while_it_runs(tiny_engine, kept, directory, monkeypatch, jump):
    """Nothing is lost by it, and nothing lasts longer: with the old time back, all is as it was."""
    clock = time.time
    with started(tiny_engine, directory) as caches:
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
        assert_cold(tiny_engine, OTHER, user=OTHER.size)
        caches.nvme.drain()
        caches.clear()
        assert assert_cold(tiny_engine, kept[1]).start == 304
        assert assert_cold(tiny_engine, OTHER[:150]).start == 128
    monkeypatch.setattr(time, "time", clock)
    with started(tiny_engine, directory) as caches:
        now = clock() + 1
        assert all(filed.used <= now for filed in (*caches.nvme.index.anchors.values(), *caches.nvme.index.sessions.values()))
        caches.clear()
        assert assert_cold(tiny_engine, kept[1]).start >= 304
        assert assert_cold(tiny_engine, OTHER[:150]).start >= 128


@pytest.mark.parametrize(("jump", "days", "start"), [(YEAR, 7.0, 0), (YEAR, 400.0, 304), (-YEAR, 7.0, 304)])
def test_a_clock_that_jumped_before_a_start(tiny_engine, kept, directory, monkeypatch, jump, days, start):
    """A year ahead, what is a week old goes, as it is told to; a year back, nothing does."""
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump)
    with started(tiny_engine, directory, disk_days=days) as caches:
        assert assert_cold(tiny_engine, kept[1]).start == start
        assert_cold(tiny_engine, OTHER, user=OTHER.size)
        recount(caches, directory)
    with started(tiny_engine, directory, disk_days=days):
        assert assert_cold(tiny_engine, OTHER[:150]).start == 128


def test_foreign_files(tiny_engine, kept, directory):
    """A thousand of them beside the entries and a thousand above, some with names of ours: they stay, and nothing is served from them."""
    (inside,) = (path for path in directory.iterdir() if path.is_dir())
    for number in range(1000):
        (directory / f"{number}.txt").touch()
        (inside / f"{number}.txt").touch()
    for name in ("p-file", "a-file"):
        (inside / name).touch()
    for name in ("p-link", "s-link"):
        (inside / name).symlink_to(inside)
    shutil.copytree(entry(directory, PAGES[1]), inside / "music")
    before = {str(path) for path in directory.rglob("*") if path.suffix == ".txt" or path.name.endswith(("-file", "-link"))}
    with started(tiny_engine, directory) as caches:
        assert assert_cold(tiny_engine, kept[1]).start == 304
        assert_cold(tiny_engine, OTHER, user=OTHER.size)
        recount(caches, directory)
    assert {str(path) for path in directory.rglob("*") if path.suffix == ".txt" or path.name.endswith(("-file", "-link"))} == before
