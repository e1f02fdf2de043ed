"""What a server's process has in its heap after each of some rounds of requests: python -m tests.serving.heap CACHE prints it as JSON.

In a process of its own: in one with other tests' engines and threads the heap grows and shrinks by itself.
"""

import ctypes
import gc
import itertools
import json
import sys
from pathlib import Path

import httpx2

from qjax.ledger import Ledger
from tests.serving.inside import embedded, inside
from tests.serving.live import until
from tests.serving.wire import CHAT, post, wire

REQUESTS = 400
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


def grown(compile_cache: Path) -> list[tuple[int, int]]:
    """Of each round of REQUESTS: by how many objects, and by how many bytes."""
    numbers, found = itertools.count(), []
    with inside(lambda: embedded(compile_cache)) as there:
        there.service.worker.engine.caches.ledger = Ledger(8)  # its list of the last 1,000 would grow for long
        ask(there.http, numbers, REQUESTS)
        last = allocated()
        for _ in range(4):
            ask(there.http, numbers, REQUESTS)
            until(lambda: not there.service._tasks and not there.server.server_state.tasks, "end of what follows them")
            now = allocated()
            found.append((now[0] - last[0], now[1] - last[1]))
            last = now
    return found


if __name__ == "__main__":
    print(json.dumps(grown(Path(sys.argv[1]))))
