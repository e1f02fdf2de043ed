"""The server as a process: uvicorn, and a stop that loses nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from types import FrameType

import uvicorn

from qjax.serving.app import application
from qjax.serving.service import Service

log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be taken."""
KEPT = 75
"""Seconds that a connection without a request is kept: an agent's tools take longer than uvicorn's 5."""
LAST = 5
"""Seconds that connections get to take what was sent to them, after the drain."""


def listening(host: str, port: int) -> socket.socket:
    """A socket on that address. OSError names it where it cannot be listened on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as e:
        raise OSError(f"cannot listen on {host}, port {port} (--host, --port): {e.strerror or e}") from None


class Server(uvicorn.Server):
    """Ends on the first SIGTERM, hang-up or Ctrl-C as planned, on the second at once. Requests that come meanwhile get 503."""

    def __init__(self, service: Service, listener: socket.socket):
        super().__init__(
            uvicorn.Config(
                application(service),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST,
                timeout_keep_alive=KEPT,
                server_header=False,
            )
        )
        self._service, self._listener, self._stopping = service, listener, False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serves until it is stopped."""
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGHUP, self.handle_exit) if in_main else None  # a closed terminal; uvicorn takes the other two
        try:
            super().run([self._listener])
        finally:
            if in_main:
                signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets=None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        log.info("listening on %s/v1", self.address)

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(128 + number)  # what the caches have on NVMe is whole at every moment
        self._stopping = True
        log.info("stopping: what runs is given %g s (--drain-seconds); a second signal stops at once", self._service.config.drain_seconds)
        self._loop.call_soon_threadsafe(lambda: self._service.spawn(self._drain()))

    def ended(self) -> None:
        """Called in the engine's thread where that ends, by itself or not."""
        self.should_exit = True

    async def _drain(self) -> None:
        # in a thread of its own: those for requests may all be waiting for the engine
        await asyncio.get_running_loop().run_in_executor(None, self._service.worker.drain, self._service.config.drain_seconds)
        self.should_exit = True
