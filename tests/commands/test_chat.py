"""`qjax chat`: lines in, answers out, and what each turn read again."""

import builtins
import signal
import subprocess
import sys

import pytest

from qjax.cli import main


@pytest.fixture
def type_in(monkeypatch):
    """Call it with lines; an exception among them is raised in a line's place, and the end of them is Ctrl-D."""

    def give(*lines) -> None:
        waiting = iter(lines)

        def read(prompt):
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)

    return give


def chat(capsys, *argv) -> list[str]:
    assert main(["chat", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_turns_stream_and_say_what_they_read(engine, answers, type_in, capsys):
    answers("The user asks.\n</think>\n\nIt is [4417].", "A thought.\n</think>\n\nYes.  ", "Hm.\n</think>\n\nNo.")
    type_in("What is it?", "", "  Is it?  ", "Sure?")
    lines = chat(capsys)
    assert lines[0] == "/help lists the commands, Ctrl-D leaves"
    first = lines.index("The user asks.")
    assert lines[first : first + 3] == ["The user asks.", "", "It is [4417]."]
    notes = [line for line in lines if "prompt tokens read; the first token after" in line]
    read, whole = zip(*((int(words[0]), int(words[2])) for words in (note.split() for note in notes)), strict=True)
    assert read[0] == whole[0] < whole[1] < whole[2]
    assert 0 < read[1] < whole[1] - whole[0]
    assert "the template writes the last answer otherwise" not in notes[0] + notes[1]
    assert "; the template writes the last answer otherwise from token " in notes[2]


def test_system_message_and_thinking_reach_the_template(engine, answers, type_in, capsys, monkeypatch):
    prompts = []
    check = engine.check
    monkeypatch.setattr(engine, "check", lambda tokens, sequence=None: prompts.append(tokens) or check(tokens, sequence))
    answers("Yes.")
    type_in("Is it?")
    chat(capsys, "--system", "You answer briefly.", "--no-thinking")
    messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": "Is it?"}]
    assert prompts[0].tolist() == engine.model.template.render(messages, enable_thinking=False)


def test_commands(engine, answers, type_in, capsys):
    answers("x</think>One.", "x</think>Two.")
    type_in("/help", "/what", "/back", "Hello.", "/back", "/new", "Hello.", "/quit", "never read")
    lines = chat(capsys)
    assert "/quit   leave, as Ctrl-D does; Ctrl-C stops an answer" in lines
    assert "there is no /what; /help lists the commands" in lines
    replies = ["there is nothing to take back", "taken back", "a new conversation"]
    assert [line for line in lines if line in replies] == replies
    assert lines.count("One.") == lines.count("Two.") == 1


def test_a_path_is_a_message(engine, answers, type_in, capsys):
    answers("x</think>A file.")
    type_in("/etc/hosts is what?")
    assert "A file." in chat(capsys)


def test_interrupt_at_the_prompt_and_in_an_answer_stay_in_the_chat(engine, answers, type_in, capsys, monkeypatch):
    answers("x</think>One two three four five.", "x</think>Yes.")
    draw = sys.modules["qjax.generation"].sample
    pressed = []

    def press(logits, sampling, history, number, allowed):
        if number == 4 and not pressed:
            pressed.append(number)
            signal.raise_signal(signal.SIGINT)
        return draw(logits, sampling, history, number, allowed)

    monkeypatch.setattr("qjax.generation.sample", press)
    type_in(KeyboardInterrupt(), "Count.", "Go on.")
    lines = chat(capsys)
    assert "Ctrl-D or /quit leaves" in lines
    assert any(line.endswith("; stopped by Ctrl-C") for line in lines)
    assert any("One".startswith(line) or line.startswith("One ") for line in lines)
    assert "One two three four five." not in lines
    assert "Yes." in lines


def test_interrupt_while_reading_takes_the_question_back(engine, answers, type_in, capsys, monkeypatch):
    run = engine.prompt_steps

    def pressed(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return run(*arguments, **options)

    monkeypatch.setattr(engine, "prompt_steps", pressed)
    type_in("Hello.", "/back")
    lines = chat(capsys)
    assert [line for line in lines if "take" in line] == ["stopped while reading; the question is taken back", "there is nothing to take back"]


def test_a_question_that_does_not_fit_is_told(engine, answers, type_in, capsys):
    answers("x</think>Yes.")
    type_in("The worker reads the file. " * 800, "Hello.")
    lines = chat(capsys)
    assert any("this engine's limit is 3,072" in line and line.endswith("/back takes the last turn back") for line in lines)
    assert "Yes." in lines


def test_an_empty_answer_and_one_that_is_cut(engine, answers, type_in, capsys):
    answers("", "one two three...")
    type_in("Hello.", "Count.")
    lines = chat(capsys, "--max-tokens", "2")
    assert any(line.endswith("; an empty answer") for line in lines)
    assert any(line.endswith("; ended by --max-tokens or the end of the context") for line in lines)


def test_as_a_program(engine, flags):
    """Lines through a pipe: they are shown as they were typed, and the end of the file ends it."""
    command = [sys.executable, "-m", "qjax.cli", "chat", "--max-tokens", "8", "--disk-cache", "none", *flags]
    done = subprocess.run(command, input="/help\nThe deploy code is 4417.\n", capture_output=True, check=True, text=True)
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert "> /help" in lines
    assert "> The deploy code is 4417." in lines
    assert any("prompt tokens read; the first token after" in line for line in lines)
    assert lines[-1] == "> "
