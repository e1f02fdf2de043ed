"""A conversation over an engine's caches: its turns read only what is new."""

import time
from collections.abc import Callable, Iterator

import numpy as np

from qjax.boundaries import Boundaries
from qjax.caches.keys import common
from qjax.engine import Engine
from qjax.generation import Generation, Progress
from qjax.sampling import Sampling
from qjax.thinking import OPEN, Piece, Thinking


class Conversation:
    """Messages. What their turns computed is kept by the engine's caches, which every conversation shares.

    messages: as the template takes them. end: the tokens that the last turn ended with, if any.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        tools: list[dict] | None = None,
        thinking: bool = True,
        sampling: Sampling | None = None,
        max_tokens: int = 512,
    ):
        """engine: one with caches. ValueError for a model without a chat template."""
        if engine.model.template is None:
            raise ValueError(f"{engine.model.name} has no chat template; `qjax generate` continues plain text")
        self.engine, self.tools, self.thinking, self.sampling, self.max_tokens = engine, tools, thinking, sampling, max_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages, self.end = list(self._system), None
        self.boundaries = Boundaries(engine.model.template, enable_thinking=thinking)

    def clear(self) -> None:
        """Begins again, with the same system message."""
        self.messages, self.end = list(self._system), None

    def back(self) -> bool:
        """Takes back the last user message and all after it; False where there is none."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if users:
            del self.messages[users[-1] :]
            self.end = None
        return bool(users)

    def render(self, messages: list[dict], ask: bool = True) -> np.ndarray:
        """The prompt of messages, int32 [n]: with the beginning of an answer where `ask`."""
        ids = self.engine.model.template.render(messages, self.tools, add_generation_prompt=ask, enable_thinking=self.thinking)
        return np.array(ids, np.int32)

    def say(self, new: str | list[dict], *, progress: Callable[[Progress], None] | None = None, cancel: Callable[[], bool] | None = None) -> "Turn":
        """The answer to new messages (a text is a user's): iterate it. ValueError, and nothing has happened, for a prompt that does not fit."""
        begin = time.perf_counter()
        messages = [*self.messages, *([{"role": "user", "content": new}] if isinstance(new, str) else new)]
        prompt = self.engine.check(self.render(messages))
        generation = self.engine.generate(
            prompt,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            history=self.boundaries.history(prompt),
            user=self.boundaries.user(messages, prompt),
            progress=progress,
            cancel=cancel,
        )
        return Turn(self, begin, messages, prompt, generation)


class Turn:
    """One answer. Iterate it once for its pieces; `close` it after leaving the loop early, which ends it as cancelled.

    Afterwards the messages and the answer are in the conversation (not where it was cancelled before its first token), and
      prompt                 its token ids, int32 [n]
      source, start          where the state came from that it went on from, as in the ledger, and how many tokens it had
      read_again             tokens that were read again although something kept agreed with them
      rewritten              the first token at which the template no longer wrote what the last turn had left, None where it did
      tokens, finish         what was generated, and "stop", "length" or "cancelled"
      reasoning, content     its text
      first_token_seconds    from `say` to the first token
      decode_seconds         from there to the end
    """

    def __init__(self, conversation: Conversation, begin: float, messages: list[dict], prompt: np.ndarray, generation: Generation):
        self._conversation, self._clock, self._messages, self._generation = conversation, begin, messages, generation
        self.prompt, self.source, self.start, self.read_again, self.rewritten = prompt, "cold", 0, 0, None
        self.tokens, self.finish, self.reasoning, self.content = [], "cancelled", "", ""
        self.first_token_seconds = self.decode_seconds = 0.0
        self._steps = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._steps

    @property
    def read(self) -> int:
        """Prompt tokens that were read."""
        return self.prompt.size - self.start

    def close(self) -> None:
        """Ends the answer where it is."""
        self._steps.close()

    def _run(self) -> Iterator[Piece]:
        thinking, generation, engine = Thinking(self._opened()), self._generation, self._conversation.engine
        before = time.perf_counter() - self._clock
        try:
            for token in generation:
                yield self._add(thinking.feed(token.text))
            yield self._add(thinking.flush())
        except GeneratorExit:
            pass
        finally:
            generation.close()
            if generation.sequence is not None:
                engine.release(generation.sequence)
        if generation.finish is not None:
            self._add(thinking.flush())
            self.first_token_seconds = before + generation.first_token_seconds
            self.decode_seconds = time.perf_counter() - self._clock - self.first_token_seconds
            self._settle(generation)

    def _opened(self) -> bool:
        return self._conversation.engine.model.tokenizer.decode(self.prompt[-8:]).rstrip().endswith(OPEN)

    def _add(self, piece: Piece) -> Piece:
        self.reasoning += piece.reasoning
        self.content += piece.content
        return piece

    def _settle(self, generation: Generation) -> None:
        conversation = self._conversation
        record = conversation.engine.caches.ledger.records[-1]
        self.source, self.start, self.read_again = record.source, record.start, record.read_again
        if conversation.end is not None:
            same = common(conversation.end, self.prompt)
            self.rewritten = same if same < conversation.end.size else None
        self.tokens, self.finish = generation.tokens, generation.finish
        if self.finish == "cancelled" and not self.tokens:
            return
        # a template puts its own line ends around the parts
        answer = {"role": "assistant", "content": self.content.lstrip("\n")}
        if self.reasoning:
            answer["reasoning_content"] = self.reasoning.strip("\n")
        conversation.messages, conversation.end = [*self._messages, answer], generation.sequence.tokens
