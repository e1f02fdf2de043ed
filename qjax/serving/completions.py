"""/v1/completions: plain text goes on, with no template."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from qjax.generation import Token
from qjax.serving.answering import Answering
from qjax.serving.keys import Caller
from qjax.serving.numbers import completion_logprobs
from qjax.serving.schema import CompletionRequest
from qjax.serving.service import Service
from qjax.serving.sessions import names
from qjax.serving.stream import DONE, EventStream, Whole, event

DEFAULT = 16
"""Tokens of an answer whose request names no number: OpenAI's."""


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    caller = service.caller(request)
    asked = await service.body(request, CompletionRequest)
    tokenizer = service.engine.model.tokenizer
    ids = await run_in_threadpool(tokenizer.encode, asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
    answer = Completion(service, asked, np.array(ids, np.int64), caller, **names(asked, request.headers))
    return EventStream(answer.chunks(), service.config.ping_seconds) if asked.stream else Whole(answer.whole())


class Completion:
    """One answer, streamed or whole."""

    def __init__(self, service: Service, asked: CompletionRequest, tokens: np.ndarray, caller: Caller, **names: str | None):
        """Raises what Answering raises."""
        self._asked, self._batch, self._offset = asked, [], 0
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": service.name}
        engine = service.engine
        self._tokenizer = engine.model.tokenizer
        self._answering = Answering(
            service,
            caller.name,
            tokens,
            self._take,
            lambda: None,
            sampling=asked.sampling(engine.model.generation, secrets.randbits(63)),
            max_tokens=asked.limit or DEFAULT,
            stop=asked.stops,
            tenant=caller.tenant(asked.cache_salt),
            logprobs=asked.logprobs,
            **names,
        )

    def _take(self, batch: list[Token]) -> bool:
        self._batch += batch
        return True

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        async for _ in self._answering.batches():
            if self._batch:
                yield event(self._head | {"choices": [self._choice(None)]})
        usage, include = {"usage": self._answering.usage}, self._asked.include_usage
        yield event(self._head | {"choices": [self._choice(self._answering.generation.finish)]} | ({} if include else usage))
        if include:
            yield event(self._head | {"choices": []} | usage)
        yield DONE

    async def whole(self) -> dict:
        """The body of an answer that is not streamed."""
        async for _ in self._answering.batches():
            pass
        return self._head | {"choices": [self._choice(self._answering.generation.finish)], "usage": self._answering.usage}

    def _choice(self, finish: str | None) -> dict:
        """With what has come since the last time."""
        batch, self._batch, offset = self._batch, [], self._offset
        text = "".join(token.text for token in batch)
        self._offset += len(text)
        tokens = [token for token in batch if token.logprobs]
        logprobs = completion_logprobs(tokens, self._tokenizer, offset) if tokens else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
