"""/v1/chat/completions"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from qjax.config import REASONING
from qjax.generation import Token
from qjax.serving import align
from qjax.serving.answering import Answering
from qjax.serving.errors import BadRequest
from qjax.serving.numbers import chat_logprobs
from qjax.serving.parse import Arguments, Call, CallBegin, CallEnd, Content, Event, Parser, Reasoning
from qjax.serving.prompts import Prompt
from qjax.serving.schema import ChatRequest
from qjax.serving.service import Service
from qjax.serving.sessions import names
from qjax.serving.stream import DONE, EventStream, Whole, event
from qjax.thought import Thought


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    caller = service.caller(request)
    asked = service.side.applied(await service.body(request, ChatRequest))
    engine = service.engine
    prompt = await run_in_threadpool(service.prompts.prompt, asked, tenant=caller.tenant(asked.cache_salt), limit=engine.limit - 1)
    answer = ChatAnswer(service, asked, prompt, caller.name, **names(asked, request.headers))
    return EventStream(answer.chunks(), service.config.ping_seconds) if asked.stream else Whole(answer.whole())


class ChatAnswer:
    """One answer, streamed or whole."""

    def __init__(self, service: Service, asked: ChatRequest, prompt: Prompt, who: str, **names: str | None):
        """who: for the log. names: the conversation's. Raises as Answering, and BadRequest for a thinking budget on a model that does not think."""
        self._service, self._asked, self._prompt = service, asked, prompt
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.name}
        self._reasoning = REASONING[service.config.reasoning_field]
        self._parser = self._new_parser()
        self._events: list[Event] = []
        self._tokens: list[Token] = []
        self._calls: list[Call] = []
        engine = service.engine
        self._tokenizer = engine.model.tokenizer
        self._answering = Answering(
            service,
            who,
            prompt.tokens,
            self._take,
            self._settle,
            sampling=asked.sampling(engine.model.generation, secrets.randbits(63)),
            max_tokens=asked.limit or service.config.max_tokens or engine.limit,
            stop=asked.stops,
            tenant=prompt.aligned.tenant,
            history=prompt.history,
            user=prompt.user,
            parted=_parted(prompt),
            **names,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            thought=self._thought(),
        )

    def _new_parser(self) -> Parser:
        return Parser(self._prompt.opened, self._prompt.tools, lambda _: f"call_{secrets.token_hex(12)}")

    def _thought(self) -> Thought:
        asked, flag = self._asked.thinking_budget, self._service.config.thinking_budget
        try:
            return Thought.of(self._tokenizer, flag if asked is None else asked, self._prompt.opened)
        except ValueError as e:
            if asked is not None:
                raise BadRequest(str(e), "thinking_budget") from None
            return Thought.of(self._tokenizer, None, self._prompt.opened)

    # -- what the engine says

    def _take(self, batch: list[Token]) -> bool:
        self._note(self._parser.feed("".join(token.text for token in batch)))
        if self._asked.logprobs:
            self._tokens += [token for token in batch if token.logprobs and not token.hidden]
        return bool(self._events)

    def _settle(self) -> None:
        self._note(self._parser.flush())
        generation, parser = self._answering.generation, self._parser
        if generation.hidden:  # the record is of all that was generated, the client's parser has seen what the client gets
            parser = self._new_parser()
            parser.feed(generation.raw)
            parser.flush()
        self._service.prompts.keep(self._prompt, align.Answer(generation.tokens, parser.spans, self._calls, generation.hidden))

    def _note(self, events: list[Event]) -> None:
        self._events += events
        for e in events:
            match e:
                case CallBegin():
                    self._calls.append(Call(e.id, e.name, "", False))
                case Arguments():
                    self._calls[-1] = self._calls[-1]._replace(arguments=self._calls[-1].arguments + e.text)
                case CallEnd():
                    self._calls[-1] = self._calls[-1]._replace(complete=True)

    # -- what the client gets

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        yield self._chunk({"role": "assistant", "content": ""})
        async for _ in self._answering.batches():
            for delta in self._deltas():
                yield self._chunk(delta)
        include = self._asked.include_usage
        # a client that has not asked for a chunk without choices may look into the first choice of each
        yield self._chunk({}, self._finish, {} if include else {"usage": self._answering.usage})
        if include:
            yield event(self._object("chat.completion.chunk") | {"choices": [], "usage": self._answering.usage})
        yield DONE

    async def whole(self) -> dict:
        """The body of an answer that is not streamed."""
        texts = {Reasoning: [], Content: []}
        async for _ in self._answering.batches():
            for e in self._events:
                if type(e) in texts:
                    texts[type(e)].append(e.text)
            self._events = []
        reasoning, content = ("".join(texts[kind]) for kind in (Reasoning, Content))
        message = {"role": "assistant", "content": content if content or not self._calls else None}
        message |= {name: reasoning for name in self._reasoning if reasoning}
        if self._calls:
            function = [{"name": call.name, "arguments": call.arguments} for call in self._calls]
            message["tool_calls"] = [{"id": call.id, "type": "function", "function": f} for call, f in zip(self._calls, function, strict=True)]
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(), "finish_reason": self._finish}
        return self._object("chat.completion") | {"choices": [choice], "usage": self._answering.usage}

    def _deltas(self) -> Iterator[dict]:
        """What has come since the last time, texts of one kind joined."""
        events, self._events = self._events, []
        joined: list[Event] = []
        for e in events:
            last = joined[-1] if joined else None
            if type(last) is type(e) and isinstance(e, (Reasoning, Content, Arguments)):  # of another call there would be a CallBegin between
                joined[-1] = replace(e, text=last.text + e.text)
            else:
                joined.append(e)
        for e in joined:
            if delta := self._delta(e):
                yield delta

    def _delta(self, e: Event) -> dict | None:
        match e:
            case Reasoning():
                return dict.fromkeys(self._reasoning, e.text)
            case Content():
                return {"content": e.text}
            case CallBegin():
                return {"tool_calls": [{"index": e.index, "id": e.id, "type": "function", "function": {"name": e.name, "arguments": ""}}]}
            case Arguments():
                return {"tool_calls": [{"index": e.index, "function": {"arguments": e.text}}]}
        return None

    @property
    def _finish(self) -> str:
        finish = self._answering.generation.finish
        return "tool_calls" if finish == "stop" and self._calls else finish

    def _object(self, kind: str) -> dict:
        return {"object": kind, **self._head}

    def _chunk(self, delta: dict, finish: str | None = None, more: dict | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": self._logprobs(), "finish_reason": finish}
        return event(self._object("chat.completion.chunk") | {"choices": [choice]} | (more or {}))

    def _logprobs(self) -> dict | None:
        """Those of the tokens that have come since the last time."""
        tokens, self._tokens = self._tokens, []
        return chat_logprobs(tokens, self._tokenizer) if tokens else None


def _parted(prompt: Prompt) -> str | None:
    """Where and why it goes on as the client has sent it, for the ledger."""
    parted = prompt.aligned.parted
    return parted and f"message {parted.message}: {parted.why.meaning}"
