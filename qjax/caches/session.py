"""A session: the rows of one conversation that stay held in the page pool, and its anchors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from qjax.caches.anchors import Anchor
from qjax.caches.keys import common
from qjax.caches.reach import Reach, reach
from qjax.pages import PagePool
from qjax.state import BLOCK, Sequence

ROLES = ("resident", "guest", "parked", "pinned")


class Session:
    """keys: int64 [n] of the rows that exist. pages: held until `close`. anchors: ascending. history: the last prompt without its
    generation prompt, a prefix of whatever the client sends next. turns: requests that have gone on with each other here, request: the
    number of the last one. touched: `time.monotonic` of its last use. owner: whose conversation it is, by the name that its client gives it.
    source: where it was read back from, for the ledger, filed: the key that it has there; None for one that came about here.
    """

    def __init__(self, pool: PagePool, keys: np.ndarray, tenant: str, sequence: Sequence, anchors: Iterable[Anchor], history: int, role: str):
        """Takes a hold of its own on the sequence's pages.

        The anchors are given these pages and tokens for their own: one that was taken before a page was copied names the old page,
        which is somebody else's as soon as its session has gone.
        """
        self._pool, grid = pool, pool.layout.grid
        self.keys, self.tenant, self.history, self.role, self.used = keys, tenant, history, role, 0
        self.turns, self.request, self.owner, self.source, self.filed = 1, 0, None, None, None
        self.touched = time.monotonic()
        self.pages = [int(p) for p in sequence.pages]
        pool.hold(self.pages)
        self.anchors = []
        for a in sorted(anchors, key=lambda a: a.length):
            count = -(-a.length // grid)
            of = {"tokens": sequence.tokens[: a.length], "pages": sequence.pages[:count], "stamps": pool.stamps[sequence.pages[:count]]}
            self.anchors.append(replace(a, sequence=a.sequence.replace(**of)))

    @property
    def length(self) -> int:
        return self.keys.size

    def close(self) -> None:
        """Gives the pages up."""
        self._pool.release(self.pages)
        self.pages, self.anchors = [], []

    def cut(self, length: int) -> None:
        """Gives up the rows past the last anchor at or below a length, and the anchors there."""
        self.anchors = [a for a in self.anchors if a.length <= length]
        length = self.anchors[-1].length if self.anchors else 0
        count = -(-length // self._pool.layout.grid)
        self._pool.release(self.pages[count:])
        self.pages, self.keys = self.pages[:count], self.keys[:length].copy()

    def best(self, keys: np.ndarray, level: str) -> tuple[Anchor | None, Reach | None, int]:
        """(anchor, its reach, agrees) for a prompt's keys: where it can resume best, and how many keys agree with the rows."""
        agrees, grid = common(self.keys, keys), self._pool.layout.grid
        best, found = None, None
        for anchor in reversed(self.anchors):
            if found is not None and anchor.length <= found.start:
                break
            some = reach(anchor.length, agrees, keys.size, logits=anchor.logits is not None, tainted=anchor.tainted, level=level, grid=grid)
            # a few tokens that all prompts begin with are no hit
            if some is not None and some.start >= max(1, min(BLOCK, anchor.length)) and (found is None or some > found):
                best, found = anchor, some
        return best, found, agrees
