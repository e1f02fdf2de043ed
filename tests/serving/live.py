"""A server in a process of its own, on a free port of loopback: `qjax serve` as a user starts it."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

SECONDS = 300  # a first start compiles every program, on a machine that may be busy
ADDRESS = re.compile(r"http://127\.0\.0\.1:[1-9]\d*")


@dataclass(frozen=True)
class Live:
    """url: without /v1. log: what it has written so far is there."""

    url: str
    process: subprocess.Popen
    log: Path


@contextlib.contextmanager
def live(directory: Path, *flags: str, program: Sequence[str] = ("qjax.cli",)) -> Iterator[Live]:
    """Starts a server and waits until it is ready; at the end it is asked to stop, which must end it with 0.

    directory: for its log. program: the module that is run, with its first arguments.
    """
    log = directory / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *program, "serve", "--port", "0", *flags], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield Live(_ready(process, log), process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def until(function, what: str, seconds: float = SECONDS):
    """The first value of a function that is true. AssertionError where there is none in that time."""
    end = time.monotonic() + seconds
    while not (value := function()):
        assert time.monotonic() < end, f"in {seconds} s there was no {what}"
        time.sleep(0.05)
    return value


def _ready(process: subprocess.Popen, log: Path) -> str:
    def address() -> str | None:
        assert process.poll() is None, f"the server ended with {process.returncode}: {log.read_text()}"
        found = ADDRESS.search(log.read_text())
        return found[0] if found else None

    url = until(address, "address")

    def ready() -> bool:
        assert process.poll() is None, f"the server ended with {process.returncode}: {log.read_text()}"
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/ready").status_code == 200
        return False

    until(ready, "server that is ready")
    return url
