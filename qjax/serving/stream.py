"""Responses that end where their client goes: server-sent events, and answers that are sent whole."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from qjax.serving.errors import ApiError, internal

log = logging.getLogger(__name__)

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"


def event(data: dict) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def until_gone(receive: Receive, work: Awaitable) -> bool:
    """Whether some work came to its end; it is cancelled where the client goes first. receive: after the whole body was read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        left.cancel()
        if not work.cancel():  # it has ended
            work.result()
        else:
            with contextlib.suppress(asyncio.CancelledError):
                await work


class EventStream:
    """Sends its headers at once, each event as it comes, and a comment in every `ping` seconds without one. An error is its last event."""

    def __init__(self, events: AsyncIterator[bytes], ping: float):
        self._events, self._ping, self._silent = events, ping, True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        pings = asyncio.ensure_future(self._pings(send))
        try:
            if await until_gone(receive, self._all(send)):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pings.cancel()

    async def _all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                async for data in events:
                    self._silent = False
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                if not isinstance(error, ApiError):
                    log.exception("a stream broke off")
                    error = internal()
                await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})

    async def _pings(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(self._ping)
            if self._silent:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


class Whole:
    """A JSON answer that takes its time."""

    def __init__(self, answer: Awaitable[dict]):
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            try:
                response = JSONResponse(await self._answer)
            except ApiError as error:
                response = failed(error)
            await response(scope, receive, send)

        await until_gone(receive, work())


def failed(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)
