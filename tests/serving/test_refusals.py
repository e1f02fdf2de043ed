"""What the server refuses, and in which words: clients act upon status, code and text."""

import json

import httpx2
import pytest

from qjax.config import ServeConfig
from qjax.serving.limits import Limits
from qjax.serving.service import Service
from tests.serving.inside import embedded, inside
from tests.serving.wire import answer, post, wire

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


def refused(response: httpx2.Response, status: int) -> dict:
    """The error of a response, which has the form of OpenAI's."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_prompt_that_leaves_no_room_is_refused_before_it_is_read(server):
    before = server.service.worker.engine.caches.ledger.totals()
    messages = [{"role": "user", "content": "heron " * 5000}]
    for stream in (False, True):
        error = refused(server.http.post(CHAT, json={"messages": messages, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in error["message"]
    assert refused(server.http.post("/v1/completions", json={"prompt": [1] * 4096}), 400)["code"] == "context_length_exceeded"
    assert server.service.worker.engine.caches.ledger.totals() == before


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"messages": HELLO, "model": "gpt-5"}, 404, "model", "there is no model 'gpt-5' here, only 'embedded'"),
        ({"messages": []}, 400, "messages", "at least one entry"),
        ({"messages": HELLO, "n": 2}, 400, "n", "one answer a request"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"messages": HELLO, "temperature": "hot"}, 400, "temperature", "expected a number"),
        ({"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice", "cannot be forced"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, 400, "messages", "a message of the user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content[0]",
            "only parts of",
        ),
        ({"messages": [{"role": "user", "content": {}}]}, 400, "messages[0].content", "expected a string or a list, found an object"),
        ({"messages": HELLO, "reasoning_effort": "huge"}, 400, "reasoning_effort", "none, minimal"),
        ({"messages": HELLO, "logit_bias": {"5": 1}}, 400, "logit_bias", "not supported"),
        ({"messages": HELLO, "guided_json": {"type": "object"}}, 400, "guided_json", "not supported"),
        ({"messages": HELLO, "modalities": ["text", "audio"]}, 400, "modalities", "not supported"),
    ],
)
def test_a_wrong_field_is_named(server, body, status, param, words):
    error = refused(server.http.post(CHAT, json=body), status)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xff{}", b'{"a": NaN}', b"[" * 5000])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_no_json_of_a_request_is_told(server, path, body):
    assert refused(server.http.post(path, content=body), 400)["message"]


def test_routes_and_methods_that_are_not_there(server):
    assert "no such route" in refused(server.http.get("/v1/responses"), 404)["message"]
    response = server.http.get(CHAT)
    assert "method" in refused(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    assert refused(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert server.http.get("/v1/models/embedded").json()["max_model_len"] == 4096


def test_a_body_that_says_that_it_is_above_the_limit_is_not_waited_for(server):
    for expects in (b"", b"Expect: 100-continue\r\n"):
        with wire(server.url) as connection:
            head, _, _ = post(b"", length=10**11).partition(b"\r\n\r\n")
            connection.sendall(head + b"\r\n" + expects + b"\r\n")
            assert answer(connection)[0] == 413


def test_a_body_above_the_limit_is_not_read_to_its_end(compile_cache):
    with inside(lambda: embedded(compile_cache), Limits(max_body_mb=1), queue=0) as there:
        sent = []

        def parts():
            for _ in range(64):
                sent.append(1)
                yield b" " * 2**20

        assert refused(there.http.post(CHAT, content=parts()), 413)["code"] == "request_too_large"
        assert there.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_keys(compile_cache, tmp_path):
    """Two keys share nothing, one key shares with itself; another salt does not; nobody else is let in, and no key is written anywhere."""
    file = tmp_path / "keys"
    file.write_text("anna sk-anna\nbert sk-bert\n")
    body = {"messages": [{"role": "user", "content": "My room is 2354. " * 30}], "max_tokens": 2}

    def cached(there, key: str, **more) -> int:
        response = there.http.post(CHAT, json=body | more, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with inside(lambda: embedded(compile_cache), key_file=file, admin_key="sk-admin") as there:
        assert cached(there, "sk-anna") == 0
        assert cached(there, "sk-bert") == 0
        assert cached(there, "sk-anna", cache_salt="other") == 0
        for key in ("sk-anna", "sk-bert"):
            assert cached(there, key) > 100
        assert cached(there, "sk-anna", cache_salt="other") > 100
        for headers in ({}, {"Authorization": "Bearer sk-eve"}, {"Authorization": "sk-anna"}):
            response = there.http.post(CHAT, json=body, headers=headers)
            assert refused(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert refused(there.http.get("/v1/models", headers=headers), 401)
        for method, path in (("get", "/metrics"), ("get", "/v1/cache/stats"), ("post", "/v1/cache/clear")):
            refused(there.http.request(method, path, headers={"Authorization": "Bearer sk-anna"}), 401)
        admin = {"Authorization": "Bearer sk-admin"}
        shown = there.http.get("/metrics", headers=admin).text + json.dumps(there.http.get("/v1/cache/stats", headers=admin).json())
        assert "sk-" not in shown
        assert "My room" not in shown


def test_pages_of_other_origins_and_names_that_point_here(server):
    """A web page must not use the server of whoever looks at it."""
    evil = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    assert "--cors-origin" in refused(server.http.post("/v1/cache/clear", headers=evil), 403)["message"]
    assert "own names" in refused(server.http.get("/v1/models", headers={"Host": "evil.example"}), 403)["message"]
    for host in ("localhost:99", "127.0.0.1", "[::1]:8000"):
        assert server.http.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("[", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert server.http.get("/v1/models", headers={"Host": host}).status_code in (400, 403)


def test_an_allowed_page_may_ask(compile_cache):
    with inside(lambda: embedded(compile_cache), cors_origin=("http://page.example",)) as there:
        ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert there.http.options(CHAT, headers=ask).headers["access-control-allow-origin"] == "http://page.example"
        assert there.http.get("/v1/models", headers={"Origin": "http://page.example"}).status_code == 200
        assert there.http.get("/v1/models", headers={"Origin": "http://other.example"}).status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_without_a_key_no_other_machine_is_served_unless_it_is_asked_for(host):
    with pytest.raises(ValueError, match="without a key"):
        Service(lambda: None, ServeConfig(host=host, api_key=None), Limits())


def test_empty_fields_of_other_servers_change_nothing(server):
    more = {"logit_bias": {}, "modalities": ["text"], "functions": None, "min_tokens": 0, "ignore_eos": False, "whatever": 3}
    assert server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1} | more).status_code == 200


@pytest.mark.parametrize(("origin", "words"), [("*", "not every web page"), ("evil", "must be an origin"), ("http://a/b", "must be an origin")])
def test_origins_that_let_everyone_in_or_nobody_are_refused(origin, words):
    with pytest.raises(ValueError, match=words):
        Service(lambda: None, ServeConfig(cors_origin=(origin,), api_key=None), Limits())
