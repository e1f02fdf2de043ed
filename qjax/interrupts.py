"""Ctrl-C and the state that a forward has taken over."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable


class Deferred:
    """Inside the `with`, an interrupt waits for its end; then it is what it would have been.

    A forward takes over the page pool's arrays layer by layer: an exception between two layers would lose every page of every
    sequence. Python takes signals in its main thread only, so in others there is nothing to do.
    """

    def __enter__(self) -> Deferred:
        self._pending, self._before = None, None
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._pending is not None:
                self._before(*self._pending)

    def _note(self, number, frame) -> None:
        self._pending = number, frame


def uninterrupted(function: Callable) -> Callable:
    """A function that an interrupt does not end in the middle."""

    @functools.wraps(function)
    def deferred(*args, **more):
        with Deferred():
            return function(*args, **more)

    return deferred
