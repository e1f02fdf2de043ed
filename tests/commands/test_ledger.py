"""`qjax ledger`: what a user sees of the file that a run left, on terminals of every width and through a pipe."""

import json
import re
import subprocess
import sys

import pytest

from qjax.cli import main
from qjax.ledger import SOURCES, Ledger, Record, Why

MONDAY = "It is \x1b[31mMonday[/]\n the third of May"
COLUMNS = ["source", "prompt", "reused", "again", "why", "ttft", "decode", "difference"]


@pytest.fixture
def file(tmp_path):
    """Three requests of one day: a cold one, its next turn, and one in which the day had changed."""
    ledger = Ledger(path=tmp_path / "ledger.jsonl")
    ledger.add(Record(at=1.79e9, prompt_tokens=2000, why=Why.EMPTY, first_token_seconds=3.25, decode_seconds=1.5))
    ledger.add(Record(at=1.79e9 + 60, prompt_tokens=2100, source="end", start=2050, first_token_seconds=0.125))
    differs = {"why": Why.DIFFERS, "differs_at": 1300, "kept_text": MONDAY, "found_text": MONDAY.replace("Mon", "Tues")}
    ledger.add(
        Record(at=1.79e9 + 120, prompt_tokens=2200, source="resident", start=1024, agrees=1300, read_again=276, failed=["store: no rows"], **differs)
    )
    return tmp_path / "ledger.jsonl"


def shown(capsys, *argv) -> str:
    assert main(["ledger", *map(str, argv)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.fixture
def terminal(monkeypatch):
    def width(columns: int) -> None:
        for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns), "LINES": "25"}.items():
            monkeypatch.setenv(name, value)

    return width


def test_a_request_a_line_through_a_pipe(file, capsys):
    head, *rows, blank, totals = [line.split() for line in shown(capsys, file).splitlines()]
    assert [name for name in COLUMNS if name not in head] == []
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[0][2:] == ["cold", "2,000", "0", "0", "empty", "3.25", "1.50"]
    assert rows[1][2:] == ["end", "2,100", "2,050", "0", "none", "0.12", "0.00"]
    assert rows[2][2:7] == ["resident", "2,200", "1,024", "276", "differs"]
    assert blank == []
    assert " ".join(totals) == (
        "3 requests, 6,300 prompt tokens: 3,074 reused (48.8 %), 276 read again; from cold 1, resident 1, end 1; misses: empty 1, differs 1"
    )


def test_the_difference_is_shown_and_shows_no_codes(file, capsys):
    """C4: the first token that differs, and its text."""
    out = shown(capsys, file)
    assert r'at 1,300: kept …"is \x1b[31mMonday[/]\n the third"…, found …"is \x1b[31mTuesday[/]\n the thir"…; store: no rows' in out
    assert "\x1b" not in out


def test_last_shows_the_newest_and_counts_all(file, capsys):
    out = shown(capsys, file, "--last", "1")
    assert [line.split()[0] for line in out.splitlines()[1:2]] == ["3"]
    assert "3 requests" in out
    assert len(shown(capsys, file, "--last", "99").splitlines()) == len(shown(capsys, file).splitlines())


@pytest.mark.parametrize("width", [1, 2, 10, 40, 80, 100, 140, 300])
def test_every_width_shows_every_number(file, capsys, terminal, width):
    terminal(width)
    out = re.sub("\x1b\\[[0-9;]*m", "", shown(capsys, file))
    for text in ("3.25", "2,050", "resident", "at 1,300: kept", "store: no rows", "3 requests"):
        assert text in out
    if width in (80, 100):
        assert all(len(line) <= width for line in out.splitlines()[:4])
        assert "#3 at 1,300" in out


def test_days_are_told_apart(tmp_path, capsys):
    ledger = Ledger(path=tmp_path / "ledger")
    for day in (0, 2):
        ledger.add(Record(at=1.79e9 + day * 86400, prompt_tokens=10))
    out = shown(capsys, tmp_path / "ledger").splitlines()
    assert out[0].split()[1] == "time"
    assert out[1].split()[1] != out[2].split()[1]
    assert "difference" not in out[0]


def test_json_is_one_object(file, capsys):
    (line,) = shown(capsys, file, "--json").splitlines()
    value = json.loads(line)
    assert set(value) == {"records", "totals"}
    assert [Record.from_json(record).number for record in value["records"]] == [1, 2, 3]
    assert value["records"][2]["kept_text"] == MONDAY
    totals = value["totals"]
    assert (totals["requests"], totals["reused"], totals["by_why"]["differs"], totals["by_source"]["pinned"]) == (3, 3074, 1, 0)
    assert totals["resume_depths"] == {"32": 1, "1024": 1}
    assert len(json.loads(shown(capsys, file, "--last", "2", "--json"))["records"]) == 2


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_damaged_lines_are_said_and_the_rest_is_shown(file, capsys, flags):
    with file.open("ab") as more:
        more.write(b"nonsense\n" + file.read_bytes()[:100])
    assert main(["ledger", str(file), *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"qjax: {file}: 2 damaged lines were skipped: line 4: Expecting value: line 1 column 1 (char 0)\n"
    assert "3 requests" in captured.out or len(json.loads(captured.out)["records"]) == 3


def test_an_empty_ledger(tmp_path, capsys):
    (tmp_path / "ledger").touch()
    assert shown(capsys, tmp_path / "ledger") == "0 requests, 0 prompt tokens\n"
    assert json.loads(shown(capsys, tmp_path / "ledger", "--json"))["records"] == []


def test_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 100)
    cases = {"nowhere": "No such file or directory", ".": "Is a directory", "weights": "not a ledger: line 1: "}
    for name, message in cases.items():
        assert main(["ledger", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("qjax: error: ")
        assert message in captured.err
        assert str(tmp_path) in captured.err
        assert captured.err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["ledger", "x", "--last", "0"])


def test_help_says_what_every_word_means(capsys):
    with pytest.raises(SystemExit):
        main(["ledger", "--help"])
    out = capsys.readouterr().out
    for name, meaning in [*SOURCES.items(), *((why.value, why.meaning) for why in Why)]:
        assert f"  {name:<12}{meaning}\n" in out


def test_the_file_that_a_command_wrote(tmp_path, compile_cache, capsys):
    """`--ledger FILE` of a real process, then `qjax ledger FILE`."""
    prompt, file = tmp_path / "prompt", tmp_path / "ledger"
    prompt.write_text("The worker reads")
    more = ["--max-tokens", "2", "--grid", "128", "--context-tokens", "256", "--compile-cache", str(compile_cache), "--ledger", str(file)]
    subprocess.run([sys.executable, "-m", "qjax.cli", "generate", str(prompt), "--disk-cache", "none", *more], check=True, capture_output=True)
    assert main(["ledger", str(file), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["records"]
    assert (record["source"], record["why"], record["generated"], record["finish"]) == ("cold", "empty", 2, "length")


def test_rows_of_several_processes_are_numbered_as_they_come(tmp_path, capsys):
    """Each process counts from 1."""
    for _ in range(3):
        Ledger(path=tmp_path / "ledger.jsonl").add(Record(prompt_tokens=10))
    _, *rows, _, _ = shown(capsys, tmp_path / "ledger.jsonl").splitlines()
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    _, *rows, _, _ = shown(capsys, tmp_path / "ledger.jsonl", "--last", "2").splitlines()
    assert [row.split()[0] for row in rows] == ["2", "3"]
