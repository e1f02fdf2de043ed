"""Which keys are being written or removed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """One thread at a time has a key; threads with different keys do not wait for each other."""

    def __init__(self):
        self._keys: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Inside, this thread alone has the key."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._keys)
            self._keys.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._keys.remove(key)
                self._changed.notify_all()

    def wait(self) -> None:
        """Until no thread has any."""
        with self._changed:
            self._changed.wait_for(lambda: not self._keys)
