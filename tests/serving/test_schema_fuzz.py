"""The published OpenAPI document against the server that publishes it: what schemathesis makes of it is answered as it says."""

import threading

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup

from qjax.serving.app import ROUTES
from qjax.serving.openapi import document
from tests.serving.inside import Inside, embedded, inside
from tests.serving.test_chat import ROOM, TOOL

SCHEMA = schemathesis.openapi.from_dict(document())
ACCEPTED, HEADERS = CHECKS.get_by_names(["positive_data_acceptance", "response_headers_conformance"])
LONGEST = 16
"""Tokens of an answer here: a number that is drawn can be any."""


@pytest.fixture(scope="module")
def there(compile_cache) -> Inside:
    with inside(lambda: embedded(compile_cache, context_tokens=2048), max_tokens=LONGEST) as there:
        yield there


def test_the_document_is_served_and_has_every_route(server):
    assert server.http.get("/openapi.json").json() == document()
    routes = {(route.path.replace(":path", ""), frozenset(route.methods - {"HEAD"})) for route in ROUTES}
    assert routes == {(path, frozenset(map(str.upper, methods))) for path, methods in document()["paths"].items()}


@SCHEMA.parametrize()
@hypothesis.settings(max_examples=20, derandomize=True, deadline=None, database=None)
def test_what_the_document_says_holds(case, there):
    """For bodies that fit it and bodies that do not: each status, header and body is one that it names, what fits is taken, the rest refused."""
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = "embedded"  # no other is there, and nothing behind it would be asked
        for name in ("max_tokens", "max_completion_tokens"):
            value = case.body.get(name)
            case.body |= {name: LONGEST} if isinstance(value, (int, float)) and value > LONGEST else {}
    response = case.call(base_url=there.url)
    case.validate_response(response, excluded_checks=[ACCEPTED] if model_refuses(response) else [])


def model_refuses(response) -> bool:
    """Whether it is the model that a body does not fit: how long its context and how large its vocabulary is, the document does not say."""
    error = response.json()["error"] if response.status_code == 400 else {}
    return error.get("code") == "context_length_exceeded" or error.get("message", "").startswith("token ids are 0 to")


@pytest.mark.parametrize(
    ("path", "given", "has"),
    [
        ("/v1/chat/completions", {"messages": ROOM, "logprobs": True, "top_logprobs": 2, "max_tokens": 60}, "reasoning_content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Please look up the code of heron."}], "tools": [TOOL], "max_tokens": 60},
            "tool_calls",
        ),
        ("/v1/chat/completions", {"messages": ROOM, "stream": True}, "[DONE]"),
        ("/v1/completions", {"prompt": "My room", "logprobs": 2}, "text_offset"),
        ("/v1/completions", {"prompt": "My room", "stream": True}, "[DONE]"),
        ("/tokenize", {"messages": ROOM}, "count"),
    ],
)
def test_answers_with_all_that_they_can_have(there, path, given, has):
    response = SCHEMA[path]["POST"].Case(body=given, media_type="application/json").call_and_validate(base_url=there.url)
    assert response.status_code == 200
    assert has in response.text


def test_a_model_is_found_by_its_name(there):
    case = SCHEMA["/v1/models/{name}"]["GET"].Case(path_parameters={"name": "embedded"})
    assert case.call_and_validate(base_url=there.url).status_code == 200


@pytest.mark.parametrize(("key", "status", "header"), [("another", 401, "www-authenticate"), ("key", 503, "retry-after")])
def test_errors_have_the_headers_that_the_document_names(key, status, header):
    go = threading.Event()

    def make():
        go.wait()
        raise ValueError("nothing is loaded here")

    case = SCHEMA["/v1/models"]["GET"].Case(headers={"Authorization": f"Bearer {key}"})
    with inside(make, ready=False, api_key="key") as there:
        try:
            response = case.call(base_url=there.url)
        finally:
            go.set()
    assert response.status_code == status
    case.validate_response(response, checks=[HEADERS])
    del response.headers[header]
    with pytest.raises(FailureGroup, match="(?i)" + header):
        case.validate_response(response, checks=[HEADERS])
