"""What can go wrong in words. TensorStore raises ValueError for everything: its message begins with a status word and may hold an errno."""

from __future__ import annotations

import errno
import os
import re

KINDS = {"NOT_FOUND": "missing", "FAILED_PRECONDITION": "size", errno.ENOENT: "missing", errno.ENOTDIR: "missing"}
"""What a failed read of a leaf is counted as, by status word or errno: no such file, or one too short or too long. Others are "unreadable"."""
PASSING = {"ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Those that say nothing about what is stored: no network, no file descriptor left."""


class StorageError(Exception):
    """The storage cannot be opened, or an entry cannot be written to it."""


class Locked(StorageError):
    """Another process writes to the directory."""


class Full(StorageError):
    """No space is left, or a quota is used up."""


def damage(error: Exception) -> tuple[str, bool]:
    """What a failed read of a leaf is counted as, and whether the leaf may be there all the same."""
    found = re.match(r"([A-Z][A-Z_]+): ", str(error))
    what = error.errno if isinstance(error, OSError) else found and found[1]
    return KINDS.get(what, "unreadable"), what in PASSING


def failure(error: OSError | ValueError, what: str) -> StorageError:
    """The error to raise from one of the system's or TensorStore's: what was tried, and why it did not work."""
    if isinstance(error, OSError):
        number, reason = error.errno, str(error)
    else:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(found[1]) if found else None
        reason = os.strerror(number) if found else str(error)
    return (Full if number in (errno.ENOSPC, errno.EDQUOT) else StorageError)(f"{what}: {reason}")
