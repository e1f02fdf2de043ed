"""opencode against a server of qjax: what was read of a conversation is not read again, by the client's own count."""

from collections.abc import Iterator

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.conftest import CONTEXT, MODEL
from tests.clients.opencode import Opencode, Sessions
from tests.clients.script import scripted, step
from tests.clients.turns import assert_goes_on
from tests.serving.live import Live, until

NOTES = "The launch code word is heron. The port is 9042.\n"


@pytest.fixture(scope="module")
def opencode(server, tmp_path_factory) -> Opencode:
    opencode = Opencode(tmp_path_factory.mktemp("opencode"), server.url, MODEL, CONTEXT)
    (opencode.folder / "notes.txt").write_text(NOTES)
    return opencode


@pytest.fixture(scope="module")
def sessions(opencode) -> Iterator[Sessions]:
    with opencode.serve() as sessions:
        yield sessions


def read(opencode: Opencode) -> tuple[str, dict]:
    return "read", {"filePath": str(opencode.folder / "notes.txt")}


def test_two_sessions_with_tools_and_a_return_to_the_first(opencode):
    path = str(opencode.folder / "notes.txt")
    grep = "grep", {"pattern": "heron", "path": str(opencode.folder)}
    edit = "edit", {"filePath": path, "oldString": "9042", "newString": "9043"}
    # What comes back is trimmed by the template, and 60000.0 comes back as 60000: neither may make a row be read again.
    bash = "bash", {"command": f"cat {path}", "timeout": 60000.0, "description": "Shows the notes"}
    steps = [
        step("\n\nI read the notes. – Zuerst lesen…\n\n\n", [read(opencode), grep]),
        step("", [edit]),
        step("", [bash]),
        step("Done: heron, 9043."),
    ]
    first = opencode.run(scripted("Look at the notes, and make the port 9043.", *steps))
    assert sorted(first.tools[:2]) == ["grep completed", "read completed"]  # they run at once
    assert first.tools[2:] == ["edit completed", "bash completed"]
    assert (opencode.folder / "notes.txt").read_text() == NOTES.replace("9042", "9043")
    assert len(first.steps) == 4
    assert first.text.endswith("Done: heron, 9043.")
    assert first.steps[0].cached < 1024  # control: what no request has sent before is read
    assert_goes_on(first.steps)

    second = opencode.run(scripted("And the word?", step("It is heron.  ")), first.session)
    assert second.session == first.session
    assert second.text.strip() == "It is heron."
    assert_goes_on(second.steps, first.steps[-1])

    other = opencode.run(scripted("What is in this folder?", step("", [read(opencode)]), step("The notes.")))
    assert other.session != first.session
    assert other.tools == ["read completed"]
    # The same tools and system text come before another first message.
    assert 0.9 * other.steps[0].prompt < other.steps[0].cached < other.steps[0].prompt - 16
    assert_goes_on(other.steps)

    back = opencode.run(scripted("Read them again.", step("", [read(opencode)]), step("Still heron.")), first.session)
    assert back.tools == ["read completed"]
    assert back.text == "Still heron."
    assert_goes_on(back.steps, second.steps[-1])


def test_a_compaction_leaves_the_head(opencode, sessions):
    session = sessions.new()
    # No path of this run stands in what the model is to sum up, in its own words: they are the same in every run.
    shown = "bash", {"command": "cat notes.txt", "description": "Shows the notes"}
    first = sessions.say(session, scripted("My room is 2354.", step("", [shown]), step("Noted: the room is 2354.")))
    assert first.tools == ["bash completed"]
    assert_goes_on(first.steps)

    sessions.summarize(session)
    summaries = [message for message in sessions.messages(session) if message["info"].get("summary") is True]
    assert len(summaries) == 1

    after = sessions.say(session, scripted("What is the word?", step("", [read(opencode)]), step("Heron.")))
    assert after.text == "Heron."
    assert after.tools == ["read completed"]
    assert 0.9 * first.steps[0].prompt < after.steps[0].cached < first.steps[0].prompt
    assert_goes_on(after.steps)


def test_a_title_is_asked_for_beside_the_first_turn(sessions):
    """It is the model's own answer, of a form that it was trained on."""
    session = sessions.new()
    assert sessions.say(session, scripted("My room is 2354. What is my room?", step("It is 2354."))).text == "It is 2354."
    until(lambda: "room is 2354" in sessions.title(session), "title", 60)


def test_an_abort_ends_the_generation_and_the_session_goes_on(server, sessions):
    session = sessions.new()
    first = sessions.say(session, scripted("Hello.", step("Hello.")))
    cancelled = metric(server, "qjax_generations_total", finish="cancelled")

    words = 6000
    sessions.begin(session, scripted("Count.", step("word " * words)))
    until(lambda: texts(sessions, session), "beginning of an answer")
    sessions.abort(session)
    until(lambda: metric(server, "qjax_generations_total", finish="cancelled") == cancelled + 1, "end of the generation")
    until(lambda: metric(server, "qjax_requests") == 0, "end of all requests")
    assert 0 < len("".join(texts(sessions, session)).split()) < words

    after = sessions.say(session, scripted("That is enough.", step("Good.")))
    assert after.text == "Good."
    assert_goes_on(after.steps, first.steps[-1])
    assert after.steps[0].prompt - after.steps[0].cached < 1024  # and the aborted request's long message is not read again


def texts(sessions: Sessions, session: str) -> list[str]:
    """The texts of the last message, where that is an answer; one that is being written is empty here."""
    message = sessions.messages(session)[-1]
    return [part["text"] for part in message["parts"] if part["type"] == "text" and message["info"]["role"] == "assistant"]


def metric(server: Live, name: str, **labels: str) -> float:
    """The value of a metric; 0 for one that was not counted yet."""
    families = text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").raise_for_status().text)
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name and sample.labels == labels)
