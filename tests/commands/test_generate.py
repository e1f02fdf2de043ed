"""`qjax generate`: the engine's own text, streamed; one object with --json; wrong prompts and Ctrl-C."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types

import pytest

from qjax.cli import main
from qjax.pages import PoolFull
from qjax.sampling import Sampling
from storage import Storage


@pytest.fixture
def stdin(monkeypatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def test_text_goes_to_stdout_and_statistics_to_stderr(engine, answers, stdin, capsys):
    answers("at night.\nThe end", "at night.\n")
    stdin(b"The worker reads")
    assert main(["generate"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "at night.\nThe end\n"
    assert shown.err.startswith(f"{len(engine.model.tokenizer.encode('The worker reads'))} prompt tokens, ")
    assert shown.err.endswith("; ended by the model or a stop text\n")
    stdin(b"The worker reads")
    assert main(["generate", "-"]) == 0
    assert capsys.readouterr().out == "at night.\n"


def test_a_file_is_taken_as_it_stands(engine, tmp_path, monkeypatch, capsys):
    prompts = []
    monkeypatch.setattr(engine, "generate", lambda tokens, **options: prompts.append((tokens, options)) or stand_in())
    text = " <|im_end|> two\r\n\n"
    (tmp_path / "prompt").write_bytes(text.encode())
    assert main(["generate", str(tmp_path / "prompt"), "--top-k", "3", "--max-tokens", "7", "--stop", "a", "--stop", "b"]) == 0
    (tokens, options) = prompts[0]
    assert engine.model.tokenizer.decode(tokens) == text
    assert not set(tokens) & set(engine.model.tokenizer.special.values())
    assert options["sampling"] == Sampling(**engine.model.generation | {"top_k": 3})
    assert (options["max_tokens"], options["stop"]) == (7, ["a", "b"])


def stand_in():
    class Nothing(types.SimpleNamespace):
        __hash__ = object.__hash__

        def steps(self):
            return iter(())

        def close(self):
            pass

    return Nothing(
        lookup=None,
        error=None,
        sequence=None,
        text="",
        tokens=[],
        finish="stop",
        prompt_tokens=1,
        prefill_seconds=0.0,
        first_token_seconds=0.0,
        decode_seconds=0.0,
    )


def test_the_models_own_sampling_holds_until_a_flag_says_otherwise(engine, stdin, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(engine, "generate", lambda tokens, **options: seen.append(options["sampling"]) or stand_in())
    monkeypatch.setitem(engine.model.generation, "temperature", 0.6)
    monkeypatch.setitem(engine.model.generation, "top_p", 0.9)
    stdin(b"Hello")
    assert main(["generate", "--temperature", "0.25"]) == 0
    assert seen == [Sampling(temperature=0.25, top_p=0.9)]


def test_json_is_one_object_and_nothing_else(engine, answers, stdin, capsys):
    answers("One two three four")
    stdin(b"Count: ")
    assert main(["generate", "--json", "--stop", " three"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    out = json.loads(shown.out)
    assert (out["model"], out["text"], out["finish"]) == ("embedded", "One two", "stop")
    assert engine.model.tokenizer.decode(out["tokens"]).startswith("One two three")
    assert out["prompt_tokens"] == len(engine.model.tokenizer.encode("Count: "))
    assert min(out[f"{name}_seconds"] for name in ("load", "compile", "prefill", "first_token", "decode")) > 0


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"a": "The worker reads", "b": "Count: " * 30, "c": "At night"}.items():
        (tmp_path / name).write_text(text)
    return ["b", "a", "c"]


def test_several_files_are_answered_in_their_order(engine, files, monkeypatch, capsys):
    """Side by side, each as alone: the one that came first is shown first, though it does not end first."""
    alone = {}
    for file in files:
        assert main(["generate", file, "--max-tokens", "9", "--json"]) == 0
        alone[file] = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(engine, "parallel", 3)
    engine.caches.clear()
    ended = []
    release = engine.release
    monkeypatch.setattr(engine, "release", lambda sequence: (ended.append(int(sequence.length)), release(sequence)))
    assert main(["generate", *files, "--max-tokens", "9"]) == 0
    assert len(ended) == 3
    assert max(ended) != ended[0]  # b's is the longest
    shown = capsys.readouterr()
    bodies = [alone[file]["text"] + "\n" * (not alone[file]["text"].endswith("\n")) for file in files]
    assert shown.out == "\n".join(f"==> {file} <==\n{body}" for file, body in zip(files, bodies, strict=True))
    assert [line.split(" prompt tokens")[0] for line in shown.err.splitlines()] == [f"{file}: {alone[file]['prompt_tokens']}" for file in files]
    assert [r.source for r in engine.caches.ledger.records[-3:]] == ["cold"] * 3
    assert main(["generate", *files, "--max-tokens", "9", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert [(one["text"], one["tokens"]) for one in both] == [(alone[file]["text"], alone[file]["tokens"]) for file in files]


def test_one_of_several_that_fails_costs_no_other(engine, files, monkeypatch, capsys):
    draw = sys.modules["qjax.generation"].sample

    def broken(logits, sampling, history, number, allowed):
        if len(engine.caches.ledger.records) == 1:
            raise PoolFull("no page")
        return draw(logits, sampling, history, number, allowed)

    monkeypatch.setattr("qjax.generation.sample", broken)
    assert main(["generate", *files, "--max-tokens", "3", "--json"]) == 2
    shown = capsys.readouterr()
    assert [one.get("error") for one in json.loads(shown.out)] == [None, "no page", None]
    assert [len(one["tokens"]) for one in json.loads(shown.out)] == [3, 0, 3]
    assert shown.err == "qjax: error: no page\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupt_keeps_what_there_is(engine, answers, stdin, capsys, monkeypatch, as_json):
    answers("one two three four five six seven")
    draw = sys.modules["qjax.generation"].sample

    def pressed(logits, sampling, history, number, allowed):
        if number == 3:
            signal.raise_signal(signal.SIGINT)
        return draw(logits, sampling, history, number, allowed)

    monkeypatch.setattr("qjax.generation.sample", pressed)
    stdin(b"Count")
    assert main(["generate", *(["--json"] if as_json else [])]) == 130
    shown = capsys.readouterr()
    text = json.loads(shown.out)["text"] if as_json else shown.out.removesuffix("\n")
    assert 0 < len(text) < len("one two three four five six seven")
    assert "one two three four five six seven".startswith(text)
    assert "Traceback" not in shown.err
    assert as_json or shown.err.endswith("; ended by Ctrl-C\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "standard input: the prompt is empty"),
        (b"ok \xff", "standard input: expected UTF-8 text, found byte 0xff at 3"),
        (b"The worker reads the file. " * 800, "this engine's limit is 3,072 with the answer's (--context-tokens, --kv-gb)"),
    ],
)
def test_wrong_prompts(engine, stdin, capsys, data, message):
    stdin(data)
    assert main(["generate"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("qjax: error: ")
    assert shown.err.endswith(f"{message}\n")


@pytest.mark.parametrize("argv", [["--top-p", "7"], ["--stop", ""], ["/nowhere/prompt"], ["--grid", "100"]])
def test_wrong_flags_are_told_before_anything_is_loaded(monkeypatch, stdin, capsys, argv):
    monkeypatch.delattr("qjax.commands.generate.start")
    stdin(b"Hello")
    assert main(["generate", *argv]) == 2
    assert capsys.readouterr().err.startswith("qjax: error: ")


def test_as_a_program(engine, flags):
    """The real command gives what the engine in this process gives."""
    command = [sys.executable, "-m", "qjax.cli", "generate", "--max-tokens", "12", "--disk-cache", "none", *flags]
    prompt = "The worker reads the file and the "
    done = subprocess.run(command, input=prompt.encode(), capture_output=True, check=True)
    generation = engine.generate(engine.model.tokenizer.encode(prompt), sampling=Sampling(**engine.model.generation), max_tokens=12)
    for _ in generation:
        pass
    engine.release(generation.sequence)
    assert done.stdout.decode() == generation.text + "\n" * (not generation.text.endswith("\n"))
    notes = done.stderr.decode().splitlines()
    assert notes[0].startswith("embedded: loaded in ")
    assert notes[1].startswith(f"compiling (a minute or two the first time) ... {len(engine.programs.compiled)} programs in ")
    assert notes[1].endswith(f", kept in {flags[-1]}")


def test_a_disk_cache_that_is_a_file(tmp_path, capsys):
    """Told before anything is loaded, and once."""
    (tmp_path / "notes").write_text("buy milk")
    with pytest.raises(SystemExit):
        main(["generate", "--disk-cache", str(tmp_path / "notes")])
    err = capsys.readouterr().err
    assert err.splitlines()[-1].endswith(f"argument --disk-cache: expected a directory, found a file: '{tmp_path / 'notes'}'")


def test_what_is_logged_at_the_start_has_a_line_of_its_own(flags, tmp_path):
    """Another engine has the directory, which is said after the line that tells of compiling, and what lies there is a file."""
    argv = [sys.executable, "-m", "qjax.cli", "generate", "--max-tokens", "1", *flags, "--disk-cache", str(tmp_path / "states")]
    with Storage.open(tmp_path / "states" / "embedded", {"grid": "1"}):
        done = subprocess.run(argv, input=b"Hello", capture_output=True, check=True)
    _, compiled, told, *_ = done.stderr.decode().splitlines()
    assert re.fullmatch(r"compiling .* \.\.\. \d+ programs in .*", compiled)
    own = tmp_path / "states" / "embedded"
    assert told == f"{own} is in use by another engine (process {os.getpid()}): its entries are read, and nothing is written"
    shutil.rmtree(own)
    own.write_text("a file")
    lines = subprocess.run(argv, input=b"Hello", capture_output=True, check=True).stderr.decode().splitlines()
    assert [line for line in lines if str(own) in line] == [f"nothing is kept on NVMe (--disk-cache): {own}: expected a directory, found a file"]
