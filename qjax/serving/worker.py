"""The thread that owns a server's engine: it loads it, runs what is submitted, and stops as planned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from qjax.engine import Engine
from qjax.generation import Generation, Token
from qjax.parallel import Parallel
from qjax.serving.errors import Busy, Unavailable

log = logging.getLogger(__name__)

LOADING, READY, DRAINING, STOPPED, FAILED = "loading", "ready", "draining", "stopped", "failed"
PAUSE = 0.05
"""Seconds between two looks at what waits for NVMe while nothing runs."""

Listen = Callable[[Generation, Token | None], None]


class Worker:
    """Any thread may call it. state: LOADING, then READY, DRAINING and STOPPED, or FAILED with an `error`. engine: once it is READY.

    What listens to a request is called in the worker's thread, so it only hands on: with each token, then once with None.
    """

    def __init__(self, load: Callable[[], Engine], queue: int, when_ended: Callable[[], None] = lambda: None):
        """Starts loading. queue: requests that may wait beside those that run. when_ended: called where the thread ends, by itself or not."""
        self._load, self._queue, self._when_ended = load, queue, when_ended
        self.state, self.engine, self.error = LOADING, None, None
        self._runs: Parallel | None = None
        self._listening: dict[Generation, Listen] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="qjax-engine")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that run or wait."""
        return len(self._listening)

    def submit(self, tokens, listen: Listen, **options) -> Generation:
        """Puts a request into the queue, with the options of `Engine.generate`, whose errors it raises. Raises Busy and Unavailable."""
        with self._changed:
            self.check()
            most = self.engine.parallel + self._queue
            if len(self._listening) >= most:
                raise Busy(f"{most} requests run or wait here already (--queue)")
            generation = self._runs.submit(tokens, **options)
            self._listening[generation] = listen
            return generation

    def cancel(self, generation: Generation) -> None:
        """Ends a request before its next forward; its listener is told None then, as at any end."""
        self._runs.cancel(generation)

    def do(self, function: Callable[[Engine], Any]) -> Any:
        """What a function of the engine says, called between two forwards. Raises Unavailable."""
        with self._changed:
            self.check()
            done = self._runs.do(lambda: function(self.engine))
        return done.result()

    def drain(self, seconds: float) -> None:
        """A planned stop: nothing more is taken, what runs is given so long and then cut off, and the caches are written."""
        with self._changed:
            if self.state in (LOADING, READY):
                self.state = DRAINING
            self._changed.wait_for(lambda: not self._listening, seconds)
            if self._runs:
                self._runs.close()
        self._thread.join()

    def check(self) -> None:
        """Raises Unavailable where nothing can be submitted now."""
        if self.state == LOADING:
            raise Unavailable("the model is being loaded")
        if self.state != READY:
            raise Unavailable("the server stops")

    def _run(self) -> None:
        try:
            engine = self._load()
            with engine:
                self._serve(engine)
            self.state = STOPPED
        except BaseException as error:
            with self._changed:
                self.error, self.state = error, FAILED
            if self.engine is not None:
                log.critical("the engine's thread has ended", exc_info=error)
            for generation in list(self._listening):
                generation.error = generation.error or error
                self._tell(generation, None)
            if self._runs:
                self._runs.close()
                self._runs.wait()  # who waits for a call gets its answer
        finally:
            self._when_ended()

    def _serve(self, engine: Engine) -> None:
        with self._changed:
            self.engine, runs = engine, Parallel(engine)
            self._runs = runs
            if self.state == DRAINING:
                return
            self.state = READY
        while runs.wait(PAUSE if engine.caches.pump() else None):
            for generation, token in runs:
                if token is None and generation.sequence is not None:
                    engine.release(generation.sequence)
                self._tell(generation, token)

    def _tell(self, generation: Generation, token: Token | None) -> None:
        listen = self._listening.get(generation) if token is not None else None
        if listen is None:  # its first token can come while `submit` still has the lock
            with self._changed:
                listen = self._listening[generation] if token is not None else self._listening.pop(generation)
                self._changed.notify_all()
        listen(generation, token)
