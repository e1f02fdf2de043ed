"""The tokens of one request on their way from the engine's thread to the event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from qjax.generation import Generation, Token

GAP = 0.02
"""Seconds of a `pause`: the engine's thread must wait while the loop has the interpreter.

A small model's step takes 1 ms, to write a token to a client 0.2 ms; a large model's tokens come further apart, and each goes on at once.
"""


class Arrivals:
    """Made in the event loop; `listen` is called in another thread."""

    def __init__(self):
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self._came: deque[Token | None] = deque()
        self._wanted = False  # whether the loop waits for the next one
        self._ended = False

    def listen(self, generation: Generation, token: Token | None) -> None:
        self._came.append(token)
        if self._wanted or token is None:
            self._wanted = False
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody reads any more
                self._loop.call_soon_threadsafe(self._event.set)

    async def pause(self) -> None:
        """Lets tokens gather for a moment; not past the last one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._ended else GAP):  # Python 3.11's wait_for swallows a cancellation that comes with the event
                await self._event.wait()

    async def batches(self) -> AsyncIterator[list[Token]]:
        """Tokens as many as have come since the last time; ends where the request has ended. A loop that was left can be gone on with."""
        while not self._ended:
            self._wanted = True
            if not self._came:
                await self._event.wait()
            self._wanted = False
            self._event.clear()  # else a pause would end at once
            batch = [self._came.popleft() for _ in range(len(self._came))]
            self._ended = bool(batch) and batch[-1] is None
            if tokens := batch[: len(batch) - self._ended]:
                yield tokens
