"""The ledger: what goes in comes out of memory and of the file, whatever happens to the file, and no request fails of it."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from qjax.ledger import HOPELESS, LONGEST, SOURCES, Ledger, Record, Why, read

FULL = Record(
    number=1,
    at=1.79e9,
    tenant="a",
    prompt_tokens=2000,
    source="resident",
    start=1024,
    read_again=276,
    agrees=1300,
    why=Why.DIFFERS,
    differs_at=1300,
    kept_text="on Monday\n\ud83d",
    found_text="on Tuesday ☂",
    failed=["store: checksum"],
    lookup_seconds=0.01,
    prefill_seconds=1.5,
    first_token_seconds=1.6,
    decode_seconds=2.0,
    generated=40,
    finish="stop",
    anchors_taken={"line": 1},
    anchors_dropped={"budget": 2},
)


def lines(path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_needs_no_jax():
    program = "import sys, qjax.ledger; print([m for m in ('jax', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_record_comes_back_as_it_was(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(path=path)
    records = [ledger.add(record) for record in (dataclasses.replace(FULL), Record(prompt_tokens=3))]
    assert list(read(path)) == ledger.records == records
    assert records[0] == FULL
    assert [record.number for record in records] == [1, 2]
    assert isinstance(next(read(path)).why, Why)
    assert json.loads(lines(path)[0]) == FULL.to_json()
    assert set(FULL.to_json()) == {field.name for field in dataclasses.fields(Record)}


def test_numpy_numbers_are_written(tmp_path):
    record = Record(prompt_tokens=np.int64(9), differs_at=np.int32(4), prefill_seconds=np.float32(0.5), anchors_taken={"line": np.int64(1)})
    Ledger(path=tmp_path / "ledger").add(record)
    (back,) = read(tmp_path / "ledger")
    assert back == record


def test_a_misspelled_field_is_an_error():
    with pytest.raises(AttributeError):
        Record(prompt_tokens=1).sauce = "cold"


def test_memory_keeps_the_newest_and_totals_keep_all():
    ledger = Ledger(limit=2)
    for n in (10, 20, 30):
        ledger.add(Record(prompt_tokens=n, source="end", start=n - 4, read_again=1))
    assert [record.number for record in ledger.records] == [2, 3]
    totals = ledger.totals()
    assert (totals["requests"], totals["prompt_tokens"], totals["reused"], totals["read_again"], totals["lost"]) == (3, 60, 48, 3, 0)
    assert ledger.resume_depths() == {4: 3}


def test_totals_count_every_source_and_reason():
    """B4: a prompt below the grid is counted as that, not as some miss. B9: a tier that never served shows as 0, it is not left out."""
    ledger = Ledger()
    assert ledger.totals()["by_why"] == dict.fromkeys(Why, 0)
    assert ledger.totals()["by_source"] == dict.fromkeys(SOURCES, 0)
    ledger.add(Record(prompt_tokens=500, why=Why.BELOW_GRID))
    ledger.add(Record(prompt_tokens=500, why=Why.EMPTY))
    ledger.add(Record(prompt_tokens=500, start=500, source="another tier"))
    totals = ledger.totals()
    assert {why: n for why, n in totals["by_why"].items() if n} == {"below_grid": 1, "empty": 1, "none": 1}
    assert {source: n for source, n in totals["by_source"].items() if n} == {"cold": 2, "another tier": 1}
    assert sum(totals["by_why"].values()) == sum(totals["by_source"].values()) == totals["requests"]
    json.dumps(totals)


def test_resume_depths_are_powers_of_two():
    ledger = Ledger()
    for depth in (0, 1, 2, 3, 4, 7, 8, 1023, 1024):
        ledger.add(Record(prompt_tokens=2000, start=2000 - depth, source="end"))
    ledger.add(Record(prompt_tokens=2000))  # cold: no resume
    assert ledger.resume_depths() == {0: 1, 1: 1, 2: 2, 4: 2, 8: 1, 512: 1, 1024: 1}
    assert list(ledger.resume_depths()) == sorted(ledger.resume_depths())


def test_the_file_is_private_and_grows(tmp_path):
    path = tmp_path / "ledger"
    before = os.umask(0)
    try:
        Ledger(path=path).add(Record(prompt_tokens=1))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    Ledger(path=path).add(Record(prompt_tokens=2))  # another process, later
    assert [record.prompt_tokens for record in read(path)] == [1, 2]


def test_a_wrong_path_is_told_at_the_start(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Ledger(path=tmp_path / "nowhere" / "ledger")
    with pytest.raises(IsADirectoryError):
        Ledger(path=tmp_path)


def test_a_removed_directory_loses_records_and_no_request(tmp_path, capsys):
    directory = tmp_path / "logs"
    directory.mkdir()
    ledger = Ledger(path=directory / "ledger")
    ledger.add(Record(prompt_tokens=1))
    (directory / "ledger").unlink()
    directory.rmdir()
    for n in (2, 3):
        ledger.add(Record(prompt_tokens=n))
    assert ledger.totals()["lost"] == ledger.lost == 2
    assert [record.prompt_tokens for record in ledger.records] == [1, 2, 3]
    error = capsys.readouterr().err
    assert error.startswith("qjax: the ledger loses records: ")
    assert error.count("\n") == 1
    directory.mkdir()
    ledger.add(Record(prompt_tokens=4))
    assert [record.number for record in read(directory / "ledger")] == [4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_full_disk_loses_records_and_no_request(monkeypatch):
    ledger = Ledger(path="/dev/full")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)  # nobody can be warned either
    ledger.add(Record(prompt_tokens=1))
    assert ledger.lost == 1


def test_a_write_that_was_cut_off_costs_its_own_record_only(tmp_path):
    """The file may grow by a record and a half; then there is room again, as after a disk was full."""
    path = tmp_path / "ledger"
    program = (
        "import resource, sys\n"
        "from qjax.ledger import Ledger, Record\n"
        "ledger = Ledger(path=sys.argv[1])\n"
        "ledger.add(Record(at=1.0, prompt_tokens=1))\n"
        "size = len(open(sys.argv[1], 'rb').read())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, resource.RLIM_INFINITY))\n"
        "ledger.add(Record(at=1.0, prompt_tokens=2))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "ledger.add(Record(at=1.0, prompt_tokens=3))\n"
        "print(ledger.lost)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert done.stderr.count("the ledger loses records") == 1
    damaged = []
    assert [record.prompt_tokens for record in read(path, lambda line, reason: damaged.append(line))] == [1, 3]
    assert damaged == [2]


def test_a_torn_last_line_does_not_take_the_next_record_with_it(tmp_path):
    path = tmp_path / "ledger"
    for n in (1, 2):
        Ledger(path=path).add(Record(prompt_tokens=n))
    path.write_bytes(path.read_bytes()[:-40])
    damaged = []
    assert [record.prompt_tokens for record in read(path, lambda line, reason: damaged.append(line))] == [1]
    Ledger(path=path).add(Record(prompt_tokens=3))
    assert [record.prompt_tokens for record in read(path, lambda line, reason: damaged.append(line))] == [1, 3]
    assert damaged == [2, 2]


def test_a_last_line_without_its_end_is_whole(tmp_path):
    path = tmp_path / "ledger"
    Ledger(path=path).add(Record(prompt_tokens=1))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(list(read(path))) == 1


def changed(**values) -> bytes:
    return json.dumps(FULL.to_json() | values).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "Expecting value"),
        (b"\0" * 50, "Expecting value"),
        (b"\xff\xfe{}", "decode byte 0xff"),
        (b"[" * 100_000, "recursion"),
        (b"x" * LONGEST, "Expecting value"),
        (b"[]", "expected a record, found []"),
        (b"{}", "agrees: missing"),
        (changed(extra=1), "extra: no such field"),
        (changed(why="bored"), "why: expected one of empty, differs"),
        (changed(why=[]), "why: expected one of"),
        (changed(start=-1), "start: expected a count, found -1"),
        (changed(start=True), "start: expected a count, found true"),
        (changed(start=1.5), "start: expected a count"),
        (changed(number=10**30), "number: expected a count"),
        (changed(at=float("inf")), "at: expected seconds"),
        (changed(at=1e300), "at: expected seconds"),
        (changed(decode_seconds="1"), 'decode_seconds: expected seconds, found "1"'),
        (changed(differs_at="x"), "differs_at: expected a count or null"),
        (changed(kept_text=1), "kept_text: expected text or null"),
        (changed(failed="store"), "failed: expected a list of texts"),
        (changed(anchors_taken={"line": "x"}), "anchors_taken: expected counts by name"),
        (changed(source=None), "source: expected text, found null"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_line_is_skipped_and_named(tmp_path, line, reason):
    path = tmp_path / "ledger"
    path.write_bytes(changed() + b"\n" + line + b"\n" + changed(number=2) + b"\n")
    damaged = []
    assert [record.number for record in read(path, lambda *what: damaged.append(what))] == [1, 2]
    assert damaged[0][0] == 2
    assert reason in damaged[0][1]


def test_what_is_no_ledger_is_said_early(tmp_path):
    path = tmp_path / "notes"
    path.write_text("notes\n" * 10 * HOPELESS)
    damaged = []
    with pytest.raises(ValueError, match="notes: not a ledger: line 1: Expecting value"):
        list(read(path, lambda line, reason: damaged.append(line)))
    assert len(damaged) == HOPELESS
    path.write_bytes(b"")
    assert list(read(path)) == []


def test_threads_may_write_and_look_at_once(tmp_path):
    ledger = Ledger(limit=8, path=tmp_path / "ledger")

    def work():
        for _ in range(100):
            ledger.add(Record(prompt_tokens=1))
            kept = len(ledger.records)
            assert ledger.totals()["requests"] >= kept > 0

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.number for record in read(tmp_path / "ledger")] == list(range(1, 401))
