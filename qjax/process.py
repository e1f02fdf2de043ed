"""The `qjax` process before it runs a command: signals, standard streams, and what XLA's CPU backend runs best with.

Imports the standard library only: Ctrl-C in the seconds that JAX takes to import finds its handler in place.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
RETRY = 0.05
"""Seconds after which a signal whose exception was swallowed is tried again."""


class Ended(SystemExit):
    """A signal asked the process to end; the status is a shell's for it."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def begin() -> None:
    """Ctrl-C ends the process at once with status 130, unless it is ignored; a character that a standard stream cannot hold is replaced.

    Nothing is open yet, and a KeyboardInterrupt in an import may be swallowed by a callback or come out as an ImportError.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    for stream in (sys.stdin, sys.stdout):  # standard error escapes them by itself
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _leave(number, frame) -> None:
    os.write(2, b"\nqjax: interrupted\n")
    os._exit(130)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt, and SIGTERM and a hang-up raise Ended, so that files and children are cleared away.

    Both are raised again where a callback has swallowed them: JAX has one in the garbage collector.
    """
    if threading.current_thread() is not threading.main_thread():  # Python takes signals in its main thread only
        yield
        return
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _end)
    before = sys.unraisablehook

    def again(what) -> None:
        if issubclass(what.exc_type, Ended):
            signal.signal(what.exc_value.number, _end)
            number = what.exc_value.number
        elif issubclass(what.exc_type, KeyboardInterrupt):
            number = signal.SIGINT
        else:
            before(what)
            return
        retry = threading.Timer(RETRY, signal.pthread_kill, [threading.main_thread().ident, number])
        retry.daemon = True
        retry.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end(number, frame) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one would cut the clearing away short
    raise Ended(number)


def tune() -> None:
    """Sets what XLA's CPU backend runs best with, where nobody has set it, and starts this process again where it must.

    A thread more than cores: the one that runs a program is one of them, and with none to spare a product in five ran on one core
    (a decode step at the 0.8B sizes: 78 instead of 81 ms on two cores).

    malloc on huge pages (glibc 2.35 and later): XLA takes a program's temporaries from malloc anew at every call; in 4 KiB pages
    a chunk of 1,024 tokens takes 600,000 page faults, a fifth of its time. glibc reads its tunables when a process starts.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("PJRT_NPROC", str(cores + 1))
    if sys.platform != "linux":
        return
    if "GLIBC_TUNABLES" not in os.environ:
        # the new program has no handler at first: Ctrl-C waits until it is here
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
