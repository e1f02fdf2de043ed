"""Several requests at once on one engine, a forward of one of them at a time.

runs = Parallel(engine)
answers = [runs.submit(tokens, max_tokens=100) for tokens in prompts]
for generation, token in runs:
    print(answers.index(generation), token.text if token else generation.finish)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from qjax.engine import Engine
from qjax.generation import Full, Generation, Token
from qjax.slot import Slot


@dataclass(eq=False)
class _Run:
    """A generation that has started, as number so many. writes: its prompt is read. full: its slot, while that waits for a page."""

    generation: Generation
    steps: Iterator[Token | Full | None]
    number: int
    writes: bool = False
    full: Slot | None = None


class Parallel:
    """Runs the requests that are submitted, `most` of them at once; each says what it says alone, bit for bit.

    One thread drives it by iterating: (generation, token) as they come, and (generation, None) where one has ended; the loop ends where
    nothing is left. Then its `sequence`, if not None, is the consumer's to release, and its `error`, if not None, is what it broke off
    with: that ends no other request. Leaving the loop leaves the requests where they are; another loop goes on with them.
    Any thread may submit, cancel, do and close.

    Turns: every request that writes its answer takes a step; then one of those that read their prompts, in turn, takes a forward. So
    between two tokens of an answer there is one prefill forward at the most, and a short prompt is read beside a long one.

    Starts: in the order in which they came, but a request waits, and lets others pass, while one that runs is about to read more of its
    prompt than the caches hold: then it starts there, and a common head is read once. It loses nothing, since it would read the same.

    Pages: a request that finds no free page, and nothing that the caches could give up, waits until others have ended and are released, and
    none starts meanwhile. Where all of them wait, the one that started last goes back to the front of the queue, if it has said nothing, and
    is run again later; else, or where it is alone, it is ended with PoolFull.
    """

    def __init__(self, engine: Engine, most: int | None = None):
        """most: None for the engine's own, `--parallel`."""
        self._engine, self._most = engine, engine.parallel if most is None else most
        if self._most < 1:
            raise ValueError(f"at least 1 request must run at once, found {most}")
        self._changed = threading.Condition()
        self._open: dict[Generation, bool] = {}  # what was submitted and has not ended: whether it is cancelled
        self._waiting: list[Generation] = []
        self._running: list[_Run] = []  # the one whose turn is longest ago first
        self._started, self._closed = 0, False
        self._news = False  # something to do or a cancelled request, since the loop looked last: else a round of one token takes no lock
        self._to_do: list[tuple[Callable[[], Any], Future]] = []

    def submit(self, tokens: Tokens[int], *args, **options) -> Generation:
        """Puts a request into the queue, with the arguments of `Engine.generate`, which says at once what is wrong with it.

        Its own `cancel` is asked before each of its forwards, so not while it waits. RuntimeError after `close`.
        """
        generation = self._engine.generate(tokens, *args, **options)
        with self._changed:
            if self._closed:
                raise RuntimeError("nothing can be submitted any more: it was closed")
            self._open[generation] = False
            self._waiting.append(generation)
            self._changed.notify_all()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Ends a request before its next forward, or while it waits; nothing where it has ended."""
        with self._changed:
            if generation in self._open:
                self._open[generation] = self._news = True

    def do(self, function: Callable[[], Any]) -> Future:
        """Has the thread that drives the loop call a function between two forwards, or in `wait`. RuntimeError after `close`."""
        done = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("nothing can be done any more: it was closed")
            self._to_do.append((function, done))
            self._news = True
            self._changed.notify_all()
        return done

    def close(self) -> None:
        """Cancels what there is and takes nothing more; the loop, or the next one, ends it."""
        with self._changed:
            self._closed = self._news = True
            self._open = dict.fromkeys(self._open, True)
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until there is something to run, for so many seconds at the most; False where it is closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._closed or self._to_do, seconds)
        self._do_all()
        with self._changed:
            return bool(self._open) or not self._closed

    def _do_all(self) -> None:
        with self._changed:
            waiting, self._to_do = self._to_do, []
        for function, done in waiting:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(function())
                except Exception as error:
                    done.set_exception(error)

    def __iter__(self) -> Iterator[tuple[Generation, Token | None]]:
        while True:
            if self._news:
                self._news = False
                self._do_all()
                yield from self._end_cancelled()
            if self._waiting:
                yield from self._start()
            if not self._running:
                return
            stuck = True
            for run in self._turns():
                stuck = False
                yield from self._go_on(run)
            if stuck:
                yield from self._make_way()

    def _make_way(self) -> Iterator[tuple[Generation, Token | None]]:
        """Where all wait for a page: what started last goes back to the front of the queue, or ends where it has said something."""
        run = max(self._running, key=lambda run: run.number)
        if run.writes or len(self._running) == 1:
            yield from self._go_on(run)  # which gives it PoolFull
            return
        self._running.remove(run)
        run.generation.again()
        with self._changed:
            self._waiting.insert(0, run.generation)

    def _end_cancelled(self) -> Iterator[tuple[Generation, None]]:
        with self._changed:
            gone = [generation for generation in self._waiting if self._open[generation]]
        for generation in gone:
            self._news = True  # the loop may be left here
            with self._changed:
                self._waiting.remove(generation)
            generation.finish = "cancelled"
            yield self._ended(generation)
        for run in [run for run in self._running if self._open[run.generation]]:
            self._news = True
            yield from self._go_on(run)

    def _start(self) -> Iterator[tuple[Generation, Token | None]]:
        with self._changed:
            waiting = list(self._waiting)
        for generation in waiting:
            if len(self._running) >= self._most or any(run.full for run in self._running):
                return
            if self._running and self._is_being_read(generation):
                continue
            with self._changed:
                self._waiting.remove(generation)
                self._started += 1
            run = _Run(generation, generation.steps(), self._started)
            self._running.append(run)
            yield from self._go_on(run)  # its lookup; the others see by it what it reads

    def _is_being_read(self, generation: Generation) -> bool:
        """Whether it should wait for rows that another request is about to make."""
        caches, lookup = self._engine.caches, generation.lookup
        return caches is not None and lookup is not None and caches.is_coming(lookup["tokens"], lookup["tenant"])

    def _turns(self) -> Iterator[_Run]:
        """One round. Whether a request has the page that it waits for is asked at its turn: the last free one may go before."""
        for run in [run for run in self._running if run.writes]:
            if self._has_page(run):
                yield run
        for run in [run for run in self._running if not run.writes]:
            if self._has_page(run):
                self._running.remove(run)
                self._running.append(run)
                yield run
                return

    def _has_page(self, run: _Run) -> bool:
        return run.full is None or self._engine.make_room(run.full)

    def _go_on(self, run: _Run) -> Iterator[tuple[Generation, Token | None]]:
        """One step of a generation, or its end where it is cancelled."""
        generation, run.full = run.generation, None
        try:
            if self._open[generation]:
                generation.close()
            step = next(run.steps)
        except StopIteration:
            pass
        except Exception as error:
            generation.error = error
        except BaseException:  # an interrupt, which is for the loop; the request has ended by it
            self._running.remove(run)
            self._ended(generation)
            raise
        else:
            if isinstance(step, Full):
                run.full = step.slot
            elif isinstance(step, Token):
                run.writes = True
                yield generation, step
            return
        self._running.remove(run)
        yield self._ended(generation)

    def _ended(self, generation: Generation) -> tuple[Generation, None]:
        with self._changed:
            del self._open[generation]
        return generation, None
