"""`qjax cache --verify` and `--prune`: what is damaged is named, what goes is what was said, and looking changes nothing."""

import errno
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from qjax.cli import main
from storage import Storage
from tests.bits import assert_bits_equal
from tests.commands.cached import DAY, FIRST, as_json, ask, key_of, refused, rows, shown, snapshot, started, stopped
from tests.models import prompt


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_looking_changes_nothing(states, capsys):
    before = snapshot(states)
    key = key_of(capsys, states, "conversation", 304)
    for argv in ([], ["--all"], ["--json"], ["--verify"], ["--explain", key], ["--prune", "--dry-run", "--disk-gb", "0", "--verify"]):
        shown(capsys, states, *argv)
        assert snapshot(states) == before
    shown(capsys, states, "--prune", "--disk-gb", "0")
    assert snapshot(states) != before


def test_while_an_engine_has_the_directory(states, tiny_engine, capsys):
    assert shown(capsys, states, "--prune").startswith("removed 0 entries, 0 bytes\n")
    before = rows(capsys, states)
    with Storage.open(states, tiny_engine.identity) as storage:
        assert rows(capsys, states).keys() == before.keys()
        assert "nothing is damaged" in shown(capsys, states, "--verify")
        assert f"nothing was removed: {states} is in use by another engine (process {os.getpid()})" in refused(
            capsys, states, "--prune", "--disk-gb", "0"
        )
        assert "would remove" in shown(capsys, states, "--prune", "--disk-gb", "0", "--dry-run")
        storage.drop(head := key_of(capsys, states, "head", 256))
        assert head not in rows(capsys, states)
    assert before.keys() - rows(capsys, states).keys() >= {head}


def test_an_entry_that_goes_while_it_is_read_is_not_damaged(states, capsys, monkeypatch):
    real = Storage.get

    def get(storage, chain):
        shutil.rmtree(storage._place.path / chain[0][0])
        return real(storage, chain)

    monkeypatch.setattr(Storage, "get", get)
    monkeypatch.setattr("qjax.caches.nvme.admission.Admission.load", lambda *_: {})
    assert "nothing is damaged" in shown(capsys, states, "--verify")
    assert not list(states.glob("*/*/"))


@pytest.mark.parametrize("harm", ["sum", "size", "missing", "meta"])
def test_damage_is_named_and_goes_with_prune_only(states, tiny_engine, capsys, harm):
    before = rows(capsys, states)
    page = next(states.glob("*/p-" + key_of(capsys, states, "head", 192)[2:]))
    file = page / "meta" if harm == "meta" else next((page / "K").iterdir())
    if harm == "missing":
        file.unlink()
    elif harm == "size":
        os.truncate(file, 4096)
    else:
        flip(file, -1)
    assert page.name in shown(capsys, states, "--verify", status=1)
    assert list(as_json(capsys, states, "--verify", status=1)["verified"]["damaged"]) == [page.name]
    assert page.exists()

    over = {key for key, row in before.items() if (row["what"] == "head" and row["tokens"] >= 192) or row["what"] != "head"}
    told = as_json(capsys, states, "--verify", "--prune", status=1)["pruned"]
    assert not page.exists()
    assert "nothing is damaged" in shown(capsys, states, "--verify")
    gone = before.keys() - rows(capsys, states).keys()
    assert gone
    assert gone < over
    assert gone <= told["removed"].keys()
    started(tiny_engine, states)
    source, warm = ask(tiny_engine, FIRST)
    stopped(tiny_engine)
    assert source in ("disk", "spill")
    assert_bits_equal(warm, ask(tiny_engine, FIRST)[1])


def test_ctrl_c_while_it_reads(states, capsys, monkeypatch):
    real, before, calls = Storage.get, snapshot(states), []

    def get(storage, chain):
        calls.append(chain[0][0])
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return real(storage, chain)

    monkeypatch.setattr(Storage, "get", get)
    assert main(["cache", str(states), "--verify"]) == 130
    assert len(calls) == 5
    out, err = capsys.readouterr()
    assert (out, err[-52:]) == ("", "\nqjax: interrupted; nothing that was saved is lost\n"[-52:])
    assert snapshot(states) == before


def test_progress_has_a_rate_and_the_total(states, capsys):
    assert main(["cache", str(states), "--verify"]) == 0
    out, err = capsys.readouterr()
    total = re.match(r"\d+ entries, (.+?), read at .+/s: nothing is damaged\n", out)[1]
    lines = err.splitlines()
    assert len(lines) == 4
    assert all(re.fullmatch(rf"  read .+ of {re.escape(total)}, .+/s", line) for line in lines)


@pytest.mark.parametrize(
    ("flags", "what"),
    [(["--disk-gb", "0"], {"head"}), (["--spill-gb", "0"], {"conversation", "part"}), (["--disk-gb", "0", "--spill-gb", "0"], None), ([], set())],
)
def test_what_the_budgets_leave(states, capsys, flags, what):
    before = rows(capsys, states)
    dry = as_json(capsys, states, "--prune", "--dry-run", *flags)["pruned"]
    assert rows(capsys, states).keys() == before.keys()
    done = as_json(capsys, states, "--prune", *flags)
    assert done["pruned"] | {"dry_run": True} == dry
    assert done["pruned"]["not_removed"] == []
    went = {key for key in before if key in dry["removed"]}
    assert went == {key for key, row in before.items() if what is None or row["what"] in what}
    left = as_json(capsys, states)["fingerprints"][0]
    assert {row["key"] for row in left["rows"]} == before.keys() - went == {row["key"] for row in done["fingerprints"][0]["rows"]}
    assert left["useless"] == {"entries": 0, "nbytes": 0}


def test_the_least_valuable_and_the_longest_unused_go_first(states, capsys):
    before = rows(capsys, states)
    old = key_of(capsys, states, "conversation", 304)
    for key, days in {old: 3, key_of(capsys, states, "head", 256): 2}.items():
        os.utime(next(states.glob(f"*/{key}/meta")), (time.time() - days * DAY,) * 2)
    heads = [row for row in rows(capsys, states).values() if row["what"] == "head"]
    less = (as_json(capsys, states)["fingerprints"][0]["disk_nbytes"] - 1) / 2**30
    removed = as_json(capsys, states, "--prune", "--disk-days", "2.5", "--spill-gb", "1", "--disk-gb", less)["pruned"]["removed"]
    assert {key for key in removed if before.get(key, {}).get("what") == "conversation"} == {old}
    assert removed[old] == "unused"
    (out,) = (row for row in heads if row["key"] in removed)
    assert out["tokens"] == 256
    assert out["value"] == min(row["value"] for row in heads)


def test_what_no_engine_can_use(states, capsys):
    shutil.rmtree(sorted(states.glob("*/p-*"))[0])
    facts = as_json(capsys, states)["fingerprints"][0]
    assert facts["useless"]["entries"] > 0
    assert f"{facts['useless']['entries']} entries, " in shown(capsys, states)
    fields = json.loads(next(states.glob("*/fingerprint.json")).read_bytes()) | {"jax": "9.9"}
    del fields["storage"]
    with Storage.open(states.parent / "other", fields) as other:
        other.put("p-1", {"K": np.zeros(3)})
    os.utime(next((states.parent / "other").glob("*/p-1/meta")), (1, 1))
    (foreign,) = (states.parent / "other").glob("*/")
    shutil.move(foreign, states / foreign.name)
    said = next(line for line in shown(capsys, states).splitlines() if line.startswith(f"fingerprint {foreign.name[:8]}: 1 entry, "))
    assert said.endswith(f" (jax was 9.9, is {facts['fields']['jax']}): the next engine removes it")
    (states / ("0" * 32)).mkdir()
    (states / ("0" * 32) / "fingerprint.json").write_bytes(b"{")
    told = as_json(capsys, states, "--prune")["pruned"]
    assert set(told["removed"].values()) == {"of no use"}
    assert len(told["removed"]) == facts["useless"]["entries"]
    assert sorted(one["digest"] for one in told["others"]) == ["0" * 32, foreign.name]
    assert len(list(states.glob("*/"))) == 1
    assert as_json(capsys, states)["others"] == []


def refuse(number: int):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


def test_what_cannot_be_reached_stays(states, capsys, monkeypatch):
    before = rows(capsys, states).keys()
    with monkeypatch.context() as patch:
        patch.setattr("storage.direct.read", refuse(errno.EMFILE))
        assert "Too many open files" in shown(capsys, states, "--verify", "--prune", status=1)
    assert rows(capsys, states).keys() == before
    with monkeypatch.context() as patch:
        patch.setattr("storage.direct.read", refuse(errno.EIO))
        shown(capsys, states, "--verify", "--prune", status=1)
    assert not rows(capsys, states)


def test_what_cannot_be_removed_is_said(states, capsys, monkeypatch):
    monkeypatch.setattr("storage.directory.Directory.remove", refuse(errno.EACCES))
    key = key_of(capsys, states, "head", 64)
    out = shown(capsys, states, "--prune", "--disk-gb", "0", "--all", status=1)
    assert re.search(r"^could not remove \d+ entries: [ap]-", out, re.MULTILINE)
    assert key in rows(capsys, states)


def test_a_conversation_goes_with_its_last_state(tiny_engine, tmp_path, capsys):
    """All its states were heads: with those it could not be read back, and the next engine did not start."""
    settings = {"end_anchor": False}
    started(tiny_engine, tmp_path / "states", **settings)
    ask(tiny_engine, prompt(256), user=256)
    stopped(tiny_engine)
    kinds = [(row["what"], row["tokens"]) for row in rows(capsys, tmp_path / "states").values()]
    assert sorted(kinds) == [("conversation", 256), ("head", 64), ("head", 128), ("head", 192), ("head", 256)]
    copy = shutil.copytree(tmp_path / "states", tmp_path / "copy")
    removed = as_json(capsys, copy, "--prune", "--disk-gb", "0")["pruned"]["removed"]
    assert rows(capsys, tmp_path / "states").keys() <= removed.keys()
    started(tiny_engine, tmp_path / "states", disk={"disk_gb": 0, "session_spill": False}, **settings)
    assert not tiny_engine.caches.nvme.index.sessions
    assert ask(tiny_engine, prompt(256))[0] == "cold"
    stopped(tiny_engine)
