"""What the commands share: how an answer and a prefill are shown, and Ctrl-C as a request."""

import io
import signal

import pytest
from rich.console import Console

from qjax.commands.console import Answer, Interrupt, Reading
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
