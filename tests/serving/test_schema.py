"""Bodies as real clients send them are read, whatever else is sent is refused in words that show nothing of it, and the schema can be published."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from qjax.sampling import Sampling
from qjax.serving.errors import ApiError, BadRequest
from qjax.serving.limits import Limits, read
from qjax.serving.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeChat, TokenizeText
from qjax.serving.validation import tokenized, validated

USER = {"role": "user", "content": "Where is the worker started?"}
READ = {
    "type": "function",
    "function": {"parameters": {"type": "object", "properties": {"path": {"type": "string"}}}, "name": "read", "strict": True},
}
CALL = {"index": 0, "id": "call_7", "type": "function", "function": {"name": "read", "arguments": '{"path":"/a"}'}}


def part(text: str) -> dict:
    return {"type": "text", "text": text}


CLIENTS = {
    "opencode": {
        "model": "qwen3.8-27b",
        "max_tokens": 32000,
        "messages": [
            {"role": "system", "content": "You write code."},
            {"role": "user", "content": [part("Fix it.\n"), part("<system-reminder>Plan only.</system-reminder>")]},
            {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [CALL, CALL | {"id": "call_8", "index": 1}]},
            {"role": "tool", "tool_call_id": "call_7", "content": "def main(): ..."},
            {"role": "tool", "tool_call_id": "call_8", "content": ""},
        ],
        "tools": [READ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "promptCacheKey": "ses_1",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "qwen-code": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [part("You are a command line agent.")]},
            {"role": "user", "content": [part("Hello."), part("Go on.")]},
            {"role": "assistant", "content": [part("I do.")], "reasoning_content": "So.", "reasoning": "So.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_7", "content": [part("done")]},
        ],
        "tools": [READ],
        "max_tokens": 64000,
        "stream": True,
        "stream_options": {"include_usage": True},
        "preserve_thinking": True,
    },
    "Open WebUI": {
        "stream": True,
        "model": "m",
        "messages": [USER, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [CALL]}, {"role": "tool", "content": None}, USER],
        "tools": [READ | {"function": READ["function"] | {"description": None}}],
    },
    "Open WebUI's titles": {"model": "m", "messages": [USER], "stream": False, "max_tokens": 1000, "metadata": {"task": "title"}},
    "openai-python": {
        "model": "m",
        "messages": [{"role": "developer", "content": "Be brief."}, USER, {"role": "assistant", "content": None, "refusal": None, "audio": None}],
        "max_completion_tokens": 8,
        "temperature": 0,
        "top_p": 0.9,
        "seed": -3,
        "stop": ["\n\n", "END"],
        "logprobs": True,
        "top_logprobs": 5,
        "n": 1,
        "user": "someone",
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
        "cache_salt": "team",
        "top_k": -1,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "reasoning_effort": "high",
        "thinking_budget": 512,
    },
    "llm": {
        "model": "m",
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "x"}],
        "stream": True,
    },
    "aider": {"model": "m", "messages": [USER], "temperature": 0, "stream": True},
}


def chat(**fields) -> ChatRequest:
    return validated(ChatRequest, {"messages": [USER], **fields})


def sent(value) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_sends_is_read(client):
    body = CLIENTS[client]
    request = validated(ChatRequest, read(sent(body), Limits()))
    assert [message.role for message in request.messages] == [message["role"] for message in body["messages"]]
    assert json.dumps(request.tools) == json.dumps(body.get("tools"))  # the client's keys in the client's order
    assert request.limit == body.get("max_completion_tokens", body.get("max_tokens"))
    assert request.include_usage == ("stream_options" in body)
    assert request.session == body.get("promptCacheKey")


def test_null_is_as_nothing():
    fields = [name for name in ChatRequest.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(fields)) == chat()
    assert len(fields) > 25


def test_fields_that_have_two_names():
    assert chat(max_tokens=5, max_completion_tokens=7).limit == 7
    assert chat(session_id="a", prompt_cache_key="b", promptCacheKey="c").session == "a"
    assert (chat(prompt_cache_key="b", promptCacheKey="c").session, chat(session_id="").session) == ("b", None)
    assert (chat(stop="x").stops, chat(stop=["x", "y"]).stops, chat(stop=[]).stops, chat().stops) == (("x",), ("x", "y"), (), ())
    assert chat(max_tokens=5.0, n=1.0, seed=3.0).limit == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "n: one answer a request, so 1 is the only value"),
        ({"n": True}, "n: one answer a request, so 1 is the only value"),
        ({"tool_choice": "required"}, "tool_choice: a call cannot be forced: tool_choice is auto or none"),
        ({"tool_choice": {"type": "function", "function": {"name": "read"}}}, "tool_choice: a call cannot be forced: tool_choice is auto or none"),
        ({"tool_choice": "any"}, "tool_choice: expected 'auto' or 'none', found a string of 3 characters"),
        ({"response_format": {"type": "json_object"}}, "response_format: only type text is supported: describe the format in a message"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: not supported: presence_penalty and repetition_penalty are"),
        ({"top_logprobs": 3}, "top_logprobs wants logprobs: true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: expected a number at most 20, found 21"),
        ({"max_tokens": 0}, "max_tokens: expected a number at least 1, found 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected a whole number, found a number"),
        ({"temperature": "1"}, "temperature: expected a number, found a string of 1 character"),
        ({"temperature": -1}, "temperature: expected a number at least 0, found -1"),
        ({"top_p": 0}, "top_p: expected a number above 0, found 0"),
        ({"seed": 2**64}, "seed: expected a number below 1.84467e+19, found a number"),
        ({"stream": 1}, "stream: expected true or false, found a number"),
        ({"stop": ["x", ""]}, "stop[1]: expected at least 1 character, found a string of 0 characters"),
        ({"messages": []}, "messages: expected at least one entry, found a list"),
        ({"messages": None}, "messages: expected a list, found null"),
        (
            {"messages": [{"role": "function", "content": ""}]},
            "messages[0]: expected one of the roles 'system', 'developer', 'user', 'assistant', 'tool'",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0]: expected an object with a role, found an object"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content: expected this field, found none"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected a string or a list, found a number"),
        (
            {"messages": [{"role": "user", "content": [part("a"), {"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[1]: only parts of type text are supported: images, audio, video and files are not",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": [1]}}]}]},
            "messages[0].tool_calls[0].function.arguments: expected a string or an object, found a list",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: expected 'function', found a string of 10 characters"),
        ({"tools": [READ, {"type": "function", "function": {}}]}, "tools[1].function.name: expected this field, found none"),
    ],
)
def test_what_is_wrong_or_not_supported_is_said(fields, message):
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.message.startswith(message)
    path = message.split(": ")[0]
    assert refused.value.body() == {
        "error": {"message": refused.value.message, "type": "invalid_request_error", "param": path if " " not in path else None, "code": None}
    }


def test_plain_completions():
    def prompt(value):
        return validated(CompletionRequest, {"prompt": value}).prompt

    assert [prompt(value) for value in ("x", ["x"], [1, 2], [[1, 2]])] == ["x", "x", [1, 2], [1, 2]]
    for wrong, message in ((["x", "y"], "prompt: one prompt a request, found 2"), ([-1], "found -1"), ([1, "x"], r"prompt\[1\]"), (None, "null")):
        with pytest.raises(BadRequest, match=message):
            prompt(wrong)
    with pytest.raises(BadRequest, match="echo: not supported: the logits of a prompt that is in a cache are not computed again"):
        validated(CompletionRequest, {"prompt": "x", "echo": True})


def test_tokenize_takes_a_text_or_messages():
    assert tokenized({"prompt": "x"}).prompt == "x"
    assert tokenized({"messages": [USER], "tools": [READ]}).tools == [READ]
    with pytest.raises(BadRequest, match="prompt: expected this field, found none"):
        tokenized({})
    assert validated(DetokenizeRequest, {"tokens": [1, 2]}).tokens == [1, 2]


def test_the_request_goes_before_the_model_and_the_model_before_greedy():
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}
    assert chat().sampling({}) == Sampling()
    assert chat().sampling(defaults, seed=5) == Sampling(**defaults, seed=5)
    assert chat(top_p=0.5, top_k=-1, presence_penalty=0, seed=3).sampling(defaults, seed=5) == Sampling(temperature=0.7, top_p=0.5, seed=3)
    assert chat(seed=-1, temperature=1).sampling({}) == Sampling(temperature=1, seed=2**64 - 1)
    assert chat(temperature=0, seed=8).sampling({}, seed=5) == chat(temperature=0).sampling({})  # one answer, one entry in a cache


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, TokenizeText, TokenizeChat, DetokenizeRequest])
def test_the_schema_has_json_schemas_own_words(body):
    schema = json.dumps(body.model_json_schema())
    assert not any(f'"{name}": ' in schema for name in ("ge", "le", "gt", "lt"))


def test_the_schema_has_the_ranges_of_sampling():
    properties = ChatRequest.model_json_schema()["properties"]
    assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": pytest.approx(3.4e38, rel=0.01)}
    assert properties["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert properties["max_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert properties["presence_penalty"]["anyOf"][0] == {"type": "number", "minimum": -2, "maximum": 2}
    assert properties["top_k"]["anyOf"][0] == {"type": "integer", "minimum": -1}


SECRET = "sesame"
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.just(SECRET)
    | st.sampled_from(["user", "text", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "type", "text", "content", "function", SECRET]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(client=st.sampled_from(sorted(CLIENTS)), data=st.data())
def test_a_body_with_anything_anywhere_is_read_or_refused_in_words_that_do_not_show_it(client, data):
    body = json.loads(json.dumps(CLIENTS[client]))
    place = body
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not place[key] or not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(values)
    for kind in (ChatRequest, CompletionRequest, TokenizeChat, DetokenizeRequest):
        error = refusal(kind, body)
        if error is not None:
            assert error.status == 400
            assert SECRET not in error.message
            assert error.message.isprintable()
            json.dumps(error.body(), ensure_ascii=False).encode()


def refusal(kind, body) -> ApiError | None:
    try:
        validated(kind, read(sent(body), Limits()))
    except ApiError as error:
        return error
