"""`qjax cache`: the list, one entry in words, and what it says where there is nothing to list."""

import re
import shutil
import time

import pytest

from qjax.caches.nvme.values import FIRST
from qjax.caches.returns import Returns
from qjax.cli import main
from qjax.commands.cache_shown import number
from qjax.serving.archive import NAME
from storage import Storage
from tests.commands.cached import FIELDS, GRID, SECOND, as_json, key_of, make, refused, rows, shown
from tests.storage.test_bucket import s3_server


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
    before = time.time()
    facts = as_json(capsys, states)["fingerprints"][0]
    sizes = {path.name: sum(file.stat().st_size for file in path.glob("*/*")) for path in next(states.glob("*/")).glob("*/")}
    sizes = {key: size for key, size in sizes.items() if key.startswith(("p-", "a-", "s-"))}
    listed = {row["key"]: row for row in facts["rows"]}
    assert facts["entries"] == len(sizes)
    assert facts["nbytes"] == sum(sizes.values())
    assert facts["disk_nbytes"] + facts["spill_nbytes"] == sum(sizes.values())
    now = time.time()
    for head in (row for row in listed.values() if row["what"] == "head"):
        assert head["nbytes"] == sizes[head["key"]]  # a longer one stands on each of its pages
        ages = range(max(0, int(before - head["used"])), int(now - head["used"]) + 1)
        assert head["value"] in [Returns(GRID, FIRST).worth(1 + head["hits"], age) * GRID / head["nbytes"] for age in ages]
    whole = key_of(capsys, states, "conversation", 304)
    parts = [row["nbytes"] for row in listed.values() if row["of"] == whole]
    page = max(sizes[key] for key in sizes if key.startswith("p-"))
    assert listed[whole]["nbytes"] == sum(sizes[row["key"]] for row in listed.values() if row["of"] == whole) + page
    assert max(parts) < listed[whole]["nbytes"]


def test_a_value_counts_from_the_next_shorter_one(tmp_path, capsys):
    """Of anchors with one last line the index took any as the next shorter one."""
    lengths = range(129, 141)
    directory = make(tmp_path / "made", 128, *lengths)
    for length in lengths:
        assert as_json(capsys, directory, "--explain", f"a-{length:032}")["saves"] == 1


def test_the_list_has_values_of_a_day_and_a_mib(states, capsys, monkeypatch):
    """A day's seconds were missing once."""
    at = time.time()
    monkeypatch.setattr(time, "time", lambda: at)
    listed = {line.split()[0]: line.split()[-1] for line in shown(capsys, states).splitlines() if re.match("[as]-", line)}
    for key, row in rows(capsys, states).items():
        (value,) = (value for short, value in listed.items() if key.startswith(short))
        assert value == number(row["value"] * 86_400 * 2**20)


def test_answers_on_record_are_shown_and_go_with_the_last_entry(states, capsys):
    file = states / NAME
    file.write_bytes(bytes(5000))
    assert as_json(capsys, states)["answers_nbytes"] == 5000
    assert "answers on record of `qjax serve`, 4.9 KiB" in shown(capsys, states)
    assert "the answers on record" not in shown(capsys, states, "--prune", "--spill-gb", "0")
    assert "would remove the answers on record, 4.9 KiB" in shown(capsys, states, "--prune", "--disk-gb", "0", "--spill-gb", "0", "--dry-run")
    assert file.exists()
    assert "removed the answers on record, 4.9 KiB" in shown(capsys, states, "--prune", "--disk-gb", "0", "--spill-gb", "0")
    assert not file.exists()


def test_explained(states, capsys):
    head = key_of(capsys, states, "head", 192)
    out = shown(capsys, states, "--explain", head[:12])
    assert f"{head} is a head that prompts begin with: the state after 192 tokens." in out
    assert "64 tokens that it saves past the next shorter one" in out
    facts = as_json(capsys, states, "--explain", head)
    assert [(page["first"], page["tokens"]) for page in facts["pages"]] == [(0, 64), (64, 64), (128, 64)]
    assert [len(page["shared"]["heads"]) for page in facts["pages"]] == sorted((len(p["shared"]["heads"]) for p in facts["pages"]), reverse=True)
    assert all(head not in page["shared"]["heads"] for page in facts["pages"])
    whole = as_json(capsys, states, "--explain", key_of(capsys, states, "conversation", 204))
    assert (whole["resident"], whole["turns"], 0 <= whole["before"] < whole["of"]) == (True, 1, True)
    listed, others = rows(capsys, states), as_json(capsys, states, "--explain", key_of(capsys, states, "conversation", 304))
    theirs = {row["key"] for row in (*whole["anchors"], *others["anchors"])}
    assert whole["of"] == sum(key not in theirs for key in listed)
    assert whole["value"] == pytest.approx(whole["returns"] * whole["saves"] / whole["holds"])
    assert [(row["what"], row["tokens"]) for row in whole["anchors"]] == [("head", 128), ("head", 192), ("part", 200), ("part", 204)]
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


def test_long_lists_are_cut(tmp_path, capsys):
    directory = make(tmp_path / "made", *range(64, 64 + 25))
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
    if width < 80:
        assert "part, tokens 304, bytes 210.2 KiB, hits 0, age" in "\n".join(lines)
    else:
        table = lines[next(i for i, line in enumerate(lines) if line.startswith("key ")) :]
        assert len(table) == 14
        assert all(len(line) <= 80 for line in table)


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
        ("--prune", "--disk-gb", "-1"): "--disk-gb must be a number of GiB",
        ("--prune", "--disk-days", "-1"): "--disk-days must be",
        ("--prune", "--disk-days", "inf"): "--disk-days must be a number of days, 0 or more, not inf",
        ("--disk-endpoint", "http://127.0.0.1:1"): "--disk-endpoint must be given with an s3:// bucket",
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


def test_the_models_below_a_directory(written_states, tmp_path, capsys, monkeypatch):
    """Each model's engine has its own directory in the one that is given; one alone is shown as itself."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # ages are shown in seconds
    root = tmp_path / "all"
    shutil.copytree(written_states, root / "embedded")
    assert main(["cache", str(root)]) == 0
    alone = capsys.readouterr().out
    assert f"{root / 'embedded'}: " in alone
    assert main(["cache", str(root / "embedded")]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == alone.splitlines()[2:]
    shutil.copytree(written_states, root / "random-0.8b")
    assert main(["cache", str(root), "--verify"]) == 0
    assert capsys.readouterr().out.count("nothing is damaged") == 2
    assert main(["cache", str(root), "--prune"]) == 2
    assert f"--prune: {root} holds the caches of 2 models: expected one of {root / 'embedded'}, {root / 'random-0.8b'}" in capsys.readouterr().err
