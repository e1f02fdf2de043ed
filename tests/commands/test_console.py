"""What the commands share: how an answer and a prefill are shown, and Ctrl-C as a request."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from qjax.cli import main
from qjax.commands import console as commands_console
from qjax.commands.console import Answer, Interrupt, Reading, start
from qjax.config import CacheConfig, EngineConfig
from qjax.generation import Progress


def shown(terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100, highlight=False), file


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([("", "One"), ("", " two.\n"), ("", "")], "> One two.\n"),
        ([("\n Let me", ""), (" see.\n", ""), ("\n", "\n\n"), ("", "It is.")], "> Let me see.\n\nIt is.\n"),
        ([("", "[bold]4[/]."), ("", "\n\n"), ("", "End"), ("", "\n")], "> [bold]4[/].\n\nEnd\n"),
        ([("Only reasoning", "")], "> Only reasoning\n"),
        ([("", ""), ("\n", " ")], ""),
    ],
)
def test_answer_has_no_blank_edges_and_no_markup(pieces, text):
    console, file = shown()
    answer = Answer(console, "> ")
    for piece in pieces:
        answer.show(*piece)
    answer.close()
    assert file.getvalue() == text


def test_long_lines_stay_whole():
    console, file = shown()
    Answer(console).show("", "word " * 100 + "end")
    assert file.getvalue() == "word " * 100 + "end"


def read(reading: Reading, total: int, start: int, step: int):
    for done in range(start, total + 1, step):
        reading(Progress(done, total, start, (done - start) / 1000))
    reading.close()


def test_reading_prints_a_line_at_each_quarter():
    console, file = shown()
    read(Reading(console), 2048, 1024, 128)
    assert file.getvalue().splitlines() == [f"  read {n:,} of 1,024 tokens, 1,000 tokens/s" for n in (256, 512, 768, 1024)]


def test_short_reading_prints_nothing():
    for terminal in (False, True):
        console, file = shown(terminal)
        read(Reading(console), 20_000, 19_500, 100)
        assert file.getvalue() == ""


def test_reading_draws_a_bar_on_a_terminal_and_takes_it_away():
    console, file = shown(terminal=True)
    reading = Reading(console)
    reading(Progress(0, 1024, 0, 0.0))
    reading(Progress(512, 1024, 0, 0.5))
    assert "512 of 1,024 tokens, 1,024 tokens/s" in file.getvalue()
    reading(Progress(1024, 1024, 0, 1.0))
    hide, show, erase = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"
    assert file.getvalue().count(hide) == file.getvalue().count(show) == 1
    assert file.getvalue().endswith(erase)
    size = len(file.getvalue())
    reading.close()
    assert len(file.getvalue()) == size


def test_first_interrupt_asks_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt()
        signal.raise_signal(signal.SIGINT)
        assert interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupt.lifted():
            signal.raise_signal(signal.SIGINT)
        assert not interrupt()
        signal.raise_signal(signal.SIGINT)
        assert interrupt()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_interrupt_stays_ignored():
    """As in a shell's background job; nothing may raise there, whether lifted or not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with interrupt.lifted():
            signal.raise_signal(signal.SIGINT)
        assert not interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("config", "caches", "message"),
    [
        (dict(context_tokens=300_000), None, "context_tokens must be at most the model's 262,144, not 300,000"),
        (dict(kv_gb=1e-9), None, "kv_gb must hold a page of"),
        (dict(), dict(prefix_chunk=5), "prefix_chunk must be a multiple of the grid"),
    ],
)
@pytest.mark.parametrize("model", ["embedded", "random:0.8b@4"])
def test_settings_that_do_not_fit_are_told_before_anything_is_loaded(model, config, caches, message, monkeypatch):
    monkeypatch.setattr(commands_console, "load", lambda spec: pytest.fail("the weights were read"))
    console, file = shown()
    with pytest.raises(ValueError, match=message):
        start(model, EngineConfig(compile_cache=None, **config), console, caches and CacheConfig(**caches))
    assert file.getvalue() == ""


def test_an_error_while_compiling_begins_a_line(monkeypatch):
    def fails(*arguments):
        raise OSError("no room")

    monkeypatch.setattr(commands_console, "Engine", fails)
    console, file = shown()
    with pytest.raises(OSError, match="no room"):
        start("embedded", EngineConfig(), console)
    assert file.getvalue().endswith("compiling (a minute or two the first time) ... \n")


@pytest.mark.parametrize("flags", [["--kv-gb", "1e308"], ["--kv-gb", "1e-9"], ["--context-tokens", "999999999"], ["--compile-cache", __file__]])
@pytest.mark.parametrize("command", ["chat", "demo", "certify"])
def test_commands_tell_a_wrong_setting_in_one_line(command, flags, capsys):
    assert main([command, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"qjax: error: {flags[0]} must ")


def test_a_line_that_is_not_ascii_does_not_end_a_chat(flags):
    command = [sys.executable, "-m", "qjax.cli", "chat", "--max-tokens", "2", "--disk-cache", "none", *flags]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, input="café\n/help\n".encode(), capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/new    begin again" in done.stdout


@pytest.mark.parametrize(("tokens", "told"), [(None, True), (256, False)])
def test_a_context_that_the_pool_cuts_down_is_told(compile_cache, tokens, told):
    """The pool holds two pages of 128 tokens of the embedded model; the control asks for no more than that."""
    console, file = shown()
    engine = start("embedded", EngineConfig(grid=128, kv_gb=2.5 * 32_768 / 2**30, context_tokens=tokens, compile_cache=compile_cache), console)
    assert engine.limit == 256
    assert ("the longest sequence is 256 tokens, not" in file.getvalue()) == told
