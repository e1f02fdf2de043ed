"""What a server holds after thousands of requests is what it held before."""

import contextlib
import ctypes
import gc
import itertools
import os
import sys
from pathlib import Path

import httpx2
import pytest

from qjax.ledger import Ledger
from tests.serving.inside import embedded, inside
from tests.serving.live import live, until
from tests.serving.wire import CHAT, post, wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks glibc")
KINDS = 5
"""Requests of `ask` for each number: answered whole, streamed, refused, given up in the body, given up in the answer."""


def ask(http: httpx2.Client, numbers, count: int) -> None:
    """So many requests, each conversation with a name and a salt of its own; they have all ended and the caches are empty at the end."""
    url = str(http.base_url)
    for number in itertools.islice(numbers, count // KINDS):
        body = {"messages": [{"role": "user", "content": f"My room is {number}."}], "max_tokens": 2}
        body |= {"cache_salt": f"salt {number}", "session_id": f"session {number}"}
        assert http.post(CHAT, json=body).status_code == 200
        with http.stream("POST", CHAT, json=body | {"stream": True}) as stream:
            assert "data: [DONE]" in stream.iter_lines()
        assert http.post(CHAT, json=body | {"n": 2}).status_code == 400
        with wire(url) as connection:
            connection.sendall(post(body)[:-3])
        with wire(url) as connection:
            connection.sendall(post(body | {"stream": True, "max_tokens": 3000}))
            assert connection.recv(100)
    until(lambda: "qjax_requests 0.0" in http.get("/metrics").text, "end of all requests")
    assert http.post("/v1/cache/clear").status_code == 200


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]


def allocated() -> tuple[int, int]:
    """Of this process: objects that Python has in its own heap, and bytes that malloc has given out."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return sys.getallocatedblocks(), found.uordblks + found.hblkhd


def test_a_request_leaves_nothing_in_the_heap(compile_cache):
    """Where one left a single object, or 1 KB, behind, every round would show it; what comes by itself does not come in every round."""
    numbers, requests, grown = itertools.count(), 400, []
    with inside(lambda: embedded(compile_cache)) as there:
        there.service.worker.engine.caches.ledger = Ledger(8)  # its list of the last 1,000 would grow for long
        ask(there.http, numbers, requests)
        last = allocated()
        for _ in range(4):
            ask(there.http, numbers, requests)
            until(lambda: not there.service._tasks and not there.server.server_state.tasks, "end of what follows them")
            now = allocated()
            grown.append((now[0] - last[0], now[1] - last[1]))
            last = now
    blocks, size = (min(values) for values in zip(*grown, strict=True))
    assert blocks < requests / KINDS, grown
    assert size < 1024 * requests / KINDS, grown


def held(pid: int) -> tuple[int, int, int]:
    """Of a process: KiB of memory, open files, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def test_a_process_stays_as_large_as_it_was_and_its_stop_waits_for_nobody(compile_cache, tmp_path):
    """Connections that say nothing, and one that reads nothing, are open when the stop comes, which must end with 0."""
    numbers = itertools.count()
    flags = ("--compile-cache", str(compile_cache), "--disk-cache", "none", "--context-tokens", "4096")
    with contextlib.ExitStack() as stack, live(tmp_path, *flags) as server, httpx2.Client(base_url=server.url, timeout=300) as http:
        ask(http, numbers, 600)
        memory, *others = held(server.process.pid)
        ask(http, numbers, 600)
        now, *left = held(server.process.pid)
        assert now <= memory * 1.05
        assert left == others
        answer = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4000, "temperature": 3, "stream": True}
        for begin in (b"", post(answer)[:-1], post(answer | {"logprobs": True, "top_logprobs": 20})):
            stack.enter_context(wire(server.url, 4096)).sendall(begin)
