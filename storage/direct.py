"""Files of arrays past the page cache: written from the caller's memory, read into it.

TensorStore reads a file into memory that is new every time and copies it from there, and it writes through the page cache: 0.31 and 0.36 of
what O_DIRECT gave the same disk, in 0.55 and 0.7 CPU seconds a GB. This: 0.9 of it and more, in 0.1 and 0.2, and in files of the same
bytes. Where a file system has no such access, or not for a file of this size, the page cache serves; what a write leaves there is given back.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from storage.arrays import contiguous, host

PAGE = 4096
"""Memory, offsets and lengths in multiples of it satisfy every disk."""
BLOCK = 2**23
"""Bytes of one read or write: with half of it a file alone was read at 0.6 of the rate."""
O_DIRECT = getattr(os, "O_DIRECT", 0)

_own = threading.local()


def write(path: Path, array: np.ndarray) -> None:
    """Makes a file of the array's bytes in C order. Until `sync` it may be gone after a power failure. OSError."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        os.fchmod(file, 0o600)  # whatever the umask
        at = 0
        for block in _blocks(array):
            while block.size:
                try:
                    done = os.pwrite(file, block, at)
                except OSError as error:
                    if error.errno != errno.EINVAL or not _buffered(file):
                        raise
                else:
                    block, at = block[done:], at + done


def read(path: Path, array: np.ndarray) -> tuple[str, float]:
    """Fills the array, of unsigned integers, from a file of its size: (xxh3 of the bytes that came, CPU seconds that the sum took).

    Raises OSError; ValueError, beginning as TensorStore's do, for a file of another size.
    """
    whole = array if _fits(array) else host(array.shape, array.dtype)
    flat, sum_, seconds = whole.reshape(-1).view(np.uint8), xxhash.xxh3_64(), 0.0
    with _opened(path, os.O_RDONLY) as file:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no file, but something else", str(path))
        if found.st_size != flat.size:
            raise ValueError(f"FAILED_PRECONDITION: expected {flat.size:,} bytes, found {found.st_size:,}")
        for at in range(0, flat.size, BLOCK):
            block = flat[at : at + BLOCK]
            _fill(file, block, at)
            begin = time.thread_time()
            sum_.update(block)  # while it is in the processor's caches
            seconds += time.thread_time() - begin
    if whole is not array:
        array[...] = whole
    return sum_.hexdigest(), seconds


def sync(path: Path) -> None:
    """Makes a file or a directory durable; a file's pages in the page cache are given back. OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        if hasattr(os, "posix_fadvise") and not stat.S_ISDIR(os.fstat(file).st_mode):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A file past the page cache, where the file system can."""
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | O_DIRECT)
        yield file
    finally:
        os.close(file)


def _buffered(file: int) -> bool:
    """Goes on through the page cache; False where it did so already."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~O_DIRECT)
    return bool(flags & O_DIRECT)


def _fill(file: int, block: np.ndarray, at: int) -> None:
    while block.size:
        try:
            done = os.preadv(file, [block], at)
        except OSError as error:
            if error.errno != errno.EINVAL or not _buffered(file):
                raise
        else:
            if not done:
                raise ValueError(f"FAILED_PRECONDITION: expected {block.size:,} bytes more at {at:,}, found the end")
            block, at = block[done:], at + done


def _fits(array: np.ndarray) -> bool:
    """Whether a disk can write to this memory, and read from it, as it lies."""
    return array.flags.c_contiguous and array.ctypes.data % PAGE == 0


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array's bytes in blocks that begin a page: where they lie, or else copied into a buffer of the thread's own."""
    if _fits(array):
        flat = array.reshape(-1).view(np.uint8)
        yield from (flat[at : at + BLOCK] for at in range(0, flat.size, BLOCK))
        return
    if not hasattr(_own, "buffer"):
        _own.buffer = host((BLOCK,), np.uint8)
    buffer, used = _own.buffer, 0
    for part in contiguous(array):
        rest = part.reshape(-1).view(np.uint8)
        while rest.size:
            taken, rest = np.split(rest, [BLOCK - used])
            buffer[used : used + taken.size] = taken
            used += taken.size
            if used == BLOCK:
                yield buffer
                used = 0
    if used:
        yield buffer[:used]
