"""What the caches are compared with, over the same trace and in the same bytes. Prompts are compared by key, as in the caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qjax.bench.trace import Call
from qjax.caches.anchors import NEWEST
from qjax.caches.keys import common
from qjax.caches.resident import GUEST_SHARE
from qjax.caches.sessions import PIN_ANCHORS
from qjax.config import CacheConfig
from qjax.state import Layout


class Served(NamedTuple):
    """How a request was served. start: tokens that needed no forward. source: what gave them."""

    start: int
    source: str


class Node:
    """Prompts that agree up to here. after: the next by (base, count) of its span; longest: tokens of the longest span seen, by base."""

    __slots__ = ("after", "longest")

    def __init__(self):
        self.after: dict[tuple[int, int], Node] = {}
        self.longest: dict[int, int] = {}


class Infinite:
    """A cache that keeps every row and a state after each: a request starts where it parts from all before it."""

    waited = 0.0

    def __init__(self):
        self._root = Node()

    def restart(self) -> None:
        """It loses nothing."""

    def serve(self, call: Call, keys: np.ndarray) -> Served:
        node, agrees, spans = self._root, 0, call.spans()
        for base, count in spans[:-1]:
            if (base, count) not in node.after:
                agrees += min(count, node.longest.get(base, 0))
                break
            node, agrees = node.after[base, count], agrees + count
        node = self._root
        for base, count in spans:
            node.longest[base] = max(count, node.longest.get(base, 0))
            node = node.after.setdefault((base, count), Node())
        return Served(agrees, "rows" if agrees else "cold")


@dataclass(eq=False)
class Kept:
    """A prompt's rows, and the lengths at which there is a state, ascending. keys: int64 [n]. known: of its request."""

    keys: np.ndarray
    anchors: list[int]
    known: int

    def start(self, agrees: int) -> int:
        """Where a prompt starts that agrees so far: at the last anchor below."""
        return max((a for a in self.anchors if a <= agrees), default=0)


class Snapshots:
    """Whole snapshots, rows and sections, the least recently used given up first."""

    def __init__(self, layout: Layout, budget: int, entry: int | None = None):
        """budget: bytes of all. entry: of one at the most."""
        self._layout, self._budget, self._entry = layout, budget, budget if entry is None else entry
        self._kept: dict[bytes, np.ndarray] = {}  # in the order of their last use

    def bytes(self, length: int) -> int:
        return self._layout.section_bytes + length * self._layout.row_bytes

    def fits(self, length: int) -> bool:
        return self.bytes(length) <= self._entry

    def find(self, keys: np.ndarray) -> int:
        """The longest one that a prompt begins with, which is used by that."""
        best, name = 0, None
        for key, kept in self._kept.items():
            if best < kept.size <= keys.size and kept[-1] == keys[kept.size - 1] and np.array_equal(kept, keys[: kept.size]):
                best, name = kept.size, key
        if name is not None:
            self._kept[name] = self._kept.pop(name)
        return best

    def make_room(self, size: int) -> None:
        """Gives up until so many bytes more fit, or nothing is left."""
        total = sum(self.bytes(kept.size) for kept in self._kept.values())
        while self._kept and total + size > self._budget:
            total -= self.bytes(self._kept.pop(next(iter(self._kept))).size)

    def keep(self, keys: np.ndarray) -> None:
        if not keys.size or not self.fits(keys.size):
            return
        name = keys.tobytes()
        self._kept.pop(name, None)
        self.make_room(self.bytes(keys.size))
        self._kept[name] = keys.copy()


class LruSnapshots:
    """A snapshot at each request's end, and nothing else, in the bytes that the caches may take; what runs needs its own share of them."""

    waited = 0.0

    def __init__(self, layout: Layout, budget: int):
        self._of = layout, budget
        self.restart()

    def restart(self) -> None:
        self._snapshots = Snapshots(*self._of)

    def serve(self, call: Call, keys: np.ndarray) -> Served:
        start = self._snapshots.find(keys)
        self._snapshots.make_room(self._snapshots.bytes(keys.size + call.answer))
        self._snapshots.keep(np.concatenate([keys, call.answer_keys()])[: call.known])
        return Served(start, "snapshot" if start else "cold")


class Chapter:
    """The placement that the caches began with: one buffer, in which the resident prompt lies, and copies beside it.

    Anchors at every grid line, the oldest given up first and never the newest 4, and one at the end; one parked session with its
    newest 4 anchors; one pinned head with up to 8; snapshots of ends and of heads. Nothing where prompts part.
    """

    waited = 0.0

    def __init__(self, layout: Layout, config: CacheConfig):
        self._layout, self._config = layout, config
        self.restart()

    def restart(self) -> None:
        budget = self._config.bytes("cache_budget_gb")
        self._store = Snapshots(self._layout, budget, min(budget, self._config.bytes("store_entry_gb")))
        self._kept: dict[str, Kept | None] = dict.fromkeys(("resident", "parked", "pinned"))

    def serve(self, call: Call, keys: np.ndarray) -> Served:
        now, agrees = self._kept["resident"], {name: common(kept.keys, keys) for name, kept in self._kept.items() if kept is not None}
        starts = {name: self._kept[name].start(n) for name, n in agrees.items()} | {"store": self._store.find(keys)}
        source = max(starts, key=starts.get)
        start, found = starts[source], self._kept.get(source)
        whole = np.concatenate([keys, call.answer_keys()])[: max(keys.size, call.known)]
        goes_on = now is None or agrees["resident"] >= now.known
        if goes_on or not (keys.size <= self._config.resident_guest_max and GUEST_SHARE * keys.size < now.keys.size):
            if not goes_on:
                self._make_way(now, agrees["resident"], source)
            grid, most = self._layout.grid, max(NEWEST, self._config.bytes("resident_gb") // self._layout.section_bytes)
            lines = {*range(start // grid * grid + grid, keys.size + 1, grid), *((a for a in found.anchors if a <= start) if found else ())}
            self._kept["resident"] = Kept(whole, sorted({*sorted(lines)[-most:], call.known}), call.known)
        self._offer(whole[: call.known], keys)
        return Served(start, source if start else "cold")

    def _make_way(self, now: Kept, agrees: int, source: str) -> None:
        """Parks the rows that will be written over, and pins the head."""
        row, state, newest = self._layout.row_bytes, self._layout.section_bytes, now.anchors[-NEWEST:]
        if (now.keys.size - agrees) * row + len(newest) * state <= self._config.bytes("resident_park_gb"):
            self._kept["parked"] = Kept(now.keys, newest, now.known)
        elif source == "parked":
            self._kept["parked"] = None  # it is the resident one now
        pin = self._config.bytes("resident_pin_gb")
        heads = [a for a in now.anchors if a * row + state <= pin]
        if heads:
            most = min(PIN_ANCHORS, (pin - heads[-1] * row) // state)
            spread = [min(heads, key=lambda a: abs(a - wanted)) for wanted in np.linspace(0, heads[-1], most + 1)[1:]]
            self._kept["pinned"] = Kept(now.keys[: heads[-1]], sorted(set(spread)), heads[-1])

    def _offer(self, end: np.ndarray, keys: np.ndarray) -> None:
        """Gives the store a request's end, and the longest head of whole grid lines that fits it."""
        self._store.keep(end)
        lines = [n for n in range(self._layout.grid, keys.size + 1, self._layout.grid) if self._store.fits(n)]
        if lines:
            self._store.keep(keys[: lines[-1]])
