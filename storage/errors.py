"""What can go wrong in words. TensorStore raises ValueError for everything: its message begins with a status word and may hold an errno."""

from __future__ import annotations

import errno
import os
import re

PASSING = {"ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
"""Statuses that say nothing about what is stored: no network, no file descriptor left."""


class StorageError(Exception):
    """The storage cannot be opened, or an entry cannot be written to it."""


class Locked(StorageError):
    """Another process writes to the directory."""


class Full(StorageError):
    """No space is left, or a quota is used up."""


def status(error: Exception) -> str:
    """TensorStore's status word, such as NOT_FOUND; "" for an error that is not TensorStore's."""
    found = re.match(r"([A-Z][A-Z_]+): ", str(error))
    return found[1] if found else ""


def failure(error: OSError | ValueError, what: str) -> StorageError:
    """The error to raise from one of the system's or TensorStore's: what was tried, and why it did not work."""
    if isinstance(error, OSError):
        number, reason = error.errno, str(error)
    else:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(found[1]) if found else None
        reason = os.strerror(number) if found else str(error)
    return (Full if number in (errno.ENOSPC, errno.EDQUOT) else StorageError)(f"{what}: {reason}")
