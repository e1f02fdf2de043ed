"""Ctrl-C, and the signals that end a process, in the middle of what must not be left half done.

A forward takes over the page pool's arrays layer by layer: an exception between two layers would lose every page of every sequence. And
threads that are not ours go on writing while we would clear away.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A signal inside the block that has a handler in Python counts when the block has ended, and then goes before an error of the block's.

    Does nothing in other threads than the main one, which alone is interrupted; a signal that is ignored, or ends the process, still does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    came = []
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            before[came[0]](came[0], sys._getframe())
