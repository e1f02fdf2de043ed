"""`qjax cache` on the directory that a tiny engine left: what is told is what was done, and looking changes nothing."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from qjax.caches.lookup import Caches
from qjax.caches.nvme.disk import Nvme
from qjax.caches.nvme.filed import FiledAnchor
from qjax.caches.nvme.place import open_storage
from qjax.cli import main
from qjax.config import CacheConfig, DiskConfig
from qjax.pages import PagePool
from storage import Storage
from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import kept
from tests.storage.test_bucket import s3_server

GRID = 64
FIRST, SECOND = prompt(300), prompt(200, seed=4)
FIELDS = {"grid": str(GRID), "exactness": "token", "jax": "0.0"}
DAY = 86_400


def started(engine, directory: Path) -> None:
    """The engine with new caches over the directory."""
    config = DiskConfig(disk_cache=str(directory), disk_free_gb=0, disk_min_tokens=64, spill_min_tokens=128)
    engine.pool = PagePool(engine.layout, engine.pool.pages)
    nvme = Nvme(engine.pool, open_storage(config, engine.identity, engine.golden), config, engine.level)
    engine.caches = Caches(engine.pool, CacheConfig(), engine.level, engine.model.tokenizer.decode, nvme)


def ask(engine, tokens, **more) -> tuple[str, list[int], dict]:
    """(source, answer, what is kept)."""
    run = engine.generate(tokens, max_tokens=5, **more)
    answer, sequence = [token.id for token in run], run.sequence
    engine.release(sequence)
    return engine.caches.ledger.records[-1].source if engine.caches else "", answer, kept(engine.pool, sequence)


@pytest.fixture(scope="module")
def written(tiny_engine, tmp_path_factory) -> Path:
    """Left by a planned stop: two conversations, one of whose heads was read back once."""
    directory = tmp_path_factory.mktemp("cache") / "states"
    started(tiny_engine, directory)
    ask(tiny_engine, FIRST, user=250)
    tiny_engine.caches.nvme._writer.drain()
    tiny_engine.caches.clear()
    assert ask(tiny_engine, FIRST)[0] == "disk"
    ask(tiny_engine, SECOND)
    tiny_engine.close()
    tiny_engine.caches = None
    return directory


@pytest.fixture
def states(written, tmp_path) -> Path:
    return shutil.copytree(written, tmp_path / "states")


@pytest.fixture
def made(tmp_path):
    """Call it with lengths: a directory of a head of each, all of one chain and 16 bytes each over pages of 32."""

    def make(*lengths: int) -> Path:
        keys, sizes = np.arange(max(lengths)), {"section.S": np.zeros(4, np.float32)}
        with Storage.open(tmp_path / "made", FIELDS) as storage:
            for length in lengths:
                ends = [min(end, length) for end in range(GRID, length + GRID, GRID)]
                for end in ends:
                    storage.put(f"p-{end:032}", {"K": np.full(8, end, np.float32)}, rows=GRID)
                tail = keys[length - length % GRID : length]
                fields = FiledAnchor.fields("end", length, f"{length - length % GRID:032}", tail, [f"p-{end:032}" for end in ends], False, "disk")
                storage.put(f"a-{length:032}", sizes, **fields)
        return tmp_path / "made"

    return make


def snapshot(directory: Path) -> dict:
    found = {path: path.lstat() for path in (directory, *directory.rglob("*"))}
    return {path: (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_mode) for path, stat in found.items()}


def shown(capsys, *argv, status: int = 0) -> str:
    assert main(["cache", *map(str, argv)]) == status
    return capsys.readouterr().out


def as_json(capsys, *argv, status: int = 0) -> dict:
    (line,) = shown(capsys, *argv, "--json", status=status).splitlines()
    return json.loads(line)


def rows(capsys, directory: Path) -> dict[str, dict]:
    return {row["key"]: row for row in as_json(capsys, directory)["fingerprints"][0]["rows"]}


def refused(capsys, *argv) -> str:
    assert main(["cache", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qjax: error: ")
    assert err.count("\n") == 1
    return err


def key_of(capsys, directory: Path, what: str, tokens: int) -> str:
    """Of the first in the list that is it."""
    return next(row["key"] for row in rows(capsys, directory).values() if (row["what"], row["tokens"]) == (what, tokens))


def a_page(directory: Path) -> Path:
    return sorted(directory.glob("*/p-*"))[0]


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_the_list(states, capsys):
    listed = rows(capsys, states)
    kinds = [(row["what"], row["tokens"]) for row in listed.values()]
    assert sorted(kinds) == sorted(
        [("conversation", 304), ("part", 304), ("part", 300), ("conversation", 204), ("part", 204), ("part", 200)]
        + [("head", n) for n in (64, 128, 192, 256, 64, 128, 192)]
    )
    assert {row["tokens"]: row["hits"] for row in listed.values() if row["hits"]} == {192: 1, 304: 1}
    for row in listed.values():
        assert bool(row["of"]) == (row["what"] == "part")
        assert row["of"] is None or listed[row["of"]]["what"] == "conversation"
    heads = [row["used"] for row in listed.values() if row["what"] == "head"]
    assert heads == sorted(heads, reverse=True)
    lines = shown(capsys, states).splitlines()
    assert lines[0].startswith(f"{states}: ")
    assert "exactness token, grid 64, jax 0." in lines[2]
    assert len([line for line in lines if re.match("[as]-[0-9a-f]{8} ", line)]) == len(listed)


def test_bytes_and_values(states, capsys):
    facts = as_json(capsys, states)["fingerprints"][0]
    sizes = {path.name: sum(file.stat().st_size for file in path.glob("*/*")) for path in next(states.glob("*/")).glob("*/")}
    listed = {row["key"]: row for row in facts["rows"]}
    assert facts["entries"] == len(sizes)
    assert facts["nbytes"] == sum(sizes.values())
    assert facts["disk_nbytes"] + facts["spill_nbytes"] == sum(size for key, size in sizes.items() if key.startswith(("p-", "a-")))
    now = time.time()
    for head in (row for row in listed.values() if row["what"] == "head"):
        assert head["nbytes"] == sizes[head["key"]]  # a longer one stands on each of its pages
        fresh = (head["hits"] + 1) * GRID / head["nbytes"]
        assert fresh * 0.5 ** ((now - head["used"] + 60) / DAY) < head["value"] <= fresh
    whole = key_of(capsys, states, "conversation", 304)
    parts = [row["nbytes"] for row in listed.values() if row["of"] == whole]
    page = max(sizes[key] for key in sizes if key.startswith("p-"))
    assert listed[whole]["nbytes"] == sum(sizes[row["key"]] for row in listed.values() if row["of"] == whole) + page
    assert max(parts) < listed[whole]["nbytes"]


def test_a_value_counts_from_the_next_shorter_one(made, capsys):
    """Of anchors with one last line the index took any as the next shorter one."""
    lengths = range(129, 141)
    directory = made(128, *lengths)
    for length in lengths:
        assert as_json(capsys, directory, "--explain", f"a-{length:032}")["saves"] == 1


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
    try:
        source, *warm = ask(tiny_engine, FIRST)
    finally:
        tiny_engine.close()
        tiny_engine.caches = None
    assert source in ("disk", "spill")
    assert_bits_equal(warm[1], ask(tiny_engine, FIRST)[2])


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
    assert rows(capsys, states) == before
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
    most = sum(row["nbytes"] for row in heads) / 2**30
    removed = as_json(capsys, states, "--prune", "--disk-days", "2.5", "--spill-gb", "0.01", "--disk-gb", "0.00075")["pruned"]["removed"]
    assert most > 0.00045
    assert {key for key in removed if before.get(key, {}).get("what") == "conversation"} == {old}
    assert removed[old] == "unused"
    out = [row for row in heads if row["key"] in removed]
    assert 256 in [row["tokens"] for row in out]
    assert max(row["value"] for row in out) <= min(row["value"] for row in heads if row["key"] not in removed)


def test_what_no_engine_can_use(states, capsys):
    shutil.rmtree(a_page(states))
    facts = as_json(capsys, states)["fingerprints"][0]
    assert facts["useless"]["entries"] > 0
    assert f"{facts['useless']['entries']} entries, " in shown(capsys, states)
    with Storage.open(states.parent / "other", FIELDS | {"jax": "9.9"}) as other:
        other.put("p-1", {"K": np.zeros(3)})
    os.utime(next((states.parent / "other").glob("*/p-1/meta")), (1, 1))
    (foreign,) = (states.parent / "other").glob("*/")
    shutil.move(foreign, states / foreign.name)
    assert f"fingerprint {foreign.name[:8]}: 1 entry, " in shown(capsys, states)
    assert re.search(r"jax was 9\.9, is 0\.", shown(capsys, states).replace("\n", " ")) or "more): the next engine removes it" in shown(
        capsys, states
    )
    (states / ("0" * 32)).mkdir()
    (states / ("0" * 32) / "fingerprint.json").write_bytes(b"{")
    told = as_json(capsys, states, "--prune")["pruned"]
    assert set(told["removed"].values()) == {"of no use"}
    assert len(told["removed"]) == facts["useless"]["entries"]
    assert sorted(one["digest"] for one in told["others"]) == ["0" * 32, foreign.name]
    assert len(list(states.glob("*/"))) == 1
    assert as_json(capsys, states)["others"] == []


def test_explained(states, capsys):
    head = key_of(capsys, states, "head", 192)
    out = shown(capsys, states, "--explain", head[:12])
    assert f"{head} is a head that prompts begin with: the state after 192 tokens." in out
    assert "(1 hit + 1) × 64 tokens" in out or "(0 hits + 1) × 64 tokens" in out
    facts = as_json(capsys, states, "--explain", head)
    assert [(page["first"], page["tokens"]) for page in facts["pages"]] == [(0, 64), (64, 64), (128, 64)]
    assert [len(page["shared"]["heads"]) for page in facts["pages"]] == sorted((len(p["shared"]["heads"]) for p in facts["pages"]), reverse=True)
    assert all(head not in page["shared"]["heads"] for page in facts["pages"])
    whole = as_json(capsys, states, "--explain", key_of(capsys, states, "conversation", 204))
    assert (whole["resident"], whole["turns"], whole["of_its_kind"], whole["before"]) == (True, 1, 2, 1)
    assert [row["tokens"] for row in whole["anchors"]] == [64, 128, 192, 200, 204]
    assert whole["pages"][-1]["tokens"] == 204 - 192
    assert whole["pages"][-1]["shared"] == {"heads": [], "parts": [], "conversations": []}
    page = facts["pages"][0]["key"]
    assert "the rows of tokens 0 to 63" in shown(capsys, states, "--explain", page)
    for key, words in {"golden": "a digest of the bits", "b-": "the hits of 1 state", whole["key"]: "reads the last such one back"}.items():
        assert words in shown(capsys, states, "--explain", key)
    shutil.rmtree(next(states.glob(f"*/{page}")))
    assert "is of no use" in shown(capsys, states, "--explain", head)


def test_no_ids_are_shown(states, capsys):
    listed = rows(capsys, states)
    texts = [shown(capsys, states, "--json"), *(shown(capsys, states, "--explain", key, *more) for key in listed for more in ([], ["--json"]))]
    assert "tail" in next(states.glob(f"*/{key_of(capsys, states, 'part', 204)}/meta")).read_bytes().decode(errors="replace")
    assert all("tail" not in text and f"{SECOND[192]}, {SECOND[193]}" not in text for text in texts)


@pytest.mark.parametrize(("key", "said"), [("nope", "begins none"), ("a-", "begins 11: a-"), ("", "begins ")])
def test_a_key_that_is_not_one(states, capsys, key, said):
    assert f"found {key!r}, which {said}" in refused(capsys, states, "--explain", key)


def test_long_lists_are_cut(made, capsys):
    directory = made(*range(64, 64 + 25))
    cut = [line for line in shown(capsys, directory).splitlines() if line]
    assert cut[-1] == "... and 5 more: --all shows them"
    assert len([line for line in cut if line.startswith("a-0")]) == 20
    assert len([line for line in shown(capsys, directory, "--all").splitlines() if line.startswith("a-0")]) == 25
    keys = {line.split()[0] for line in cut if line.startswith("a-0")}
    assert len(keys) == 20  # as many characters as tell them apart


@pytest.mark.parametrize("width", [20, 80, 200])
def test_every_width_shows_every_number(states, capsys, monkeypatch, width):
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width), "LINES": "25"}.items():
        monkeypatch.setenv(name, value)
    lines = re.sub("\x1b\\[[0-9;]*m", "", shown(capsys, states)).splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("key"[: width // 8]))) :]
    if width >= 80:
        assert all(len(line) <= 80 for line in table)
    assert "conversation" in "".join("".join(table).split()) or width < 80


def test_what_is_no_cache(states, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    (tmp_path / "photos" / "b.jpg").touch()
    (part,) = states.glob("*/")
    cases = {
        tmp_path / "nowhere": "expected the directory of a disk cache, found nothing",
        tmp_path / "file": "expected the directory of a disk cache, found a file",
        tmp_path / "photos": "found 'a.jpg' and 1 more",
        part: f"found a part of one: take {states}",
    }
    for argv in ([], ["--verify"], ["--prune"], ["--explain", "a-"]):
        for place, words in cases.items():
            assert words in refused(capsys, place, *argv)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    for argv in ([], ["--prune"]):
        assert "It holds nothing yet." in shown(capsys, tmp_path / "empty", *argv)
    assert as_json(capsys, tmp_path / "empty")["fingerprints"] == []
    assert not list((tmp_path / "empty").iterdir())


def test_the_default_directory(states, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(states.parent))
    assert f"{states.parent}/.cache/qjax/states: expected" in refused(capsys)
    (states.parent / ".cache" / "qjax").mkdir(parents=True)
    states.rename(states.parent / ".cache" / "qjax" / "states")
    assert len(as_json(capsys)["fingerprints"][0]["rows"]) == 13


def test_flags_that_do_not_go_together(states, capsys):
    cases = {
        ("--disk-gb", "1"): "--disk-gb is given with --prune",
        ("--dry-run",): "--dry-run is given with --prune",
        ("--explain", "a-", "--verify"): "--explain is given without",
        ("--prune", "--disk-gb", "-1"): "disk_gb must be a number of GiB",
        ("--prune", "--disk-days", "-1"): "disk_days must be",
        ("--disk-endpoint", "http://127.0.0.1:1"): "disk_endpoint must be given with an s3:// bucket",
    }
    for argv, words in cases.items():
        assert words in refused(capsys, states, *argv)
    for place in ("none", "ftp://x"):
        with pytest.raises(SystemExit):
            main(["cache", place])


def test_a_bucket(states, tiny_engine, capsys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    with s3_server() as server:
        place = ["s3://bucket/states", "--disk-endpoint", server["endpoint"]]
        assert "It holds nothing yet." in shown(capsys, *place)
        with (
            Storage.open(states, tiny_engine.identity, read_only=True) as source,
            Storage.open(place[0], tiny_engine.identity, options=server) as target,
            Storage.open(place[0], FIELDS, options=server),
        ):
            for key, entry in source.entries().items():
                arrays = entry.empty()
                assert source.get([(key, arrays)]) == 1
                target.put(key, arrays, **entry.fields)
        found = as_json(capsys, *place)
        assert [len(one["rows"]) for one in found["fingerprints"]] == [13, 0]
        assert (found["free"], found["others"]) == (None, [])
        assert "nothing is damaged" in shown(capsys, *place, "--verify")
        assert "engines share a bucket" in refused(capsys, *place, "--prune")
        assert "s3://nowhere" in refused(capsys, "s3://nowhere/x", *place[1:])


def test_help_says_what_every_column_means(states, capsys):
    head = next(line for line in shown(capsys, states).splitlines() if line.startswith("key"))
    with pytest.raises(SystemExit):
        main(["cache", "--help"])
    out = capsys.readouterr().out
    for name in head.split():
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE)
