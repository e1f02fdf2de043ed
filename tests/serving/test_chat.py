"""/v1/chat/completions, as clients use it."""

import json

import pytest
from starlette.datastructures import Headers

from qjax.serving.schema import ChatRequest
from qjax.serving.sessions import names
from qjax.thought import PHRASE
from tests.serving.inside import Inside

ROOM = [{"role": "user", "content": "My room is 2354. My floor is 7. What is my room?"}]
TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "Looks up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}


def ask(server: Inside, messages, **more) -> dict:
    response = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 80} | more)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Inside, messages, path: str = "/v1/chat/completions", **more) -> list[dict]:
    """The events of a stream, which must end with [DONE]."""
    body = {"max_tokens": 80, "stream": True} | ({"messages": messages} if path.endswith("chat/completions") else {"prompt": messages}) | more
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks: list[dict]) -> dict:
    """The message that the deltas of a stream make."""
    message, calls = {}, {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for part in value:
                        call = calls.setdefault(part["index"], {"arguments": ""})
                        call |= {key: part[key] for key in ("id", "type") if key in part}
                        call["arguments"] += part["function"].pop("arguments", "")
                        call |= part["function"]
                elif name != "role":
                    message[name] = message.get(name, "") + value
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def test_a_stream_says_what_a_whole_answer_says(server):
    whole = ask(server, ROOM)
    chunks = events(server, ROOM)
    message = whole["choices"][0]["message"]
    assert message["content"] == "The room is 2354."
    assert message["reasoning_content"] == message["reasoning"] != ""
    assert joined(chunks) | {"role": "assistant"} == message
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {c["id"] for c in chunks} == {chunks[0]["id"]} != {whole["id"]}


def test_usage_comes_with_the_last_choice_or_where_it_is_asked_for_after_it(server):
    unasked = events(server, ROOM)
    assert all(len(c["choices"]) == 1 for c in unasked)
    assert [c for c in unasked if "usage" in c] == unasked[-1:]
    asked = events(server, ROOM, stream_options={"include_usage": True})
    assert asked[-1]["choices"] == []
    assert [c for c in asked if "usage" in c] == asked[-1:]
    usage = asked[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


@pytest.mark.parametrize("dropped", [(), ("reasoning", "reasoning_content")])
def test_the_next_turn_reads_only_what_is_new(server, dropped):
    """Also where the client leaves the reasoning out, as Open WebUI does."""
    messages = [{"role": "user", "content": f"My room is 2355. {'The sky is blue. ' * 40}What is my room? {len(dropped)}"}]
    first = ask(server, messages)
    answer = {name: value for name, value in first["choices"][0]["message"].items() if name not in dropped}
    second = ask(server, [*messages, answer, {"role": "user", "content": "And my room again?"}])
    before, usage = first["usage"], second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"] + before["completion_tokens"] - 1
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def test_calls_are_streamed_and_their_results_are_read_on(server):
    messages = [{"role": "user", "content": "Please look up the code of heron."}]
    whole = ask(server, messages, tools=[TOOL])
    chunks = events(server, messages, tools=[TOOL])
    message = whole["choices"][0]["message"]
    assert message["tool_calls"], message
    assert whole["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    streamed = joined(chunks)["tool_calls"]
    assert [(c["name"], c["arguments"]) for c in streamed] == [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    message["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments, indent=3)  # as a client writes them again
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4711"}
    second = ask(server, [*messages, message, result], tools=[TOOL])
    before, cached = whole["usage"], second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= before["prompt_tokens"] + before["completion_tokens"] - 1


def test_a_thought_is_closed_and_the_phrase_stays_with_the_rows(server):
    messages = [{"role": "user", "content": f"My room is 2356. {'The sky is blue. ' * 20}What is my room?"}]
    first = ask(server, messages, thinking_budget=3)
    message, before = first["choices"][0]["message"], first["usage"]
    assert PHRASE not in json.dumps(first)
    shown = ask(server, messages, thinking_budget=3, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert "long enough" not in "".join(entry["token"] for entry in shown)
    assert message["content"]
    assert before["completion_tokens_details"]["reasoning_tokens"] > 3  # the phrase is in the rows
    second = ask(server, [*messages, message, {"role": "user", "content": "And again?"}])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"] + before["completion_tokens"] - 1


def test_logprobs_of_each_token(server):
    whole = ask(server, ROOM, logprobs=True, top_logprobs=2)
    found = whole["choices"][0]["logprobs"]["content"]
    assert len(found) == whole["usage"]["completion_tokens"]
    for entry in found:
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
    streamed = [
        entry for c in events(server, ROOM, logprobs=True, top_logprobs=2) for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == found
    assert whole["choices"][0]["message"] == ask(server, ROOM)["choices"][0]["message"]


def test_an_answer_ends_before_a_stop_string_and_at_its_length(server):
    stopped = ask(server, ROOM, stop=" is 23", chat_template_kwargs={"enable_thinking": False})["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("The room", "stop")
    cut = ask(server, ROOM, max_completion_tokens=2, chat_template_kwargs={"enable_thinking": False})
    assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (2, "length")


def test_one_seed_is_one_answer(server):
    drawn = [ask(server, ROOM, temperature=1.7, seed=seed)["choices"][0]["message"] for seed in (1, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]
    assert any(other != drawn[0] for other in drawn[2:])


def test_a_title_does_not_think_and_is_short(server):
    """Also where it names an effort, as opencode's do; the control says that it wants to think."""
    title = [{"role": "system", "content": "You are a title generator. Output a title."}, {"role": "user", "content": "My room is 2354."}]
    for more in ({}, {"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}):
        usage = ask(server, title, max_tokens=32000, **more)["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
        assert usage["completion_tokens"] <= 256
    assert ask(server, title, enable_thinking=True)["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_plain_text_goes_on_whole_and_streamed(server):
    text = "<|im_start|>user\nMy room"
    body = {"prompt": text, "max_tokens": 12, "logprobs": 1, "temperature": 0}
    whole = server.http.post("/v1/completions", json=body).json()
    chunks = events(server, text, "/v1/completions", **body)
    choice = whole["choices"][0]
    assert choice["text"] == "".join(c["choices"][0]["text"] for c in chunks) != ""
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == whole["usage"]["completion_tokens"]
    assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
    ids = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    again = server.http.post("/v1/completions", json=body | {"prompt": ids}).json()
    assert again["choices"] == whole["choices"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text


def test_a_conversation_is_tokenized_as_it_is_run(server):
    counted = server.http.post("/tokenize", json={"messages": ROOM}).json()
    assert counted["count"] == len(counted["tokens"]) == ask(server, ROOM)["usage"]["prompt_tokens"]
    bare = server.http.post("/tokenize", json={"messages": ROOM, "add_generation_prompt": False}).json()
    assert counted["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < counted["count"]


def test_the_ledger_says_whose_conversation_it_is_and_where_it_parted(server):
    messages = [{"role": "user", "content": "My room is 2357. What is my room?"}]
    answer = ask(server, messages, session_id="mine")["choices"][0]["message"]
    ledger = server.service.worker.engine.caches.ledger
    assert (ledger.records[-1].session, ledger.records[-1].parted) == ("mine", None)
    more = {"role": "user", "content": "And again?"}
    ask(server, [*messages, answer, more])
    assert ledger.records[-1].parted is None
    ask(server, [*messages, answer | {"content": "The room is 1."}, more])
    assert ledger.records[-1].parted == "message 1: another answer to these messages was generated"


@pytest.mark.parametrize(
    ("body", "headers", "session", "parent"),
    [
        ({"session_id": "a", "prompt_cache_key": "b"}, {"X-Session-Id": "c"}, "a", None),
        ({"promptCacheKey": "b"}, {"X-Session-Id": "c"}, "b", None),
        ({}, {"X-Session-Id": "c", "x-session-affinity": "d", "X-Parent-Session-Id": "p"}, "c", "p"),
        ({}, {"x-session-affinity": "d"}, "d", None),
        ({}, {"X-OpenWebUI-Chat-Id": "e" * 500}, "e" * 200, None),
        ({}, {"X-Session-Id": ""}, None, None),
    ],
)
def test_a_conversations_name(body, headers, session, parent):
    asked = ChatRequest.model_validate({"messages": ROOM} | body)
    assert names(asked, Headers(headers)) == {"session": session, "parent": parent}
