"""What a request sees: progress, tokens, the end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qjax.sampling import sample
from qjax.state import Sequence
from qjax.text import StopStrings


class Progress(NamedTuple):
    """How far a prefill is. done, total: prompt tokens; start: those of them that were not read again. seconds: since it began."""

    done: int
    total: int
    start: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens read a second; 0 before the first forward has ended."""
        return (self.done - self.start) / self.seconds if self.seconds else 0.0


class Cancelled(Exception):
    """A prefill was cancelled. `sequence`: what was computed up to the last finished row, held for the caller."""

    def __init__(self, sequence: Sequence):
        super().__init__(f"cancelled after {int(sequence.length)} tokens")
        self.sequence = sequence


class Token(NamedTuple):
    """A generated token and the text that it completes.

    The text lags behind where a character is not complete or a stop string may be beginning; what is left at the end comes
    with no token (id None).
    """

    id: int | None
    text: str


class Generation:
    """Iterate it once for the tokens. The first `next` runs the prefill; leaving the loop early ends the generation as cancelled.

    Afterwards:
      sequence        the state at the last forwarded token, held for the caller (release it through the engine)
      tokens, text    what was generated, without the stop token or stop string
      finish          "stop", "length" or "cancelled"
      start           prompt tokens that were not read again
      prompt_tokens, prefill_seconds, first_token_seconds, decode_seconds
    """

    def __init__(self, engine, prompt, sequence, request, sampling, max_tokens, stop, progress, cancel):
        self._engine, self._prompt, self._from, self._request = engine, prompt, sequence, request
        self._sampling, self._max_tokens = sampling, max_tokens
        self._stop, self._progress, self._cancel = StopStrings(stop), progress, cancel
        self.tokens: list[int] = []
        self.text, self.finish, self.sequence = "", None, None
        self.prompt_tokens, self.start = prompt.size, 0
        self.prefill_seconds = self.first_token_seconds = self.decode_seconds = 0.0
        self._steps: weakref.ref | None = None

    def __iter__(self) -> Iterator[Token]:
        steps = self._run()
        if self._steps is None:
            self._steps = weakref.ref(steps)  # the loop holds it alone: leaving the loop ends it
        else:
            steps.close()  # nothing comes a second time
        return steps

    def close(self) -> None:
        """Ends the generation where it is; what was computed stays in `sequence`."""
        steps = iter(self) if self._steps is None else self._steps()
        if steps is not None:
            steps.close()

    def _run(self) -> Iterator[Token]:
        engine, tokenizer = self._engine, self._engine.model.tokenizer
        begin = time.perf_counter()
        self.finish = "cancelled"
        request = self._request() if self._request else None
        self.start = request.start if request else 0
        try:
            done = engine.run_prompt(self._prompt, self._from, request=request, progress=self._progress, cancel=self._cancel)
        except Cancelled as cancelled:
            self.sequence = cancelled.sequence
            self._settle(request)
            return
        except BaseException:
            if request:
                request.fail()
            raise
        slot, logits, self.start, self.prefill_seconds = done.slot, done.logits, done.start, time.perf_counter() - begin
        stream = tokenizer.stream()
        try:
            while True:
                history = np.array(slot.tokens if self._sampling.penalizes else [], np.int32)
                token = sample(logits, self._sampling, history, len(self.tokens), tokenizer.size)
                self.first_token_seconds = self.first_token_seconds or time.perf_counter() - begin
                if token in tokenizer.stop_ids:
                    self.finish = "stop"
                    break
                self.tokens.append(token)
                text, stopped = self._stop.feed(stream.step(token))
                self.text += text
                yield Token(token, text)
                if stopped or len(self.tokens) == self._max_tokens:
                    self.finish = "stop" if stopped else "length"
                    break
                if self._cancel and self._cancel():
                    break
                engine.make_room(slot)
                logits = slot.step([token])[0]
                slot.accept([token])
            text, stopped = self._stop.feed(stream.flush())
            text += self._stop.flush()
            self.finish = "stop" if stopped else self.finish
            if text:
                self.text += text
                yield Token(None, text)
        finally:
            self.decode_seconds = time.perf_counter() - begin - self.prefill_seconds
            try:
                self.sequence = engine.hold(slot.freeze())
            finally:
                slot.close()
            self._settle(request)

    def _settle(self, request) -> None:
        """Leaves the state with the caches, and the record with the ledger."""
        if request is None:
            return
        record = request.record
        record.prefill_seconds, record.first_token_seconds = self.prefill_seconds, self.first_token_seconds
        record.decode_seconds, record.generated, record.finish = self.decode_seconds, len(self.tokens), self.finish
        request.finish(self.sequence)
