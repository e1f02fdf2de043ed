"""qwen-code against a server of qjax, several turns in one process; the counts are the client's own."""

from collections.abc import Iterator

import pytest

from tests.clients.conftest import MODEL
from tests.clients.qwen_code import QwenCode
from tests.clients.script import scripted, step
from tests.clients.turns import assert_goes_on


@pytest.fixture
def qwen(server, tmp_path) -> Iterator[QwenCode]:
    qwen = QwenCode(tmp_path, server.url, MODEL)
    yield qwen
    qwen.kill()


def test_turns_with_tools_in_one_process(qwen):
    notes = qwen.folder / "notes.txt"
    notes.write_text("The word is heron.\n")
    read = "read_file", {"file_path": str(notes)}
    edit = "edit", {"file_path": str(notes), "old_string": "heron", "new_string": "egret"}
    shell = "run_shell_command", {"command": "cat notes.txt", "is_background": False, "description": "Shows the notes"}

    first = qwen.say(scripted("Read the notes.", step("I read them.\n\n", [read]), step("The word is heron.")))
    assert first.tools == ["read_file completed"]
    assert first.text == "The word is heron."
    assert first.steps[0].cached < 1024  # control: what no request has sent before is read
    assert_goes_on(first.steps)

    second = qwen.say(scripted("Make it egret.", step("", [edit]), step("", [shell], reasoning="Now I look."), step("  It is egret now. – Fertig…")))
    assert second.tools == ["edit completed", "run_shell_command completed"]
    assert second.session == first.session
    assert notes.read_text() == "The word is egret.\n"
    assert_goes_on(second.steps, first.steps[-1])

    third = qwen.say(scripted("Thanks.", step("You are welcome.")))
    assert third.text == "You are welcome."
    assert_goes_on(third.steps, second.steps[-1])
    assert [len(turn.steps) for turn in (first, second, third)] == [2, 3, 1]
    assert qwen.end() == 0
