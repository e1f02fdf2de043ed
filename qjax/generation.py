"""What a request sees: progress, tokens, the end."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from qjax.caches.response import Response
from qjax.interrupts import deferred
from qjax.ledger import Record
from qjax.sampling import sample
from qjax.slot import Slot
from qjax.state import Sequence
from qjax.transcript import Token, Transcript


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


class Full(NamedTuple):
    """The next forward of this slot needs a page and none is free. Who goes on all the same gets PoolFull if that has not changed."""

    slot: Slot


class Generation:
    """Iterate it once for the tokens. The first `next` runs the prefill; leaving the loop early ends the generation as cancelled.

    Afterwards:
      sequence        the state at the last forwarded token, held for the caller (release it through the engine)
      tokens, text    what was generated, without the stop token or stop string; no text of hidden tokens
      hidden, raw     [start, end) of the tokens that the client does not get, and the text with theirs
      thought_tokens  tokens inside the reasoning, where a Thought was given
      finish          "stop", "length", "cancelled", or "failed" where it broke off with an error
      start           prompt tokens that were not read again
      error           what it broke off with, where it ran beside others (qjax/parallel.py); alone, that is raised
      prompt_tokens, prefill_seconds, first_token_seconds, decode_seconds
    """

    def __init__(self, engine, prompt, sequence, lookup, sampling, max_tokens, said: Transcript, progress, cancel):
        """said: an empty one. lookup: what the caches are asked with, the arguments of `Caches.begin`; None for a request that they do not see."""
        self._engine, self._prompt, self._from, self.lookup = engine, prompt, sequence, lookup
        self._sampling, self._max_tokens = sampling, max_tokens
        self._said, self._progress, self._cancel = said, progress, cancel
        asked = {"sampling": sampling, "max_tokens": max_tokens, "stop": said.stops}
        self._asked = {"tenant": lookup["tenant"]} | asked if lookup and said.plain else None  # as the response cache is asked, if it is
        self.finish = self.sequence = self.error = None
        self.prompt_tokens, self.start = prompt.size, 0
        self.prefill_seconds = self.first_token_seconds = self.decode_seconds = 0.0
        self._steps: weakref.ref | None = None
        self._theirs = False  # an error came out of the caller's own function

    @property
    def tokens(self) -> list[int]:
        return self._said.tokens

    @property
    def text(self) -> str:
        return self._said.text

    @property
    def raw(self) -> str:
        return self._said.raw

    @property
    def hidden(self) -> list[tuple[int, int]]:
        return self._said.hidden

    @property
    def thought_tokens(self) -> int:
        return self._said.thought_tokens

    def __iter__(self) -> Iterator[Token]:
        with contextlib.closing(self.steps()) as steps:
            for step in steps:
                if isinstance(step, Token):
                    yield step

    def steps(self) -> Iterator[Token | Full | None]:
        """The generation a forward at a time, in place of a loop over it: each `next` runs one forward at the most.

        None where a forward of the prompt is due, Full where there is no page for the next forward; the loop over the generation takes
        no notice of either. Closing it ends the generation where it is.
        """
        steps = self._run()
        if self._steps is None:
            self._steps = weakref.ref(steps)  # who runs it holds it alone: leaving the loop ends it
        else:
            steps.close()  # nothing comes a second time
        return steps

    def close(self) -> None:
        """Ends the generation where it is; what was computed stays in `sequence`."""
        steps = self.steps() if self._steps is None else self._steps()
        if steps is not None:
            steps.close()
        self.finish = self.finish or "cancelled"  # it had not begun

    def _run(self) -> Iterator[Token | Full | None]:
        engine, tokenizer = self._engine, self._engine.model.tokenizer
        begin = time.perf_counter()
        self.finish = "cancelled"
        kept = engine.caches.answered(self._prompt, **self._asked) if self._asked else None
        if kept is not None:
            yield from self._repeat(kept, begin)
            return
        request = None
        try:
            if self.lookup:
                with deferred():  # what is taken is known here before an interrupt ends it
                    request = engine.caches.begin(**self.lookup)
                self.start = request.start
            done = yield from self._read(request)
        except Cancelled as cancelled:
            with deferred():
                self.sequence = cancelled.sequence
                self._settle(request)
            return
        except BaseException as error:
            if isinstance(error, Exception):
                self.finish = "failed"
            if request:
                request.fail(None if self._theirs else error)
            raise
        slot, self.start, self.prefill_seconds = done.slot, done.start, time.perf_counter() - begin
        at, logits = slot.length, done.logits
        said, failed = self._said, None
        try:
            while True:
                history = np.array(slot.tokens if self._sampling.penalizes else [], np.int32)
                token = sample(logits, self._sampling, history, len(self.tokens), tokenizer.size)
                token = token if said.due is None else said.due  # drawn all the same: a broken row is told
                self.first_token_seconds = self.first_token_seconds or time.perf_counter() - begin
                if token in tokenizer.stop_ids:
                    self.finish = "stop"
                    break
                new, stopped = said.add(token, logits)
                yield new
                if stopped or len(self.tokens) == self._max_tokens:
                    self.finish = "stop" if stopped else "length"
                    break
                if self._cancel and self._ask(self._cancel):
                    break
                if not engine.make_room(slot):
                    yield Full(slot)
                row = slot.step([token])[0]
                slot.accept([token])
                at, logits = slot.length, row
                if request:
                    request.pump()
            rest, stopped = said.end()
            self.finish = "stop" if stopped else self.finish
            if rest.text:
                yield rest
        except Exception as error:
            self.finish, failed = "failed", error
            raise
        finally:
            self.decode_seconds = time.perf_counter() - begin - self.prefill_seconds
            with deferred():
                try:
                    self.sequence = engine.hold(slot.freeze())
                    last = logits if at == slot.length else None  # an interrupt can come between a step and the next line
                except BaseException:
                    if request:  # else it would count as running for ever, with what it was promised
                        request.fail()
                    raise
                finally:
                    slot.close()
                if request and failed and at == self.start:  # nothing was forwarded but what the caches gave
                    self._timed(request.record)
                    request.fail(None if self._theirs else failed)
                else:
                    self._settle(request, last)

    def _ask(self, function, *arguments):
        """A function of the caller's, whose errors say nothing about the state that the request started on."""
        try:
            return function(*arguments)
        except BaseException:
            self._theirs = True
            raise

    def again(self) -> None:
        """Gives up what was read of the prompt, before the first token, so that it can be run from the beginning: others need its pages."""
        self.close()
        if self.sequence is not None:
            self._engine.release(self.sequence)
        self.sequence = self.finish = self._steps = None

    def _repeat(self, kept: Response, begin: float) -> Iterator[Token]:
        """An answer that was kept, with the texts that it had. There is no state: the sequence is the empty one."""
        self.sequence, self.start = self._engine.empty(), self.prompt_tokens
        if self._progress:
            self._progress(Progress(self.start, self.start, self.start, time.perf_counter() - begin))
        try:
            for token in kept.tokens.tolist():
                if self._cancel and self._cancel():
                    return
                new, _ = self._said.add(token)
                self.first_token_seconds = self.first_token_seconds or time.perf_counter() - begin
                yield new
            self.finish = kept.finish
            if (rest := self._said.end()[0]).text:
                yield rest
        finally:
            self.decode_seconds = time.perf_counter() - begin
            record = Record(tenant=self._asked["tenant"], prompt_tokens=self.prompt_tokens, source="response")
            record.start = record.agrees = self.prompt_tokens
            self._engine.caches.ledger.add(self._timed(record))

    def _timed(self, record: Record) -> Record:
        record.prefill_seconds, record.first_token_seconds = self.prefill_seconds, self.first_token_seconds
        record.decode_seconds, record.generated, record.finish = self.decode_seconds, len(self.tokens), self.finish
        return record

    def _read(self, request) -> Iterator[Full | None]:
        """The prompt's forwards; returns Prefilled. Closed between two of them it raises Cancelled, as where it is asked to."""
        closed = False
        forwards = self._engine.prompt_steps(
            self._prompt,
            self._from,
            request=request,
            progress=self._progress and partial(self._ask, self._progress),
            cancel=lambda: closed or bool(self._cancel and self._ask(self._cancel)),
        )
        with contextlib.closing(forwards):
            while True:
                try:
                    due = next(forwards)
                except StopIteration as end:
                    return end.value
                try:
                    yield due
                except GeneratorExit:
                    closed = True

    def _settle(self, request, logits=None) -> None:
        """Leaves the state with the caches, and the record with the ledger."""
        if request is None:
            return
        self._timed(request.record)
        request.finish(self.sequence, logits)
        if request.exact and self._asked:  # what another one is owed is a cold run's answer
            self._engine.caches.remember(self._prompt, **self._asked, tokens=self.tokens, finish=self.finish)
