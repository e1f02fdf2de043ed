"""`qjax bench storage`: figures of the right kind, bits that are checked, and nothing left behind, however it ends."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from qjax.bench import storage as bench
from qjax.bench.filed import Filed
from qjax.bench.raw import Raw
from qjax.bench.storage import MEMORY, RESTORES, Cost, Pairs, file_system, needed, sizes
from qjax.cli import main
from qjax.commands.bench import show_storage
from qjax.state import Layout, Section, View
from storage import Full, Storage
from tests.bits import assert_bits_equal

MIB = 2**20
TINY = Layout(
    sections=(Section("S", (2, 4, 8), "float32"), Section("c", (3, 5), "bfloat16")),
    open=(Section("u", (2, 7), "bfloat16"),),
    views=(View("K", 2, 2, 8, "bfloat16"), View("V", 1, 2, 8, "float32")),
    grid=64,
)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch) -> Path:
    """An empty one on a disk, and small sizes."""
    if file_system(tmp_path) in MEMORY or not hasattr(os, "O_DIRECT"):
        pytest.skip("the tests' directory is in memory, or the system has no O_DIRECT")
    monkeypatch.setattr(bench, "sizes", lambda: TINY)
    monkeypatch.setattr(bench, "RESTORES", (128, 200))
    monkeypatch.setattr(bench, "SPARE", 0)
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def run(directory: Path, *more: str) -> int:
    return main(["bench", "storage", "--directory", str(directory), "--pages", "3", "--rounds", "2", *more])


def numbers(found) -> list[float]:
    if isinstance(found, dict | list):
        return [n for one in (found.values() if isinstance(found, dict) else found) for n in numbers(one)]
    return [found] if isinstance(found, int | float) else []


def test_figures(directory, capsys):
    assert run(directory, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {"read_ratio", "write_ratio", "verify_share", "cpu_s_per_gb", "read", "write", "anchor", "restores"}
    assert all(math.isfinite(n) and n > 0 for n in numbers(found))
    assert (found["pages"], found["rounds"], found["directory"]) == (3, 2, str(directory))
    assert (found["page_bytes"], found["anchor_bytes"]) == (TINY.page_bytes + 64 * 12, TINY.section_bytes)
    assert (found["read_ratio"], found["write_ratio"]) == (found["read"]["ratio"], found["write"]["ratio"])
    assert found["verify_share"] < 1
    for pairs in (found["read"], found["write"], *found["anchor"].values(), *found["restores"]):
        assert len(pairs["ratios"]) == 2
        assert min(pairs["ratios"]) <= pairs["ratio"] <= max(pairs["ratios"])
    head, conversation = found["restores"]
    assert [(one["tokens"], one["pages"]) for one in found["restores"]] == [(128, 2), (200, 4)]
    assert head["bytes"] == 2 * found["page_bytes"] + TINY.section_bytes
    assert conversation["bytes"] == 4 * found["page_bytes"] + TINY.section_bytes + TINY.open_bytes  # it ends off a block line
    assert list(directory.iterdir()) == []


def test_a_table_for_people(directory, capsys):
    assert run(directory) == 0
    shown = capsys.readouterr().out
    for row in ("write 3 pages", "restore 3 pages", "write an anchor", "restore 128 tokens", "restore 200 tokens", "sums are checked in"):
        assert row in shown
    assert list(directory.iterdir()) == []


def test_the_table_has_the_figures():
    pairs = Pairs(10**9, [Cost(1, 0.1), Cost(3, 0.1), Cost(1, 0.1)], [Cost(2, 0.5), Cost(4, 0.7), Cost(4, 0.6)]).as_json()
    assert (pairs["ratio"], pairs["ratios"]) == (0.5, [0.5, 0.75, 0.25])
    assert pairs["ours"] == {"gb_s": 0.25, "cpu_s_per_gb": 0.6}
    found = {"directory": "/d", "file_system": "ext4", "rounds": 3, "pages": 15, "page_bytes": 104 * MIB, "anchor_bytes": 147 * MIB}
    found |= {"read": pairs, "write": pairs, "anchor": {"read": pairs, "write": pairs}, "verify_share": 0.042}
    console = Console(file=io.StringIO(), width=80)  # it fits a terminal
    show_storage(found | {"restores": [{"tokens": 41719, "seconds": 2.5, "raw_seconds": 1.25} | pairs]}, console)
    shown = console.file.getvalue()
    assert "/d (ext4), pages of 104 MiB, an anchor of 147 MiB, 3 rounds" in " ".join(shown.split())
    rows = {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in shown.splitlines() if "│" in line}
    assert rows["restore 15 pages"] == ["1.00 GB/s", "0.25 GB/s", "0.50", "0.25-0.75", "0.60"]
    assert rows["restore 41,719 tokens"] == ["1.25 s", "2.50 s", "0.50", "0.25-0.75", "0.60"]
    assert "4.2% of a restore's time" in " ".join(shown.split())


def test_the_sizes_are_the_27bs(monkeypatch):
    monkeypatch.setattr(bench, "RESTORES", RESTORES)
    of = sizes()
    assert (of.page_bytes, of.section_bytes, of.grid) == (104 * MIB, 153_944_064, 1024)
    assert [v.page_shape(1024) for v in of.views][::2] == [(16, 4, 1024, 256), (1, 4, 1024, 256), (9, 4, 1024, 256)]
    assert {v.name for v in of.views} == {f"{of}{name}" for of in ("", "mtp.", "dflash.") for name in "KV"}
    assert 4 * 2**30 < needed(of, 15) < 5 * 2**30
    assert needed(of, 100) > 200 * of.page_bytes


@pytest.fixture
def filed(directory):
    filed = Filed(directory / "filed", TINY, 200)
    filed.write()
    yield filed
    filed.close()


def test_a_restore_brings_back_what_was_written(filed):
    filed.check()
    filed.restore()
    assert filed.nbytes == sum(path.stat().st_size for path in filed.files()) == filed.storage.stats()["nbytes"]
    assert filed.storage.stats()["got_nbytes"] == 2 * filed.nbytes


@pytest.mark.parametrize("what", ["K", "S"])
def test_other_bits_are_seen(filed, what):
    """The control: of a row, and of a section."""
    if what == "S":
        filed.anchor["section.S"] = np.zeros_like(filed.anchor["section.S"])
    else:
        filed.pages["p-0"]["K"] = np.zeros(TINY.views[0].page_shape(64), np.uint16)
    with pytest.raises(RuntimeError, match=r"200 tokens came back from .* with other bits than were written"):
        filed.check()


def test_raw_moves_every_byte(directory):
    """Into files that are durable under their names only, and from files that end within a page."""
    raw = Raw(10**6)
    try:
        raw.write(directory / "a", 10**6)
        assert [path.name for path in directory.iterdir()] == ["a"]
        assert (directory / "a").read_bytes() == raw._bytes.tobytes()
        (directory / "b").write_bytes(raw._bytes[: 10**6].tobytes())
        raw.read([directory / "a", directory / "b"])
        assert_bits_equal(raw._into[: 10**6], raw._bytes[: 10**6])
    finally:
        raw.close()


def test_a_disk_without_room(directory, capsys, monkeypatch):
    monkeypatch.setattr(bench, "SPARE", 2**60)
    assert run(directory) == 2
    assert "GiB free, expected 0.0 GiB and 1073741824 to spare: take another --directory or fewer --pages" in capsys.readouterr().err
    assert list(directory.iterdir()) == []


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK) or file_system(Path("/dev/shm")) not in MEMORY, reason="no directory in memory")
def test_a_directory_in_memory(capsys):
    before = set(os.listdir("/dev/shm"))
    assert run(Path("/dev/shm")) == 2
    assert "/dev/shm is in memory (tmpfs): expected a directory on the disk to measure" in capsys.readouterr().err
    assert set(os.listdir("/dev/shm")) == before


def test_a_system_without_o_direct(directory, capsys, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    assert run(directory) == 2
    assert "expected a system with O_DIRECT" in capsys.readouterr().err
    assert list(directory.iterdir()) == []


def test_a_disk_that_fills_up(directory, capsys, monkeypatch):
    def full(self, key, arrays, **fields):
        raise Full(f"{key} cannot be written: No space left on device")

    monkeypatch.setattr(Storage, "put", full)
    assert run(directory) == 2
    assert "not all of 3 pages and an anchor could be written" in capsys.readouterr().err
    assert list(directory.iterdir()) == []


BEGUN = """
import sys
from qjax import cli
from qjax.bench import storage as bench
from qjax.bench.filed import Filed
from tests import test_bench_storage as here
bench.sizes, bench.SPARE = lambda: here.TINY, 0
write = Filed.write
def told(filed):
    print("begun", flush=True)
    write(filed)
Filed.write = told
sys.exit(cli.main(["bench", "storage", "--directory", sys.argv[1], "--pages", "50", "--rounds", "1000000"]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_in_the_middle_it_leaves_nothing(directory, number, status):
    with subprocess.Popen([sys.executable, "-c", BEGUN, directory], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            assert process.stdout.readline() == "begun\n"
        assert len(list(directory.iterdir())) == 1
        process.send_signal(number)
        assert process.wait() == status
        assert "Traceback" not in process.stderr.read()
    assert list(directory.iterdir()) == []
