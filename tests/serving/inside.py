"""A server in this process, on a free port of loopback: real sockets, and an engine that a test can look into."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2

from qjax.config import CacheConfig, DiskConfig, EngineConfig, ServeConfig
from qjax.engine import Engine
from qjax.model.source import load
from qjax.serving.limits import Limits
from qjax.serving.server import Server, listening
from qjax.serving.service import Service
from tests.serving.live import until


@dataclass(frozen=True)
class Inside:
    """url: without /v1. http: a client of it."""

    url: str
    http: httpx2.Client
    service: Service
    server: Server


def embedded(compile_cache: Path, disk: DiskConfig | None = None, **settings) -> Engine:
    """An engine of the embedded model with caches; 2 requests at once, 4,096 tokens each."""
    settings = {"grid": 128, "context_tokens": 4096, "parallel": 2} | settings
    return Engine(load("embedded"), EngineConfig(compile_cache=compile_cache, **settings), CacheConfig(), disk)


@contextlib.contextmanager
def inside(
    make: Callable[[], Engine], limits: Limits | None = None, *, ready: bool = True, disk: DiskConfig | None = None, **config
) -> Iterator[Inside]:
    """Serves what `make` gives, called in the engine's thread; waits for it where `ready`. At the end a planned stop."""
    service = Service(make, ServeConfig(**{"drain_seconds": 0, "api_key": None, "admin_key": None} | config), limits or Limits(), disk=disk)
    server = Server(service, listening("127.0.0.1", 0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "server that listens")
        with httpx2.Client(base_url=server.address, timeout=300) as http:
            if ready:
                until(lambda: http.get("/ready").status_code == 200, "engine")
            yield Inside(server.address, http, service, server)
    finally:
        service.worker.drain(0)
        server.should_exit = True
        thread.join()
