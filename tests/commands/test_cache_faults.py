"""`qjax cache` over a directory in which more than an entry's bytes are wrong: it names what is, and the next engine mends or removes it."""

import os
import shutil
from pathlib import Path

import pytest

from qjax.cli import main
from storage import Storage
from tests.commands.cached import FIRST, as_json, ask, key_of, rows, shown, started, stopped

FIELDS = "fingerprint.json"
HARM = {
    "a bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "another field": lambda path: path.write_bytes(path.read_bytes().replace(b'"token"', b'"grid"')),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


def one(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(f"*/{pattern}")
    return found


@pytest.mark.parametrize("harm", HARM)
def test_fields_that_are_damaged(states, tiny_engine, capsys, caplog, harm):
    """The list is as before, --verify names the file, and an engine serves what is there and writes the file anew, in a log line."""
    file, before = one(states, FIELDS), rows(capsys, states)
    text = file.read_bytes()
    assert "nothing is damaged" in shown(capsys, states, "--verify")  # the control
    HARM[harm](file)
    assert rows(capsys, states).keys() == before.keys()
    assert f"{FIELDS} is damaged; the next engine writes it anew" in shown(capsys, states)
    out = shown(capsys, states, "--verify", status=1)
    assert f"damaged: {FIELDS}: " in out
    assert list(as_json(capsys, states, "--verify", status=1)["verified"]["damaged"]) == [FIELDS]
    assert key_of(capsys, states, "head", 256) in shown(capsys, states, "--explain", key_of(capsys, states, "head", 256))
    dry = as_json(capsys, states, "--prune", "--disk-gb", "0", "--dry-run")["pruned"]["removed"]
    assert sum(key in before and before[key]["what"] == "head" for key in dry) == 7
    assert shown(capsys, states, "--prune").startswith("removed 0 entries, 0 bytes\n")
    assert rows(capsys, states).keys() == before.keys()
    caplog.clear()
    started(tiny_engine, states)
    assert ask(tiny_engine, FIRST)[0] in ("disk", "spill")
    stopped(tiny_engine)
    (line,) = (record.getMessage() for record in caplog.records if FIELDS in record.getMessage())
    assert line == f"{file} was {'missing' if harm == 'gone' else 'damaged'}, and is written anew"
    assert file.read_bytes() == text
    assert "nothing is damaged" in shown(capsys, states, "--verify")


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_golden_entry_that_is_gone(states, capsys, harm):
    golden = one(states, "golden")
    if harm == "gone":
        shutil.rmtree(golden)
    else:
        (golden / "meta").write_bytes(b"")
    assert "damaged: golden: m" in shown(capsys, states, "--verify", status=1)
    assert list(as_json(capsys, states, "--verify", status=1)["verified"]["damaged"]) == ["golden"]


def test_pages_that_are_gone(states, tiny_engine, capsys, caplog):
    """Who stands on one is named; the next engine says in one line what it removed, and why a prompt is read again."""
    page = one(states, "p-" + key_of(capsys, states, "head", 256)[2:])
    before = rows(capsys, states)
    shutil.rmtree(page)
    bad = as_json(capsys, states, "--verify", status=1)["verified"]["damaged"]
    assert {before[key]["what"] for key in bad} == {"head", "part"}
    assert all(before[key]["tokens"] >= 256 for key in bad)
    assert "1 of the " in shown(capsys, states, "--verify", status=1)
    started(tiny_engine, states)
    (line,) = (record.getMessage() for record in caplog.records if "found unusable" in record.getMessage())
    assert line == f"{states}: found unusable at the start and removed: {len(bad)} that lack what they stand on"
    source, _ = ask(tiny_engine, FIRST)
    record = tiny_engine.caches.ledger.records[-1]
    assert (source, record.start, record.why) == ("disk", 192, "damaged")
    tiny_engine.caches.clear()
    ask(tiny_engine, FIRST[:230])
    assert tiny_engine.caches.ledger.records[-1].why != "damaged"  # the control: it did not have that page
    stopped(tiny_engine)
    assert "nothing is damaged" in shown(capsys, states, "--verify")
    started(tiny_engine, states)
    ask(tiny_engine, FIRST)
    assert tiny_engine.caches.ledger.records[-1].why != "damaged"
    stopped(tiny_engine)


def test_entries_that_lost_their_meta(states, tiny_engine, capsys, caplog):
    """They look like what a process left that ended while it wrote: named, counted in a dry run, and removed with a line at the start."""
    key = key_of(capsys, states, "head", 64)
    (one(states, key) / "meta").unlink()
    with Storage.open(states, tiny_engine.identity, read_only=True) as storage:
        assert storage.unfinished == [key]
    assert list(as_json(capsys, states, "--verify", status=1)["verified"]["damaged"]) == [key]
    assert "1 entry an engine had not finished: the next one removes what is there of it" in shown(capsys, states)
    dry, done = (as_json(capsys, states, "--prune", *flags)["pruned"] for flags in (["--dry-run"], []))
    assert (dry["unfinished"], dry | {"dry_run": False}) == (1, done)
    assert as_json(capsys, states)["fingerprints"][0]["unfinished"] == []
    (one(states, key_of(capsys, states, "head", 128)) / "meta").unlink()
    started(tiny_engine, states)
    assert any(r.getMessage() == f"{states}: found unusable at the start and removed: 1 unfinished" for r in caplog.records)
    stopped(tiny_engine)


def test_what_is_being_written_is_not_unfinished(states, tiny_engine, capsys):
    with Storage.open(states, tiny_engine.identity) as storage:
        storage._place.begin("p-new", ["K"])
        assert as_json(capsys, states)["fingerprints"][0]["unfinished"] == []
        assert "nothing is damaged" in shown(capsys, states, "--verify")
    assert list(as_json(capsys, states, "--verify", status=1)["verified"]["damaged"]) == ["p-new"]


def test_what_no_engine_wrote_stays(states, tiny_engine, capsys):
    """In a directory that could be an entry's; an engine of another fingerprint leaves it too."""
    notes = one(states, "golden").parent / "a-notes" / "todo.txt"
    notes.parent.mkdir()
    notes.write_text("buy milk")
    (notes.parent.parent / "p-x" / "K").mkdir(parents=True)
    (notes.parent.parent / "p-x" / "K" / "0.0").write_bytes(b"half")
    assert list(as_json(capsys, states, "--verify", status=1)["verified"]["damaged"]) == ["p-x"]
    assert as_json(capsys, states, "--prune")["pruned"]["unfinished"] == 1
    assert not (notes.parent.parent / "p-x").exists()
    with Storage.open(states, tiny_engine.identity | {"jax": "9.9"}) as storage:
        assert len(storage.stats()["swept"]) == 1
    assert notes.read_text() == "buy milk"
    assert sorted(os.listdir(notes.parent.parent)) == ["a-notes"]


def test_bookkeeping_is_not_counted(tiny_engine, tmp_path, capsys):
    started(tiny_engine, tmp_path / "states")
    stopped(tiny_engine)
    assert "\n0 entries, 0 bytes: " in shown(capsys, tmp_path / "states")
    assert as_json(capsys, tmp_path / "states")["fingerprints"][0]["entries"] == 0
    assert main(["cache", str(tmp_path / "states"), "--explain", "golden"]) == 0


def test_hits_of_a_conversation_that_was_read_back(states, tiny_engine, capsys):
    """It serves from memory, and the list says so all the same, also of the conversation that goes on with it."""
    last = key_of(capsys, states, "conversation", 204)
    assert rows(capsys, states)[last]["hits"] == 0  # the control
    started(tiny_engine, states)
    session = tiny_engine.caches.resident.resident
    assert session.filed == last
    turn = session.keys.astype("int32")
    assert ask(tiny_engine, turn)[0] == "spill"
    stopped(tiny_engine)
    served = [row for row in rows(capsys, states).values() if row["what"] == "conversation" and row["tokens"] > 204 - 5 and row["tokens"] < 300]
    assert [row["hits"] for row in served] == [1]
