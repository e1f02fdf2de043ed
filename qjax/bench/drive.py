"""A modelled drive and the clock of its machine: what is read and written takes time, and no byte is there."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from storage import Entry, Leaf

READ, WRITE = 7.35e9, 4.3e9
"""Bytes a second that are read and written directly, as the chapter measured them (13.7)."""
SUSTAINED, BURST = 0.8e9, 20e9
"""Bytes a second that are written once the drive's own write cache is full (the chapter's 0.3 to 1.3e9), and its bytes (16 to 24e9)."""


class Drive:
    """now: seconds. What was handed over to be written is written one after another, as time passes."""

    def __init__(self):
        self.now = 0.0
        self._coming: deque[tuple[float, Callable[[], None]]] = deque()
        self._free = self._filled = 0.0  # when all of it is written, and the bytes that are in the drive's own cache then

    def until(self, now: float) -> None:
        """Lets time pass; what was written meanwhile is told."""
        while self._coming and self._coming[0][0] <= now:
            self.step()
        self.now = max(self.now, now)

    def advance(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def step(self) -> None:
        """Lets the next thing be written."""
        ends, told = self._coming.popleft()
        self.now = max(self.now, ends)
        told()

    @property
    def writes(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._coming)

    @property
    def next(self) -> float:
        """When the next thing will have been written."""
        return self._coming[0][0]

    def write(self, nbytes: int, told: Callable[[], None]) -> None:
        """Has so many bytes written, after all before them. told: called when they are."""
        begin = max(self.now, self._free)
        self._filled = max(0.0, self._filled - SUSTAINED * (begin - self._free))
        fast = min(float(nbytes), (BURST - self._filled) * WRITE / (WRITE - SUSTAINED))  # it empties while it fills
        self._filled += fast * (1 - SUSTAINED / WRITE)
        self._free = begin + fast / WRITE + (nbytes - fast) / SUSTAINED
        self._coming.append((self._free, told))


class CountingStorage:
    """A storage on a modelled drive that has the entries' names, fields and sizes. Of arrays it has those that are told from their shapes:
    key ids, tokens, counts. It stays as it is from one start of an engine to the next.
    """

    read_only = shared = False

    def __init__(self, drive: Drive):
        self.drive = drive
        self.read_bytes = self.written_bytes = 0
        self._entries: dict[str, Entry] = {}  # least recently used first
        self._arrays: dict[str, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()  # a restore reads in two threads

    def put(self, key: str, arrays: Mapping[str, np.ndarray], /, **fields) -> Entry:
        if known := self._entries.get(key):
            return known
        leaves = {name: Leaf(array.dtype.name, array.shape, "") for name, array in arrays.items()}
        entry = self._entries[key] = Entry(key, leaves, json.loads(json.dumps(fields)), self.drive.now, self.drive.now)
        self._arrays[key] = {name: array for name, array in arrays.items() if 0 not in array.strides}
        self.written_bytes += entry.nbytes
        return entry

    def get(self, chain: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> int:
        for number, (key, arrays) in enumerate(chain):
            if (kept := self._arrays.get(key)) is None:
                return number
            for name in kept.keys() & arrays.keys():
                arrays[name][...] = kept[name]
            with self._lock:
                self.read_bytes += sum(array.nbytes for array in arrays.values())
        return len(chain)

    def find(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def entries(self) -> dict[str, Entry]:
        return dict(self._entries)

    def touch(self, key: str) -> None:
        if entry := self._entries.pop(key, None):
            self._entries[key] = entry
            entry.used = self.drive.now

    def drop(self, key: str, unless: Callable[[], bool] = lambda: False) -> bool:
        if unless():
            return False
        self._arrays.pop(key, None)
        return self._entries.pop(key, None) is not None

    def free(self) -> None:
        """There is room for all that the budgets allow."""

    def stats(self) -> dict[str, int]:
        nbytes = sum(entry.nbytes for entry in self._entries.values())
        return {"entries": len(self._entries), "nbytes": nbytes, "read_bytes": self.read_bytes, "written_bytes": self.written_bytes}

    def close(self) -> None:
        """Another engine may start on it."""
