"""One request, from its submission to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import numpy as np
from starlette.concurrency import run_in_threadpool

from qjax.engine import ContextOverflow
from qjax.generation import Token
from qjax.pages import PoolFull
from qjax.serving.arrivals import Arrivals
from qjax.serving.errors import ApiError, BadRequest, ContextExceeded, Unavailable, internal
from qjax.serving.service import Service

log = logging.getLogger(__name__)


class Answering:
    """Submitted when it is made; `batches` has its tokens. Whoever leaves that loop early ends the request, and it comes to its end by itself.

    generation: the engine's. take: told each batch, says whether the client gets something of it; settle: called after the last, in some thread.
    """

    def __init__(self, service: Service, who: str, tokens: np.ndarray, take: Callable[[list[Token]], bool], settle: Callable[[], None], **options):
        """who: for the log. options: of `Engine.generate`. Raises BadRequest, ContextExceeded, Busy and Unavailable."""
        self._service, self._who, self._take, self._settle = service, who, take, settle
        self._arrivals = Arrivals()
        try:
            self.generation = service.worker.submit(tokens, self._arrivals.listen, **options)
        except ContextOverflow as e:
            raise ContextExceeded(e.tokens, e.limit) from None
        except ValueError as e:
            raise BadRequest(str(e)) from None

    async def batches(self) -> AsyncIterator[None]:
        """After each batch of which the client gets something, and once more when all is settled. Raises ApiError where it broke off."""
        ended = False
        try:
            async for batch in self._arrivals.batches():
                if self._take(batch):
                    yield
                    await self._arrivals.pause()
            ended = True
        finally:
            if not ended:
                self._service.worker.cancel(self.generation)
                self._service.spawn(self._rest())
        await asyncio.shield(self._service.spawn(self._end()))  # the client can still go
        if error := self._error():
            raise error
        yield

    async def _rest(self) -> None:
        async for batch in self._arrivals.batches():
            self._take(batch)
        await self._end()

    async def _end(self) -> None:
        await run_in_threadpool(self._settle)
        g = self.generation
        self._service.metrics.ended(g)
        log.info(
            "%s: prompt %s, cached %s; answer %s, %s; first token %.2f s, then %.2f s",
            *(self._who, f"{g.prompt_tokens:,}", f"{g.start:,}", f"{len(g.tokens):,}", g.finish, g.first_token_seconds, g.decode_seconds),
        )

    def _error(self) -> ApiError | None:
        error = self.generation.error
        if isinstance(error, PoolFull):
            return Unavailable("no room for the rows of this request beside those that run (--kv-gb)")
        if error is not None:
            log.error("a request broke off", exc_info=error)
            return internal()
        return Unavailable("the server stops, and has cut this answer off") if self.generation.finish == "cancelled" else None

    @property
    def usage(self) -> dict:
        generation = self.generation
        read, written = generation.prompt_tokens, len(generation.tokens)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": generation.start},
            "completion_tokens_details": {"reasoning_tokens": generation.thought_tokens},
        }
