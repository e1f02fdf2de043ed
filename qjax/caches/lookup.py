"""The caches of one engine: the lookup over all tiers, and what becomes of a request's state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qjax.caches.anchors import Anchor
from qjax.caches.resident import ResidentPrefix
from qjax.caches.session import Session
from qjax.caches.store import StateStore, snapshot_bytes
from qjax.caches.tier import Hit, Restored, Tier, Unusable
from qjax.config import CacheConfig
from qjax.ledger import Ledger, Record, Why
from qjax.pages import PagePool
from qjax.state import BLOCK, Sequence

CONTEXT = 4
"""Tokens on each side of the first one that differs, in the ledger's texts."""


class Caches:
    """All tiers of an engine, in the order of the lookup. One thread owns them, as the pool."""

    def __init__(self, pool: PagePool, config: CacheConfig | None = None, decode: Callable | None = None):
        """decode: token ids -> text, for the ledger."""
        config = config or CacheConfig()
        self.pool, self.config, self.ledger = pool, config, Ledger(path=config.ledger)
        self.decode, self.clears = decode, 0
        self.resident = ResidentPrefix(pool, config, self._demote)
        self.store = StateStore(pool, config.bytes("cache_budget_gb"), config.bytes("store_entry_gb"), config.prefix_chunk)
        self.tiers: tuple[Tier, ...] = (self.resident, self.store)

    def find(self, keys: np.ndarray, tenant: str) -> list[Hit]:
        """What the tiers offer, the best first. A deeper tier counts only where it starts later than every tier above it."""
        hits: list[Hit] = []
        for tier in self.tiers:
            hit = tier.find(keys, tenant)
            if hit is not None and all((hit.start, hit.whole) > (h.start, h.whole) for h in hits):
                hits.append(hit)
        return hits[::-1]

    def begin(
        self, tokens: np.ndarray, keys: np.ndarray | None = None, tenant: str = "", history: int | None = None, user: int | None = None
    ) -> Request:
        """Looks a prompt up, takes the best hit that can be taken, and makes way for what will be run.

        tokens: int32 [n]. keys: int64 [n], the tokens themselves where not given. history: tokens of the prompt without its generation
        prompt (the template's beginning of an answer). user: where the last user message starts.
        """
        return Request(self, tokens, tokens.astype(np.int64) if keys is None else keys, tenant, history, user)

    def make_room(self, enough: Callable[[], bool]) -> bool:
        """Gives up what the pool holds for later until it is enough; whether it is."""
        return self.resident.make_room(enough)

    def _demote(self, session: Session) -> None:
        """Gives the state store what the pool has no room for: the session's end, or else the longest head that it may keep."""
        end = session.anchors[-1] if session.anchors else None
        if end is not None and snapshot_bytes(self.pool.layout, end.length, end.logits) <= self.store.entry_bytes:
            self.store.offer(session.keys[: end.length], session.tenant, end.sequence, end.logits)
            return
        heads = [a for a in session.anchors if self.store.may_be_head(a.length)]
        if heads:
            self.store.offer(session.keys[: heads[-1].length], session.tenant, heads[-1].sequence, use="prefix")

    def take(self, hit: Hit) -> Restored:
        """Raises Unusable."""
        if hit.tier is not self.resident:  # it needs pages of its own
            self.make_room(lambda: self.pool.free * self.pool.layout.grid >= hit.start)
        return hit.tier.take(hit)

    def stats(self) -> dict[str, dict]:
        return {tier.name: tier.stats() for tier in self.tiers} | {"ledger": self.ledger.totals()}

    def clear(self) -> None:
        """Empties every tier."""
        self.clears += 1
        for tier in self.tiers:
            tier.clear()


class Request:
    """One request on its way through the caches: where it starts, which lines it marks, and what it leaves.

    restored: what was found, its pages held for the caller; None for a cold start. start: tokens that need no forward.
    """

    def __init__(self, caches: Caches, tokens: np.ndarray, keys: np.ndarray, tenant: str, history: int | None, user: int | None):
        self._caches, self._tokens, self._keys, self._tenant = caches, tokens, keys, tenant
        self._history = tokens.size if history is None else history
        self._anchors: list[Anchor] = []
        self._dropped, self._clears = caches.resident.dropped.copy(), caches.clears
        begin = time.perf_counter()
        nearest, self._agrees = caches.resident.nearest(keys, tenant)
        self.restored: Restored | None = None
        self.start, source, failed = 0, "cold", []
        for hit in caches.find(keys, tenant):
            try:
                self.restored = caches.take(hit)
                self.start, source = hit.start, hit.source
                break
            except Unusable as e:
                failed.append(f"{hit.tier.name}: {e}")
        self._plan = caches.resident.begin(keys, tenant)
        lines = {"history": history, "user": user, "branch": self._agrees if self._agrees < keys.size else None}
        below = {kind: at // BLOCK * BLOCK for kind, at in reversed(lines.items()) if at is not None}  # at one line the first named stays
        # the anchor at the prompt's end serves its whole open block
        self._lines = {line: kind for kind, line in below.items() if self.start < line < tokens.size // BLOCK * BLOCK}
        self.record = Record(
            tenant=tenant,
            prompt_tokens=tokens.size,
            source=source,
            start=self.start,
            agrees=max(self._agrees, self.start),
            read_again=max(0, self._agrees - self.start),
            why=self._why(nearest, bool(failed)),
            failed=failed,
            lookup_seconds=time.perf_counter() - begin,
        )
        if nearest is not None and self._agrees < min(keys.size, nearest.length):
            self.record.differs_at = self._agrees
            self.record.kept_text, self.record.found_text = (self._text(ids) for ids in (nearest.keys, keys))

    def _why(self, nearest, failed: bool) -> Why:
        """Why tokens that had been read before are read again."""
        resident = self._caches.resident
        if failed:
            return Why.DAMAGED
        if self.start >= max(1, self._agrees):
            return Why.NONE if nearest is None or self.start > self._agrees or self._agrees == min(self._keys.size, nearest.length) else Why.DIFFERS
        if gone := resident.missed(self._keys, self._tenant, self._agrees):
            return Why.CLEARED if gone == "cleared" else Why.EVICTED
        if nearest is None:
            return Why.EMPTY
        if self._agrees > self.start:
            return Why.NO_ANCHOR if self._agrees >= self._caches.pool.layout.grid else Why.BELOW_GRID
        return Why.DIFFERS if self._agrees < min(self._keys.size, nearest.length) else Why.NONE

    def _text(self, ids: np.ndarray) -> str | None:
        """Tokens around the first that differs."""
        at = self._agrees
        return None if self._caches.decode is None else self._caches.decode(ids[max(0, at - CONTEXT) : at + CONTEXT].tolist())

    def marks(self, start: int, end: int) -> list[int]:
        """Lines to be captured inside a forward of rows start .. end, ascending."""
        return sorted(line for line in self._lines if start < line < end)

    def kind_at(self, length: int) -> str | None:
        """The kind of anchor to take where a forward ended, if any."""
        return self._lines.get(length) or ("grid" if length % self._caches.pool.layout.grid == 0 else None)

    def add(self, kind: str, sequence: Sequence, logits: np.ndarray | None = None) -> None:
        """Takes an anchor. logits: copied, because they are a row of more."""
        length = int(sequence.length)
        if length <= self._tokens.size:
            sequence = sequence.replace(tokens=self._tokens[:length])  # a hundred anchors keep one copy
        anchor = Anchor(kind, sequence, None if logits is None else np.array(logits))
        self._anchors = [a for a in self._anchors if a.length != length]
        self._caches.resident.fit(self._plan, self._anchors, anchor)
        self.record.anchors_taken[kind] = self.record.anchors_taken.get(kind, 0) + 1

    def caught(self, sequences: list[Sequence]) -> None:
        """Anchors at lines that a forward captured."""
        for sequence in sequences:
            self.add(self._lines[int(sequence.length)], sequence)

    def finish(self, sequence: Sequence) -> None:
        """Keeps the request's state: `sequence` is the last one, held by the caller."""
        length = int(sequence.length)
        keys = np.concatenate([self._keys, sequence.tokens[self._keys.size :].astype(np.int64)])[:length]
        if length > self._tokens.size:
            self.add("end", sequence)
        elif length and all(a.length != length for a in (*self._anchors, *self._plan.inherited)):
            self.add("prompt", sequence)
        if self._caches.clears > self._clears:  # what was taken before a clear does not come back by a request that it overtook
            self._plan, self._anchors = replace(self._plan, inherited=[]), self._anchors[-1:]
        self._caches.resident.keep(self._plan, keys, self._tenant, sequence, self._anchors, min(self._history, length))
        self._record()

    def fail(self) -> None:
        """The request broke off with an error, and left no state."""
        self._caches.resident.give_back(self._plan)
        self.record.finish = "failed"
        self._record()

    def _record(self) -> None:
        self.record.anchors_dropped = dict(self._caches.resident.dropped - self._dropped)
        self._caches.ledger.add(self.record)
