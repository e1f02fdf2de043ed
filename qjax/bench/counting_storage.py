"""A storage that is counted and not there: names, fields and sizes of entries on a modelled drive."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qjax.bench.drive import Drive
from storage import Entry, Leaf


class CountingStorage:
    """A storage on a modelled drive that has the entries' names, fields and sizes. Of arrays it has those that are told from their shapes:
    key ids, tokens, counts. It stays as it is from one start of an engine to the next.
    """

    read_only = shared = False
    damaged, unfinished = {}, ()

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

    def touch(self, key: str, used: float | None = None) -> None:
        if entry := self._entries.pop(key, None):
            self._entries[key] = entry
            entry.used = self.drive.now if used is None else used

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
