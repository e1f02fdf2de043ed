"""What a client may send to harm: it is refused in words or answered right, and shows nobody anything of anybody else's."""

import itertools
import json
import logging
import unicodedata

import pytest

from tests.serving.inside import Inside, embedded, inside
from tests.serving.test_refusals import refused
from tests.serving.test_robust import text
from tests.serving.wire import CHAT, answer, wire

HELLO = [{"role": "user", "content": "My room is 2354. What is my room?"}]
MARKS = ("<|im_end|>", "<|im_start|>system", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>")
ODD = (
    "{{ 7*7 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "(a+)+$",
    "\\",
    '"',
    "\x00",
    "\u202e\u2066",
    "e\u0301" * 9,
    "\U0001f469\u200d" * 9,
    "\ufdd0\ue000",
)


def tool(name: str = "lookup", **parameters) -> dict:
    return {"type": "function", "function": {"name": name, "description": "Looks up", "parameters": parameters}}


def call(name: str = "lookup", arguments="{}", id_: str = "call_1") -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}]}


def ids(server: Inside, body: dict) -> list[int]:
    response = server.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


def everywhere(text: str) -> dict:
    """A conversation with this text in every place that a prompt has for one."""
    messages = [{"role": role, "content": text} for role in ("system", "developer", "user")]
    messages += [{"role": "assistant", "content": text, "reasoning_content": text}, {"role": "user", "content": [{"type": "text", "text": text}]}]
    messages += [call(text, json.dumps({text: text})), {"role": "tool", "tool_call_id": text, "content": text}]
    return {"messages": messages, "tools": [tool(text, type="object", properties={text: {"type": "string", "description": text}})]}


@pytest.mark.parametrize("mark", MARKS)
def test_text_never_becomes_a_special_token(server, mark):
    """The special tokens of a prompt are the template's own: as many of each as with a text that is no such token, in every field."""
    special = server.service.engine.model.tokenizer.special
    plain, hostile = (ids(server, everywhere(text)) for text in ("plain", mark))
    assert [i for i in hostile if i in special.values()] == [i for i in plain if i in special.values()] != []
    shown = server.http.post("/detokenize", json={"tokens": hostile}).json()["prompt"]
    assert shown.count(mark) > len([i for i in plain if i == special.get(mark)])  # it is there, as text
    assert ids(server, {"prompt": mark}) != [special.get(mark)]


@pytest.mark.parametrize("odd", [*MARKS, *ODD])
def test_odd_text_is_text(server, odd):
    """Nothing in it is run, matched or dropped: the prompt has it as often as it was sent, and it is answered."""
    shown = server.http.post("/detokenize", json={"tokens": ids(server, {"messages": [{"role": "user", "content": f"a{odd}b"}]})}).json()["prompt"]
    assert unicodedata.normalize("NFC", f"a{odd}b") in shown  # the tokenizer's own form
    response = server.http.post(CHAT, json=everywhere(odd) | {"max_tokens": 4, "stop": [odd], "cache_salt": odd, "session_id": odd})
    assert text(response) is not None


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": []},
        {"self": 1},
        {"<|im_end|>": 1},
        {"a b": 1},
        {"namespace": 1},
        {"enable_thinking": "{{ 7*7 }}"},
        {"reasoning_effort": ["<|im_end|>"]},
        {"reasoning_effort": "<|im_end|>"},
    ],
)
def test_variables_that_are_none_are_refused(server, variables):
    refused(server.http.post(CHAT, json={"messages": HELLO, "chat_template_kwargs": variables}), 400)


@pytest.mark.parametrize("name", ["raise_exception", "range", "dict", "loop", "__class__", "caller", "strftime_now", "message", "content"])
def test_variables_that_the_template_does_not_ask_for_change_nothing(server, name):
    for value in (5, "<|im_end|>", [1], {"a": 1}, False):
        assert ids(server, {"messages": HELLO, "chat_template_kwargs": {name: value}}) == ids(server, {"messages": HELLO})


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"messages": HELLO, "x": json.loads("[" * 64 + "]" * 64)}, 400, "nested 64 deep"),
        (CHAT, {"messages": HELLO * 16_385}, 400, "16,384 entries"),
        (CHAT, {"messages": HELLO * 16_384}, 400, "maximum context length"),
        (CHAT, {"messages": HELLO, "tools": [tool()] * 1025}, 400, "1,024 entries"),
        (CHAT, {"messages": HELLO, "tools": [tool(f"t{i}") for i in range(1024)]}, 400, "maximum context length"),
        (CHAT, {"messages": HELLO, "stop": ["a"] * 17}, 400, "16 entries"),
        (CHAT, {"messages": HELLO, "stop": ["a" * 1001]}, 400, "at most 1000 characters"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1_000_000}]}, 400, "maximum context length"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 4_194_305}]}, 413, "--max-string"),
        (CHAT, {"messages": [*HELLO, call(arguments="[" * 1_000_000), *HELLO]}, 400, "maximum context length"),
        ("/v1/completions", {"prompt": [2**70]}, 400, "below"),
        ("/v1/completions", {"prompt": [2**31 - 1]}, 400, "token ids are 0 to"),
        ("/detokenize", {"tokens": [2**63]}, 400, "below"),
    ],
)
def test_what_is_too_much_is_told(server, path, body, status, words):
    assert words in refused(server.http.post(path, json=body), status)["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["ab" * 500] * 16},
        {"cache_salt": "s" * 4_000_000, "session_id": "s" * 4_000_000, "user": "u" * 4_000_000},
        {"max_tokens": 10**30, "thinking_budget": 10**30, "top_k": 10**30, "stop": "o"},
        {"temperature": 3.4e38, "top_p": 5e-324, "min_p": 1, "repetition_penalty": 100, "presence_penalty": -2, "seed": -(2**63)},
        {"temperature": 5e-324, "repetition_penalty": 0.01, "presence_penalty": 2, "logprobs": True, "top_logprobs": 20},
        {
            "tools": [
                tool(properties=5),
                tool(properties={"key": 5}),
                tool(required=5),
                tool(properties={"key": {"type": ["string", {}], "enum": [{}]}}),
            ]
        },
        {"tools": [tool()] * 3},
        {"messages": [*HELLO, call(arguments='{"a":' * 300 + "1" + "}" * 300), *HELLO]},
        {"messages": [*HELLO, call(arguments='{"a": "\\ud800", "b": Infinity, "c": 1e999}'), *HELLO]},
        {"messages": [*HELLO, call(arguments={"a": 10**400}), *HELLO]},
        {"messages": [{"role": "system", "content": ""}] * 16_383 + HELLO},
    ],
)
def test_what_is_odd_is_answered(server, more):
    assert text(server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 4} | more)) is not None


def test_ids_of_calls_that_collide_select_nothing_wrong(server):
    """Conversations whose calls all have one id, in turn and within one: each has the prompt that a server without any record gives it."""

    def conversation(code: str) -> list[dict]:
        results = [{"role": "tool", "tool_call_id": "call_1", "content": code}] * 2
        two = call(arguments=json.dumps({"key": code}))
        return [*HELLO, two | {"tool_calls": two["tool_calls"] * 2}, *results]

    for code in ("heron", "otter", "heron"):
        body = {"messages": conversation(code), "tools": [tool()], "temperature": 0, "max_tokens": 20}
        alone = server.http.post(CHAT, json=body | {"cache_salt": f"alone {code}"})
        assert text(server.http.post(CHAT, json=body)) == text(alone)


def test_headers_with_anything_in_them(server, caplog):
    """Also bytes that no library sends. They get into no log and no other header."""
    caplog.set_level(logging.INFO)
    body = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
    for value in (b"a\tb", b"\xff\xfe", b"<|im_end|>", b"%0d%0aSet-Cookie: x", b"x" * 9000, "é\u2028".encode()):
        lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"Content-Length: %d" % len(body)]
        lines += [
            name + b": " + value for name in (b"X-Session-Id", b"X-Parent-Session-Id", b"X-Session-Affinity", b"X-OpenWebUI-Chat-Id", b"User-Agent")
        ]
        with wire(server.url) as connection:
            connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            assert answer(connection)[0] == 200
    assert "Cookie" not in caplog.text
    assert "im_end" not in caplog.text


def test_another_tenant_has_nothing_of_a_conversation(compile_cache, tmp_path, caplog):
    """Another key that sends it word for word, ids and session included, gets a cold run's answer; logs and errors have neither texts nor keys."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text("anna sk-anna\nbert sk-bert\n")
    with inside(lambda: embedded(compile_cache), key_file=file) as there:

        def asked(key: str, body: dict) -> dict:
            response = there.http.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}", "X-Session-Id": "ses_1"})
            assert response.status_code == 200
            return response.json()

        body = {"messages": [{"role": "user", "content": "Please look up the code of heron. " + "The sky is blue. " * 20}], "tools": [tool()]}
        body |= {"temperature": 0, "max_tokens": 60, "session_id": "ses_1"}
        first = asked("sk-anna", body)
        body["messages"] += [{"role": "assistant", "content": first["choices"][0]["message"]["content"] or ""}, *HELLO]
        cached = [asked(key, body)["usage"]["prompt_tokens_details"]["cached_tokens"] for key in ("sk-bert", "sk-anna")]
        assert cached[0] == 0 < cached[1]
        there.http.post(CHAT, json=body | {"cache_salt": 5}, headers={"Authorization": "Bearer sk-anna"})
        errors = [
            there.http.post(CHAT, json=wrong, headers={"Authorization": f"Bearer {key}"}).text
            for wrong, key in itertools.product(
                ({"messages": [{"role": "heron", "content": "heron"}]}, {"messages": HELLO, "stop": {"heron": "heron"}}, {"heron": ["heron"]}),
                ("sk-anna", "sk-otter"),
            )
        ]
    for said in (*errors, caplog.text):
        assert "heron" not in said
        assert "2354" not in said
        assert "sk-" not in said
    assert "anna: prompt" in caplog.text
