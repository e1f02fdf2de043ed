"""What a server holds after thousands of requests is what it held before."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.serving.heap import KINDS, REQUESTS, ask
from tests.serving.live import live
from tests.serving.wire import post, wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks glibc")


def test_a_request_leaves_nothing_in_the_heap(compile_cache):
    """Where one left a single object, or 1 KB, behind, every round would show it; what comes by itself does not come in every round."""
    done = subprocess.run([sys.executable, "-m", "tests.serving.heap", str(compile_cache)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    blocks, size = (min(values) for values in zip(*grown, strict=True))
    assert blocks < REQUESTS / KINDS, grown
    assert size < 1024 * REQUESTS / KINDS, grown


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
