"""The budget: three limits on what the caches hold, and the gate that keeps them.

The page pool is one of them, allocated once; a request that needs a page of it takes one back (ResidentPrefix.make_room). Snapshots on the
host are the second, the state store's own. This is the third: all that the caches hold outside the pool, together. Whatever is given
back only moves where a later prefill starts.
"""

from __future__ import annotations

from qjax.caches.resident import ResidentPrefix
from qjax.caches.response import ResponseCache
from qjax.caches.running import Running
from qjax.caches.store import StateStore


class Budget:
    """limit: bytes of anchors, snapshots and answers together."""

    def __init__(self, limit: int, resident: ResidentPrefix, running: Running, store: StateStore, responses: ResponseCache):
        self.limit, self.given_back = limit, 0
        self._resident, self._running, self._store, self._responses = resident, running, store, responses

    @property
    def held(self) -> int:
        """Bytes of all caches outside the page pool, and of the anchors that running requests have taken."""
        return self._resident.anchor_bytes + self._running.anchor_bytes + self._store.nbytes + self._responses.nbytes

    def before_prefill(self, more: int) -> int:
        """Makes room for so many bytes of anchors beside those that running requests may still take; how many there is room for.

        Answers go first, then snapshots, guests, pinned heads, parked sessions, and last the resident session's anchors but its newest.
        """
        before = self.held
        if self._left(before, more) >= before:
            return more
        self._responses.shrink(self._left(self._responses.nbytes, more))
        self._store.shrink(self._left(self._store.nbytes, more))
        self._resident.shrink(self._left(self._resident.anchor_bytes, more))
        self.given_back += before - self.held
        return max(0, min(more, more + self._left(0, more)))

    def before_copy(self, more: int) -> bool:
        """Makes room in the store for a snapshot; False, and nothing given back, where the other caches leave too little."""
        left = self._left(self._store.nbytes, more)
        if left < 0:
            return False
        before = self.held
        self._store.shrink(left)
        self.given_back += before - self.held
        return True

    def for_answers(self) -> int:
        """Bytes that kept answers may hold beside the others."""
        return self._left(self._responses.nbytes, 0)

    def _left(self, own: int, more: int) -> int:
        """Bytes that a cache which holds `own` may keep for all to fit with `more`; below 0 where that is too little even without it."""
        return self.limit - more - self._running.outstanding - (self.held - own)

    def stats(self) -> dict[str, int]:
        return {"limit": self.limit, "bytes": self.held, "given_back": self.given_back}
