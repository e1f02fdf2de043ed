"""One writer a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from storage.errors import Locked


class Lock:
    """Holds a file's flock from its making until `release`; the system releases it when the process ends, however it ends.

    TensorStore's own locks protect one file at a time; two engines of different fingerprints would remove each other's directories.
    """

    def __init__(self, path: Path):
        """Locked where another process (or another Lock of this one) holds it, OSError where the file cannot be made."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise Locked(f"{path.parent} is in use by another engine (process {holder})") from None
        except OSError:
            os.close(self._file)
            raise
        with contextlib.suppress(OSError):  # no room for the number on a full disk, where entries can still be read and dropped
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def lost(self) -> bool:
        """Whether the file was removed: then another process may hold a new one."""
        return os.fstat(self._file).st_nlink == 0

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
        os.close(self._file)


def is_held(path: Path) -> bool:
    """Whether the process that made a lock of this file last still runs, for whoever must not try the lock itself: its maker would be refused."""
    try:
        os.kill(int(path.read_text()), 0)
    except (OSError, ValueError, OverflowError) as error:
        return isinstance(error, PermissionError)
    return True
