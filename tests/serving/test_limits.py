"""Requests above a limit and bodies that are no JSON are refused before anything else looks at them, and what a client is then told."""

import json

import pytest

from qjax.serving import errors
from qjax.serving.errors import BadRequest, TooLarge
from qjax.serving.limits import DEEPEST, Limits, read


def sent(value) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("body", "limits", "message"),
    [
        ({"messages": [1, 2]}, {"max_messages": 1}, r"messages may have 1 entries \(--max-messages\), found 2"),
        ({"tools": [1, 2]}, {"max_tools": 1}, r"tools may have 1 entries"),
        ({"stop": ["a", "b"]}, {"max_stops": 1}, r"stop may have 1 entries"),
        ({"a": [[[[1]]]]}, {"max_depth": 4}, r"a\[0\]\[0\]: JSON may be nested 4 deep \(--max-depth\)"),
        ({"a": [0] * 99}, {"max_values": 99}, r"a body may have 99 values \(--max-values\)"),
        (
            {"messages": [{"content": "x" * 9}]},
            {"max_string": 8},
            r"messages\[0\].content: a string may have 8 characters .*, found 9: reduce the length",
        ),
        ({"a": {"x" * 9: 1}}, {"max_string": 8}, "a.xxxxxxxxx: a string may have 8 characters"),
        ({"a": "\ud83d"}, {}, "a: expected text, found half of a surrogate pair"),
        ({"a": {"\ude00": 1}}, {}, r"a\.\*: expected text, found half of a surrogate pair"),
        ([], {}, "expected a JSON object, found a list"),
        (float("nan"), {}, "expected a JSON object, found a number that is none, or too large"),
    ],
)
def test_a_request_has_limits(body, limits, message):
    with pytest.raises((BadRequest, TooLarge), match=message) as refused:
        read(sent(body), Limits(**limits))
    assert refused.value.status == (413 if "--max-string" in message or "may have 8" in message else 400)
    roomy = {name: value + 1 for name, value in limits.items()}
    if limits:
        read(sent(body), Limits(**roomy))  # what stands just within a limit passes


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"a":1e999}', b"\xff{}", b"[" * 10**6, b'{"a":' + b"9" * 5000 + b"}", b"\xff\xfe{\x00}\x00", b'{"a": Infinity}', b"nul"]
)
def test_what_is_no_json_is_refused(body):
    with pytest.raises(BadRequest, match=r"expected a|JSON may be nested"):
        read(body, Limits())


def test_pairs_of_surrogates_are_text():
    assert read(b'{"a":"\\ud83d\\ude00"}', Limits()) == {"a": "\U0001f600"}


def test_a_body_above_its_bytes_is_refused_before_it_is_parsed():
    limits = Limits(max_body_mb=1)
    assert read(b'{"a":1}'.ljust(2**20), limits) == {"a": 1}
    assert limits.too_long(2**20) is None
    with pytest.raises(TooLarge, match=r"a body may have 1,048,576 bytes \(--max-body-mb\): reduce the length of the messages"):
        read(b"{" * (2**20 + 1), limits)


@pytest.mark.parametrize("fields", [{"max_tools": 0}, {"max_depth": DEEPEST + 1}, {"max_messages": True}, {"max_string": 1.5}])
def test_limits_out_of_range(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be"):
        Limits(**fields)


def test_the_deepest_json_that_may_be_allowed_is_read():
    value = 1
    for _ in range(DEEPEST - 1):
        value = [value]
    assert read(sent({"a": value}), Limits(max_depth=DEEPEST)) == {"a": value}


def test_error_bodies_have_the_status_and_the_words_that_clients_act_on():
    told = errors.ContextExceeded(9000, 8192)
    assert (told.status, told.code) == (400, "context_length_exceeded")
    assert "maximum context length is 8192 tokens" in told.message
    refused = errors.Unauthorized()
    assert (refused.status, refused.code, refused.headers) == (401, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
    unknown = errors.ModelNotFound("gpt\ud800", "qwen3.8-27b")
    assert (unknown.status, unknown.code, unknown.param) == (404, "model_not_found", "model")
    json.dumps(unknown.body(), ensure_ascii=False).encode()
    full, loading = errors.Busy("the queue is full", 3), errors.Unavailable("the model is being loaded", 7)
    assert (full.status, full.headers, loading.status, loading.headers) == (429, {"Retry-After": "3"}, 503, {"Retry-After": "7"})
    assert errors.Forbidden("not from there").status == 403
