"""What clients do to connections: each answer stays right, and when they have gone nothing is left of them."""

import contextlib
import gc
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from qjax.config import ServeConfig
from tests.serving.inside import Inside, embedded, inside
from tests.serving.live import until
from tests.serving.test_worker import metric, without_end
from tests.serving.wire import CHAT, answer, answers, post, reset, wire

SHORT = {"messages": [{"role": "user", "content": "My room is 2354. What is my room?"}], "max_tokens": 20, "temperature": 0}
LONG = SHORT | {"max_tokens": 3000, "stream": True}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOTS = 2


@pytest.fixture(scope="module")
def endless(compile_cache) -> Inside:
    """A model that never says that it has done: an answer has as many tokens as it may have."""
    with inside(without_end(lambda: embedded(compile_cache, parallel=SLOTS))) as there:
        yield there


def left(there: Inside) -> tuple[int, int, int]:
    """What a server holds while nobody asks, its caches empty: pages, and its process's files and threads."""
    until(lambda: there.service.worker.waiting == 0, "end of all requests")
    until(lambda: not there.service._tasks, "end of what follows them")
    assert there.http.post("/v1/cache/clear").status_code == 200
    until(lambda: len(there.server.server_state.connections) <= 1, "end of all connections")  # this client's own
    until(lambda: len(there.server.server_state.tasks) == 0, "end of all tasks")
    gc.collect()
    pages = there.service.worker.do(lambda engine: engine.pool.pages - engine.pool.free)
    # threads for requests are kept for later ones, 40 at the most
    return pages, len(os.listdir("/proc/self/fd")), sum("AnyIO" not in thread.name for thread in threading.enumerate())


@pytest.fixture
def there(endless) -> Inside:
    """The server, of which a test must leave what it found."""
    before = left(endless)
    yield endless
    after = left(endless)
    # other servers are in this process too, whose connections may end meanwhile
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def text(response) -> str:
    """The text of an answer that is not streamed."""
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    return message.get("reasoning", "") + message["content"]


def streamed(lines) -> str:
    """The text of a stream, which must have come to its end."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    deltas = [choice["delta"] for chunk in map(json.loads, data) for choice in chunk["choices"]]
    return "".join(delta.get("reasoning", "") + delta.get("content", "") for delta in deltas)


def test_a_body_that_comes_byte_by_byte(there):
    with wire(there.url) as connection:
        for byte in post(SHORT):
            connection.sendall(bytes([byte]))
        status, body = answer(connection)
    assert status == 200
    assert json.loads(body)["choices"] == there.http.post(CHAT, json=SHORT).json()["choices"]


def test_requests_one_after_the_other_in_one_piece(there):
    """And answered in their order."""
    with wire(there.url) as connection:
        connection.sendall(post(SHORT | {"max_tokens": 3}) + HEALTH + post({"messages": 5}) + post(SHORT | {"max_tokens": 2}))
        found = answers(connection, 4)
    assert [status for status, _ in found] == [200, 200, 400, 200]
    assert [json.loads(found[i][1])["usage"]["completion_tokens"] for i in (0, 3)] == [3, 2]


@pytest.mark.parametrize("length", [10, -1, "x", "1e3", 10**30])
def test_a_length_that_is_wrong_is_told(there, length):
    with wire(there.url) as connection:
        connection.sendall(post(SHORT, length=length))
        assert answer(connection)[0] == 400
    assert there.http.post(CHAT, json=SHORT).status_code == 200


@pytest.mark.parametrize(
    "request_",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n", b"GET\r\n\r\n", post(SHORT).replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n")],
)
def test_what_is_no_http_is_told(there, request_):
    with wire(there.url) as connection:
        connection.sendall(request_ + b"\r\n\r\n")
        assert answer(connection)[0] == 400


def test_bodies_that_never_come_hold_nobody_up(there):
    with contextlib.ExitStack() as stack:
        for begin in (b"", b"POST", post(b"", length=9), post(SHORT, length=5000), post(SHORT)[:-1]) * 10:
            stack.enter_context(wire(there.url)).sendall(begin)
        assert text(there.http.post(CHAT, json=SHORT))


def test_a_half_closed_connection_counts_as_a_client_that_has_gone(there):
    ended = metric(there, 'qjax_generations_total{finish="cancelled"}')
    with wire(there.url) as connection:
        connection.sendall(post(LONG))
        assert connection.recv(10)
        connection.shutdown(socket.SHUT_WR)
        until(lambda: metric(there, 'qjax_generations_total{finish="cancelled"}') == ended + 1, "end")
    with wire(there.url) as connection:
        connection.sendall(post(SHORT, length=5000))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(10) == b""


def test_a_client_that_does_not_read_holds_nobody_up_and_loses_nothing(there):
    """Its answer has 20 tokens for each: more than connections take by themselves."""
    whole = there.http.post(CHAT, json=LONG | {"stream": False})
    with wire(there.url, 4096) as connection:
        connection.sendall(post(LONG | {"logprobs": True, "top_logprobs": 20}))
        until(lambda: there.service.worker.waiting == 0 and text(there.http.post(CHAT, json=SHORT)), "end of the generation")
        assert there.server.server_state.tasks  # the response has not ended
        status, body = answer(connection)
    assert status == 200
    assert len(body) > 4 * 2**20
    assert streamed(body.decode().split("\n")) == text(whole)


@pytest.mark.parametrize("close", [socket.socket.close, reset])
@pytest.mark.parametrize(
    "begin", [b"", post(SHORT)[:60], post(SHORT)[:-10], post(SHORT), post(LONG)], ids=["connection", "headers", "body", "answer", "stream"]
)
def test_connections_that_open_and_close(there, begin, close):
    """200 in all, at every moment of a request."""
    ended = metric(there, 'qjax_generations_total{finish="length"}')
    for _ in range(20):
        with wire(there.url) as connection:
            connection.sendall(begin)
            if begin == post(LONG):
                assert connection.recv(100)
            close(connection)
    assert text(there.http.post(CHAT, json=SHORT))
    if begin == post(LONG):  # none of them was written to its end
        until(lambda: there.service.worker.waiting == 0, "end of all")
        assert metric(there, 'qjax_generations_total{finish="length"}') == ended + 1


def test_clients_that_vanish_while_they_wait(there):
    cancelled = metric(there, 'qjax_generations_total{finish="cancelled"}')
    with contextlib.ExitStack() as running:
        for _ in range(SLOTS):
            connection = running.enter_context(wire(there.url))
            connection.sendall(post(LONG | {"max_tokens": 4000, "temperature": 3}))
            assert connection.recv(100)
        with contextlib.ExitStack() as waiting:
            for i in range(20):
                connection = waiting.enter_context(wire(there.url))
                connection.sendall(post(LONG | {"stream": i % 2 == 0}))
            until(lambda: there.service.worker.waiting == SLOTS + 20, "queue")
        until(lambda: there.service.worker.waiting <= SLOTS, "end of those that wait")
    until(lambda: metric(there, 'qjax_generations_total{finish="cancelled"}') >= cancelled + 20, "record of them")


def test_a_client_that_goes_at_the_very_end_is_counted(there, monkeypatch):
    """While its answer is put on record, which has been generated."""
    keep, begun, go = there.service.prompts.keep, threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        go.wait()
        return keep(*args)

    monkeypatch.setattr(there.service.prompts, "keep", slow)
    counted = metric(there, 'qjax_generations_total{finish="length"}')
    with wire(there.url) as connection:
        connection.sendall(post(SHORT))
        assert begun.wait(300)
    until(lambda: not there.server.server_state.tasks, "end of the response")
    go.set()
    until(lambda: metric(there, 'qjax_generations_total{finish="length"}') == counted + 1, "record of it")


def test_50_streams_at_once_say_what_each_says_alone(there):
    def body(i: int, salt: str) -> dict:
        return SHORT | {
            "messages": [{"role": "user", "content": f"My room is {2000 + 7 * i}. What is my room?"}],
            "max_tokens": 40,
            "cache_salt": salt,
        }

    def stream(i: int) -> str:
        with (
            httpx2.Client(base_url=there.url, timeout=300) as client,
            client.stream("POST", CHAT, json=body(i, "at once") | {"stream": True}) as lines,
        ):
            assert lines.status_code == 200
            return streamed(lines.iter_lines())

    alone = [text(there.http.post(CHAT, json=body(i, "alone"))) for i in range(50)]
    with ThreadPoolExecutor(50) as clients:
        together = list(clients.map(stream, range(50)))
    assert together == alone
    assert len(set(alone)) > 25
    assert ServeConfig().queue + SLOTS >= 50  # none of them was refused
