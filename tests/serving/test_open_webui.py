"""A chat as Open WebUI keeps it: the answers come back without their reasoning, tool steps with their results, and titles, tags and
follow-up questions are asked for in between."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx2
import pytest

from tests.serving.test_chat import joined

SLACK = 4
"""Tokens of a step that may be read again; an answer has many more."""
NAMES = """add_memory calculate create_note delete_file delete_memory execute_code fetch_url find_chat get_current_timestamp get_user_info
list_chats list_files list_knowledge list_notes lookup query_knowledge read_file read_note rename_chat replace_note run schedule search
search_memories search_notes search_web view_image write_note""".split()
TURNS = [
    "My room is 2354. My floor is 7.",
    "What is my room?",
    "Look up the city.",
    "What is my floor?",
    "The door code is 81263. Keep it in mind.",
    "Thanks. What is the door code?",
    "Remember that the ticket is 5570.",
    "What was the ticket?",
    "Tell me the room.",
    "Our team name is blue heron.",
    "Which team name did I give you?",
    "Now tell me: what is the door code?",
]


def declared(name: str) -> dict:
    words = name.replace("_", " ")
    key = {"type": "string", "description": f"What to {words}."}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use this to {words}. It answers with a text.",
            "parameters": {"type": "object", "properties": {"key": key, "limit": {"type": "integer"}}, "required": ["key"]},
        },
    }


class Step(NamedTuple):
    prompt: int
    cached: int
    answer: int
    thought: int


def counts(usage: dict) -> Step:
    cached, thought = usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]
    return Step(usage["prompt_tokens"], cached, usage["completion_tokens"], thought)


class Chat:
    """messages: what its database holds. steps: what the server said of each request of the chat."""

    def __init__(self, http: httpx2.Client):
        self.http, self.messages, self.steps, self.calls = http, [], [], 0

    def say(self, text: str) -> str:
        """A turn to its end; the answer."""
        self.messages.append({"role": "user", "content": text})
        while "tool_calls" in (message := self._ask()):
            # A step of a tool loop: what was thought before the call is left out too.
            calls = [{name: call.pop(name) for name in ("id", "type")} | {"function": call} for call in message["tool_calls"]]
            self.messages.append({"role": "assistant", "content": message.get("content", ""), "tool_calls": calls})
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "Oslo"} for call in calls]
            self.calls += len(calls)
        self.messages.append({"role": "assistant", "content": message["content"]})
        return message["content"]

    def _ask(self) -> dict:
        """No max_tokens, no stream_options and no temperature: the server's own hold, and usage comes unasked."""
        body = {"stream": True, "model": "embedded", "messages": self.messages, "tools": [declared(name) for name in NAMES]}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        self.steps.append(counts(chunks[-1]["usage"]))
        message = joined(chunks)
        message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        return message

    def background(self, task: str, messages: list[dict], **more) -> Step:
        """A title, tags or follow-up questions of some messages, in one user message and not streamed."""
        talk = "\n".join(f"{message['role'].upper()}: {message['content']}" for message in messages)
        text = f"### Task:\n{task}\n### Output:\nJSON\n### Chat History:\n<chat_history>\n{talk}\n</chat_history>"
        body = {"model": "embedded", "stream": False, "messages": [{"role": "user", "content": text}], **more}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return counts(response.json()["usage"])


@pytest.fixture
def chat(server) -> Chat:
    assert server.http.get("/v1/models").json()["data"][0]["id"] == "embedded"
    return Chat(server.http)


def test_a_chat_of_twelve_turns_reads_only_what_is_new(chat):
    with ThreadPoolExecutor(1) as pool:  # the title comes beside the first request
        title = pool.submit(chat.background, "Name this chat.", [{"role": "user", "content": TURNS[0]}], max_tokens=1000)
        chat.say(TURNS[0])
    assert title.result().thought == 0  # a side request
    chat.background("Tag this chat.", chat.messages[-6:])
    for text in TURNS[1:]:
        chat.background("Suggest three questions that could come next.", chat.messages[-5:])
        assert chat.say(text)
    assert chat.calls > 0
    assert len(chat.steps) == len(TURNS) + chat.calls
    for before, step in itertools.pairwise(chat.steps):
        assert before.thought > 0, "without reasoning there is nothing that the client leaves out"
        assert before.answer > 3 * SLACK
        assert step.cached >= before.prompt + before.answer - SLACK
        assert step.cached >= 0.97 * step.prompt


def test_an_answer_that_was_edited_is_read_again(chat):
    """Control: what the client says otherwise is not taken from the rows."""
    chat.say(TURNS[0])
    chat.messages[-1]["content"] = f"Yes: {chat.messages[-1]['content']}"
    chat.say(TURNS[1])
    before, step = chat.steps
    assert before.prompt - SLACK <= step.cached <= before.prompt
