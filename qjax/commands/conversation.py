"""A conversation whose turns go on from the state of earlier ones."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from qjax.engine import Engine
from qjax.generation import Cancelled, Generation, Progress
from qjax.sampling import Sampling
from qjax.state import Sequence

OPEN, CLOSE = "<think>", "</think>"
KEPT = 8
"""Sequences that are kept: of the last four turns, the prompt without the generation prompt (a prefix of whatever a template makes of
the answer afterwards) and the end of the answer."""


class Piece(NamedTuple):
    """Text of an answer, as much as one token completes; the tags between the parts belong to neither."""

    reasoning: str
    content: str


class Thinking:
    """Parts an answer into reasoning and content as it streams. opened: whether the prompt ends inside the reasoning."""

    def __init__(self, opened: bool):
        self._part, self._held = "reasoning" if opened else "start", ""

    def feed(self, text: str) -> Piece:
        self._held += text
        if self._part == "start":
            bare = self._held.lstrip()
            if len(bare) < len(OPEN) and OPEN.startswith(bare):
                return Piece("", "")
            self._part = "reasoning" if bare.startswith(OPEN) else "content"
            self._held = bare.removeprefix(OPEN) if self._part == "reasoning" else self._held
        reasoning = ""
        if self._part == "reasoning":
            reasoning, closed, rest = self._held.partition(CLOSE)
            if not closed:
                kept = max(n for n in range(len(CLOSE)) if reasoning.endswith(CLOSE[:n]))
                self._held = CLOSE[:kept]
                return Piece(reasoning[: len(reasoning) - kept], "")
            self._part, self._held = "content", rest
        content, self._held = self._held, ""
        return Piece(reasoning, content)

    def flush(self) -> Piece:
        """What was held back when the answer has ended."""
        text, self._held = self._held, ""
        return Piece(text, "") if self._part == "reasoning" else Piece("", text)


class Conversation:
    """Messages, and the sequences that their turns left. Closing it gives the sequences up.

    messages: as the template takes them. kept: held sequences, the oldest first. end: the tokens that the last turn ended with, if any.
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
        """ValueError for a model without a chat template."""
        if engine.model.template is None:
            raise ValueError(f"{engine.model.name} has no chat template; `qjax generate` continues plain text")
        self.engine, self.tools, self.thinking, self.sampling, self.max_tokens = engine, tools, thinking, sampling, max_tokens
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages, self.kept, self.end = list(self._system), [], None
        self._opening = self._find_opening()

    def _find_opening(self) -> np.ndarray:
        """The tokens with which the template begins an answer, int32 [n]; none where it cannot be asked."""
        try:
            asking, bare = (self.render([{"role": "user", "content": "?"}], ask) for ask in (True, False))
        except ValueError:
            return np.zeros(0, np.int32)
        return asking[common(asking, bare) :]

    def boundary(self, prompt: np.ndarray) -> int:
        """Tokens of a prompt before the beginning of the answer, at most all but the last.

        A prefix of whatever the template makes of the answer later. Found at the prompt's end: a second rendering without the
        generation prompt, which would say the same, takes 25 ms at 16,384 tokens, more than reading a short question.
        """
        n = self._opening.size
        return prompt.size - (n if n and np.array_equal(prompt[-n:], self._opening) else 1)

    def close(self) -> None:
        self._release(0)

    def clear(self) -> None:
        """Begins again, with the same system message."""
        self.close()
        self.messages, self.end = list(self._system), None

    def back(self) -> bool:
        """Takes back the last user message and all after it; False where there is none. Its state stays until newer ones replace it."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if users:
            del self.messages[users[-1] :]
            self.end = None
        return bool(users)

    def render(self, messages: list[dict], ask: bool = True) -> np.ndarray:
        """The prompt of messages, int32 [n]: with the beginning of an answer where `ask`."""
        ids = self.engine.model.template.render(messages, self.tools, add_generation_prompt=ask, enable_thinking=self.thinking)
        return np.array(ids, np.int32)

    def best(self, prompt: np.ndarray) -> Sequence | None:
        """The longest kept sequence that is a proper prefix of a prompt; it stays the conversation's."""
        fit = [s for s in self.kept if s.tokens.size < prompt.size and common(s.tokens, prompt) == s.tokens.size]
        return max(fit, key=lambda s: s.tokens.size, default=None)

    def say(self, new: str | list[dict], *, progress: Callable[[Progress], None] | None = None, cancel: Callable[[], bool] | None = None) -> "Turn":
        """The answer to new messages (a text is a user's): iterate it. ValueError, and nothing has happened, for a prompt that does not fit."""
        begin = time.perf_counter()
        messages = [*self.messages, *([{"role": "user", "content": new}] if isinstance(new, str) else new)]
        prompt = self.engine.check(self.render(messages))
        return Turn(self, begin, messages, prompt, progress, cancel)

    def keep(self, sequence: Sequence) -> None:
        """Takes over the caller's hold; the oldest above KEPT is released."""
        self.kept.append(sequence)
        self._release(KEPT)

    def make_room(self, prompt: np.ndarray, best: Sequence | None) -> None:
        """Releases kept sequences, the oldest first, until the pool has the pages of a whole turn."""
        engine, grid = self.engine, self.engine.layout.grid
        longest = min(prompt.size + self.max_tokens, engine.limit)
        # one more where the last page of `best` has to be copied
        wanted = -(-longest // grid) - (0 if best is None else best.tokens.size // grid) + 1
        for sequence in [s for s in self.kept if s is not best]:
            if engine.pool.free >= wanted:
                break
            self.kept = [s for s in self.kept if s is not sequence]
            engine.release(sequence)

    def _release(self, left: int) -> None:
        while len(self.kept) > left:
            self.engine.release(self.kept.pop(0))


class Turn:
    """One answer. Iterate it once for its pieces; `close` it after leaving the loop early, which ends it as cancelled.

    Afterwards the messages and the answer are in the conversation (not where it was cancelled before its first token), and
      prompt                 its token ids, int32 [n]
      start                  how many of them were not read again
      rewritten              the first token at which the template no longer wrote what the last turn had left, None where it did
      tokens, finish         what was generated, and "stop", "length" or "cancelled"
      reasoning, content     its text
      first_token_seconds    from `say` to the first token
      decode_seconds         from there to the end
    """

    def __init__(self, conversation: Conversation, begin: float, messages: list[dict], prompt: np.ndarray, progress, cancel):
        self._conversation, self._clock, self._messages, self._progress, self._cancel = conversation, begin, messages, progress, cancel
        self.prompt, self.start, self.rewritten = prompt, 0, None
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
        thinking, generation = Thinking(self._opened()), None
        try:
            generation = self._begin()
            before = time.perf_counter() - self._clock
            for token in generation:
                yield self._add(thinking.feed(token.text))
            yield self._add(thinking.flush())
        except Cancelled as cancelled:
            self._conversation.keep(cancelled.sequence)
        except GeneratorExit:
            pass
        finally:
            if generation is not None:
                generation.close()
                if generation.sequence is not None:
                    self._conversation.keep(generation.sequence)
        if generation is not None and generation.finish is not None:
            self._add(thinking.flush())
            self.first_token_seconds = before + generation.first_token_seconds
            self.decode_seconds = time.perf_counter() - self._clock - self.first_token_seconds
            self._settle(generation)

    def _opened(self) -> bool:
        return self._conversation.engine.model.tokenizer.decode(self.prompt[-8:]).rstrip().endswith(OPEN)

    def _begin(self) -> Generation:
        """Reads up to the history boundary, keeps that state, and goes on from there."""
        conversation, engine, prompt = self._conversation, self._conversation.engine, self.prompt
        best = conversation.best(prompt)
        self.start = 0 if best is None else best.tokens.size
        if conversation.end is not None:
            same = common(conversation.end, prompt)
            self.rewritten = same if same < conversation.end.size else None
        conversation.make_room(prompt, best)
        boundary = conversation.boundary(prompt)
        if boundary > self.start:
            best, _ = engine.prefill(prompt[:boundary], best, progress=self._progress, cancel=self._cancel)
            conversation.keep(best)
        settings = {"sampling": conversation.sampling, "max_tokens": conversation.max_tokens}
        return engine.generate(prompt, best, **settings, progress=self._progress, cancel=self._cancel)

    def _add(self, piece: Piece) -> Piece:
        self.reasoning += piece.reasoning
        self.content += piece.content
        return piece

    def _settle(self, generation: Generation) -> None:
        self.tokens, self.finish = generation.tokens, generation.finish
        if self.finish == "cancelled" and not self.tokens:
            return
        # a template puts its own line ends around the parts
        answer = {"role": "assistant", "content": self.content.lstrip("\n")}
        if self.reasoning:
            answer["reasoning_content"] = self.reasoning.strip("\n")
        self._conversation.messages, self._conversation.end = [*self._messages, answer], generation.sequence.tokens


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning of two token arrays."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
