"""Where the tier on NVMe has no room: a full disk, the space that is left to others, budgets. Nothing is lost for it, and it is said once."""

import errno
import shutil

import numpy as np

from qjax.caches.nvme.filed import DISK
from storage.directory import Directory
from tests.equivalence.nvme import GB, on_disk, recount, started
from tests.equivalence.nvme_damage import assert_cold, keys, warnings
from tests.equivalence.test_nvme_faults import ASKED, HEAD
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt
from tests.storage.children import run_with_mounts

OTHER = prompt(200, seed=4)


def test_a_start_where_not_even_the_first_entry_has_room(tiny_engine, tmp_path, caplog, monkeypatch):
    """The engine runs all the same, and the next start, with room, is a first one."""
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "committed", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with started(tiny_engine, tmp_path / "states"):
            (line,) = warnings(caplog)
            assert "golden cannot be written: [Errno 28] No space left on device" in line
            assert assert_cold(tiny_engine, HEAD, user=HEAD.size).source == "cold"
    with started(tiny_engine, tmp_path / "states", session_spill=False):
        answer(tiny_engine, HEAD, user=HEAD.size)
        tiny_engine.caches.nvme.drain()
        tiny_engine.caches.clear()
        assert assert_cold(tiny_engine, ASKED).source == "disk"


def test_a_disk_that_fills_up(tiny_engine, tmp_path, caplog, monkeypatch):
    """In the middle of a request's writes, for three requests: one line, and nothing is left that no anchor stands on. Then there is room again."""
    written, room = Directory.written, [3]

    def until_full(self, key, names):
        written(self, key, names)
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    directory = tmp_path / "states"
    with started(tiny_engine, directory) as caches:
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "written", until_full)
            for seed in range(3):
                assert_cold(tiny_engine, prompt(300, seed=seed), user=300)
                caches.nvme.drain()
        (line,) = warnings(caplog)
        assert "cannot be written: [Errno 28] No space left on device" in line
        stats = caches.nvme.stats()
        assert (stats["failed"] >= 3, stats["skipped"] >= 3, stats["damaged"]) == (True, True, 0)
        recount(caches, directory)
        assert_cold(tiny_engine, prompt(300, seed=5), user=300)
        caches.nvme.drain()
        caches.clear()
        assert assert_cold(tiny_engine, np.concatenate([prompt(280, seed=5), OTHER[:20]])).start == 256
        recount(caches, directory)
        assert len(warnings(caplog)) == 1


def test_a_disk_that_fills_up_at_a_planned_stop(tiny_engine, tmp_path, caplog, monkeypatch):
    """Of a conversation all or nothing: what was there before goes on being found."""
    directory = tmp_path / "states"
    with started(tiny_engine, directory, disk_gb=0):
        _, generated, _ = answer(tiny_engine, HEAD)
    turn = followed(HEAD, generated, prompt(20, seed=9))
    written, room = Directory.written, [2]

    def until_full(self, key, names):
        written(self, key, names)
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, started(tiny_engine, directory, disk_gb=0):
        assert assert_cold(tiny_engine, turn).start == 304
        patch.setattr(Directory, "written", until_full)
    (line,) = warnings(caplog)
    assert "No space left on device" in line
    with started(tiny_engine, directory, disk_gb=0) as caches:
        recount(caches, directory)
        record = assert_cold(tiny_engine, turn)
        assert (record.source, record.start) == ("spill", 304)


def states(directory) -> set[str]:
    """Keys of pages and anchors: the record of a conversation is another one when it is not the resident one any more."""
    return {key for key in on_disk(directory) if not key.startswith("s-")}


def test_what_cannot_be_written_whole_takes_nothing_with_it(tiny_engine, tmp_path, caplog, monkeypatch):
    """The second page of a conversation fails: no other entry of it is written, so that none makes way for them. Control: without that one goes."""
    directory = tmp_path / "states"
    with started(tiny_engine, directory, disk_gb=0):
        answer(tiny_engine, prompt(300, seed=1))
    before = on_disk(directory)
    budget = {"disk_gb": 0, "spill_gb": 1.3 * sum(before.values()) / GB}
    shutil.copytree(directory, tmp_path / "control")
    written, pages = Directory.written, []

    def failing(self, key, names):
        pages.extend([key] if key.startswith("p-") else [])
        if pages[1:] == [key]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, key, names)

    with monkeypatch.context() as patch, started(tiny_engine, directory, **budget):
        answer(tiny_engine, prompt(440, seed=2), 1)
        patch.setattr(Directory, "written", failing)
    assert 2 <= len(pages) <= 4
    assert states(directory) == states(tmp_path / "control")
    (line,) = warnings(caplog)
    assert "No space left on device" in line
    with started(tiny_engine, tmp_path / "control", **budget):
        answer(tiny_engine, prompt(440, seed=2), 1)
    assert before.keys().isdisjoint(on_disk(tmp_path / "control"))


def test_free_space_that_is_left_to_others(tiny_engine, kept, directory, caplog):
    """Nothing is written, which is said once; nothing that is there goes for it, and all of that serves."""
    before = keys(directory)
    with started(tiny_engine, directory, disk_free_gb=2**20) as caches:
        (line,) = warnings(caplog)
        assert line.startswith("nothing more is written: ")
        assert line.endswith("are free, and 1.04858e+06 are left to others (--disk-free-gb)")
        for seed in (4, 5):
            assert_cold(tiny_engine, prompt(300, seed=seed), user=300)
        caches.nvme.drain()
        stats = caches.nvme.stats()
        assert (stats["written"], stats["dropped_no_room"] >= 8, len(warnings(caplog))) == (0, True, 1)
        caches.clear()
        assert assert_cold(tiny_engine, kept[1]).start == 304
    assert {key for key in keys(directory) if not key.startswith("b-")} == {key for key in before if not key.startswith("b-")}


def test_an_entry_that_is_larger_than_the_budget(tiny_engine, kept, directory):
    """It is left out, and what is there does not go for it. The control: one that just fits makes all of it go."""
    with started(tiny_engine, directory, session_spill=False) as caches:
        nvme, anchors = caches.nvme, set(caches.nvme.index.anchors)
        assert not nvme.room.make(nvme.room.budget + 1)
        assert set(nvme.index.anchors) == anchors
        assert nvme.room.make(nvme.room.budget)
        assert not [a for a in nvme.index.anchors.values() if a.use == DISK]


REAL = """
import subprocess, sys
from pathlib import Path
import numpy as np
from qjax.config import EngineConfig
from qjax.engine import Engine
from tests.equivalence.nvme import recount, started
from tests.equivalence.nvme_damage import files, keep, assert_cold
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt, random_model, tiny_config

directory = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", directory], check=True)
engine = Engine(random_model(tiny_config()), EngineConfig(grid=64, context_tokens=448, compile_cache=Path(sys.argv[2])))
with started(engine, directory, caches={"cache_budget_gb": 0}) as caches:
    for seed in range(5):
        assert_cold(engine, prompt(300, seed=seed), user=300)
        caches.nvme.drain()
        recount(caches, directory)
    stats = caches.nvme.stats()
    assert stats["dropped_budget"] + stats["failed"] > 8 and stats["anchors"] > 3, stats
    caches.clear()
    found = [assert_cold(engine, np.concatenate([prompt(280, seed=seed), prompt(20, seed=9)])) for seed in range(4, -1, -1)]
    assert max(record.start for record in found) == 256 and not any(record.failed for record in found), found
    caches.nvme.drain()
    recount(caches, directory)
subprocess.run(["mount", "-o", "remount,ro", "tmpfs", directory], check=True)
with started(engine, directory) as caches:
    assert caches.nvme.storage.read_only
    record = assert_cold(engine, np.concatenate([prompt(280), prompt(25, seed=9)]))
    assert record.source in ("disk", "spill") and record.start >= 256, record
    assert_cold(engine, prompt(300, seed=7), user=300)
    assert caches.nvme.stats()["written"] == 0
subprocess.run(["mount", "-o", "remount,rw", "tmpfs", directory], check=True)
with started(engine, directory) as caches:
    recount(caches, directory)
print("all of it")
"""


def test_a_file_system_that_is_full_and_then_read_only(compile_cache, tmp_path):
    """1,200 KiB, of which a prompt's four pages and anchors take a third: what fitted serves, the rest leaves nothing behind."""
    (tmp_path / "small").mkdir()
    assert run_with_mounts(REAL, tmp_path / "small", compile_cache).endswith("all of it\n")
