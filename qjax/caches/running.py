"""Requests that run: what they have read is found by others before they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from qjax.caches.anchors import Anchor, last_clean, live_bytes
from qjax.caches.keys import common
from qjax.caches.reach import reach
from qjax.caches.tier import Hit, Restored
from qjax.config import TOKEN
from qjax.pages import PagePool
from qjax.state import BLOCK, Sequence

if TYPE_CHECKING:
    from qjax.caches.request import Request


class Slot(Protocol):
    """What is seen here of the slot in which a request runs."""

    pages: list[int]

    @property
    def length(self) -> int: ...


class Running:
    """A tier: the anchors that running requests have taken on the way. The pages are those of the requests' slots, and held by them."""

    name = "running"

    def __init__(self, pool: PagePool, level: str = TOKEN):
        self._pool, self._level, self._hits = pool, level, 0
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """Nothing where it is no longer there."""
        self.requests = [r for r in self.requests if r is not request]

    @property
    def anchor_bytes(self) -> int:
        """Bytes that the anchors of all running requests keep alive."""
        return live_bytes(a for r in self.requests for a in r.anchors)

    @property
    def outstanding(self) -> int:
        """Bytes of anchors that running requests may still take."""
        return sum(max(0, r.promised - live_bytes(r.anchors)) for r in self.requests)

    def find(self, keys: np.ndarray, tenant: str) -> Hit | None:
        best, furthest, grid = None, None, self._pool.layout.grid
        for request in self.requests:
            if request.tenant != tenant or request.slot is None:  # not begun
                continue
            agrees = common(request.keys, keys)
            for anchor in request.anchors:
                how = {"logits": anchor.logits is not None, "tainted": anchor.tainted, "level": self._level, "grid": grid}
                found = reach(anchor.length, agrees, keys.size, **how)
                if found is not None and found.start >= min(BLOCK, anchor.length) and (furthest is None or found > furthest):
                    best, furthest = Hit(found.start, self.name, self, (request, anchor), found.whole, found.exact), found
        return best

    def take(self, hit: Hit) -> Restored:
        request, anchor = hit.entry
        sequence = self._now(request, anchor).cut(hit.start, self._pool.layout.grid)
        self._pool.hold(sequence.pages)
        self._hits += 1
        return Restored(sequence, anchor.logits if hit.whole else None)

    def clean(self, tenant: str) -> Iterator[tuple[np.ndarray, Sequence]]:
        """As of ResidentPrefix, of every request."""
        for request in self.requests:
            if request.tenant == tenant and request.slot is not None and (anchor := last_clean(request.anchors)):
                yield request.keys, self._now(request, anchor)

    def _now(self, request: Request, anchor: Anchor) -> Sequence:
        """An anchor's sequence in the slot's pages: it has copied its last one since, where another one wrote on in it."""
        pages = np.array(request.slot.pages[: -(-anchor.length // self._pool.layout.grid)], np.int32)
        return anchor.sequence.replace(pages=pages, stamps=self._pool.stamps[pages])

    def coming(self, keys: np.ndarray, tenant: str) -> int:
        """How many of these keys a request that reads its prompt will have read when it next has an anchor among them; 0 for none.

        It has one at every grid line and at its prompt's end.
        """
        furthest, grid = 0, self._pool.layout.grid
        for request in self.requests:
            if request.tenant != tenant:
                continue
            agrees = common(request.keys, keys)
            line = agrees if agrees == request.keys.size else agrees // grid * grid
            if line > (request.start if request.slot is None else request.slot.length):
                furthest = max(furthest, line)
        return furthest

    def stats(self) -> dict[str, int]:
        """Requests that run, what they have served, and the bytes of the anchors that they have taken so far."""
        return {"requests": len(self.requests), "hits": self._hits, "anchor_bytes": self.anchor_bytes}

    def clear(self) -> None:
        """What runs is found no more."""
        self.requests = []
