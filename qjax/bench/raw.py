"""What a disk gives at best: files written and read with O_DIRECT by four threads, through memory that a disk likes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from storage import host

PAGE = 4096
BLOCK = 2**23
"""Bytes of one read or write."""
THREADS = 4


class Raw:
    """The limit that a storage is measured against: nothing is summed, copied or looked at."""

    def __init__(self, nbytes: int):
        """nbytes: of the largest file that is written. ValueError where this system has no O_DIRECT."""
        if not hasattr(os, "O_DIRECT"):
            raise ValueError("expected a system with O_DIRECT, which the figures are shares of: Linux")
        self._bytes, self._into = (host((_whole(nbytes),), np.uint8) for _ in range(2))
        self._bytes[:] = np.frombuffer(np.random.default_rng(1).bytes(self._bytes.size), np.uint8)
        self._into[:] = 1
        self._threads = ThreadPoolExecutor(THREADS, "qjax-raw")

    def write(self, path: Path, nbytes: int) -> None:
        """A durable file: written under another name, synced, renamed, and its directory synced."""
        partial = path.with_name(f"{path.name}.partial")
        file = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        self._each(file, _whole(nbytes), lambda at, n: os.pwrite(file, self._bytes[at : at + n], at), os.fsync)
        os.rename(partial, path)
        sync(path.parent)

    def read(self, paths: Iterable[Path]) -> None:
        for path in paths:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            # a page beyond the end asks for less than there is room
            self._each(file, _whole(os.fstat(file).st_size), lambda at, n, file=file: os.preadv(file, [self._into[at : at + n]], at))

    def _each(self, file: int, size: int, move: Callable[[int, int], int], end: Callable[[int], None] = lambda file: None) -> None:
        moves = []
        try:
            moves += [self._threads.submit(move, at, min(BLOCK, size - at)) for at in range(0, size, BLOCK)]
            moved = sum(one.result() for one in moves)
            if not size - PAGE < moved <= size:
                raise OSError(f"expected to move {size:,} bytes, moved {moved:,}")
            end(file)
        finally:
            wait(moves)  # also after Ctrl-C: the number of a closed file may soon be another file's
            os.close(file)

    def close(self) -> None:
        self._threads.shutdown()


def _whole(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def sync(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def forget(directory: Path) -> None:
    """Has the page cache give up what it holds of the files in a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            opened = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(opened)
