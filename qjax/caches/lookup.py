"""The caches of one engine: the lookup over all tiers, and what becomes of a request's state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from qjax.caches.anchors import Anchor
from qjax.caches.budget import Budget
from qjax.caches.resident import ResidentPrefix
from qjax.caches.response import Response, ResponseCache
from qjax.caches.running import Running, Slot
from qjax.caches.session import Session
from qjax.caches.store import StateStore, snapshot_bytes
from qjax.caches.tier import Hit, Restored, Tier, Unusable
from qjax.config import GRID, TOKEN, CacheConfig
from qjax.ledger import Ledger, Record, Why
from qjax.pages import PagePool
from qjax.state import BLOCK, Sequence

CONTEXT = 4
"""Tokens on each side of the first one that differs, in the ledger's texts."""


class Caches:
    """All tiers of an engine, in the order of the lookup. One thread owns them, as the pool."""

    def __init__(self, pool: PagePool, config: CacheConfig | None = None, level: str = TOKEN, decode: Callable | None = None):
        """level: where a resume has a cold run's bits on this engine. decode: token ids -> text, for the ledger."""
        config = config or CacheConfig()
        self.pool, self.config, self.level, self.ledger = pool, config, level, Ledger(path=config.ledger)
        self.decode, self.clears = decode, 0
        self.resident = ResidentPrefix(pool, config, level, self._demote)
        self.store = StateStore(pool, config.bytes("cache_budget_gb"), config.bytes("store_entry_gb"), config.prefix_chunk, level)
        self.running = Running(pool, level)
        self.tiers: tuple[Tier, ...] = (self.resident, self.running, self.store)
        self.responses = ResponseCache(config.bytes("response_gb"))
        self.budget = Budget(config.together, self.resident, self.running, self.store, self.responses)

    def find(self, keys: np.ndarray, tenant: str) -> list[Hit]:
        """What the tiers offer, the best first. A deeper tier counts only where it starts later than every tier above it."""
        hits: list[Hit] = []
        for tier in self.tiers:
            hit = tier.find(keys, tenant)
            if hit is not None and all((hit.start, hit.whole, hit.exact) > (h.start, h.whole, h.exact) for h in hits):
                hits.append(hit)
        return hits[::-1]

    def begin(
        self, tokens: np.ndarray, keys: np.ndarray | None = None, tenant: str = "", history: int | None = None, user: int | None = None
    ) -> Request:
        """Looks a prompt up, takes the best hit that can be taken, and makes way for what will be run.

        tokens: int32 [n]. keys: int64 [n], the tokens themselves where not given. history: tokens of the prompt without its generation
        prompt (the template's beginning of an answer). user: where the last user message starts.
        """
        request = Request(self, tokens, tokens.astype(np.int64) if keys is None else keys, tenant, history, user)
        self.running.add(request)
        return request

    def answered(self, prompt: np.ndarray, **request) -> Response | None:
        """The answer of an identical greedy request, where it is kept. prompt: int32 [n]. request: as of ResponseCache."""
        return self.responses.get(prompt.astype(np.int64), **request) if self.responses.limit_bytes else None

    def remember(self, prompt: np.ndarray, **answer) -> None:
        """Keeps a greedy request's answer for an identical one. answer: as of ResponseCache."""
        if self.responses.limit_bytes:
            self.responses.put(prompt.astype(np.int64), **answer, room=self.budget.for_answers())

    def is_coming(self, tokens: np.ndarray, tenant: str = "") -> bool:
        """Whether a running request is about to read more of this prompt than a lookup would find now."""
        keys = tokens.astype(np.int64)
        coming = self.running.coming(keys, tenant)
        return coming > 0 and coming > max((hit.start for hit in self.find(keys, tenant)), default=0)

    def make_room(self, enough: Callable[[], bool]) -> bool:
        """Gives up what the pool holds for later until it is enough; whether it is."""
        return self.resident.make_room(enough)

    def _demote(self, session: Session) -> None:
        """Gives the state store what the pool has no room for: the session's end, or else the longest head that it may keep.

        At level grid both: there the end serves only what goes on from all of it, and no other prompt that begins alike.
        """
        layout, store = self.pool.layout, self.store
        heads = [a for a in session.anchors if store.may_be_head(a.length) and not a.tainted]
        ends = [a for a in session.anchors if self.level == TOKEN or a.tainted or a.length % layout.grid == 0]
        fits = bool(ends) and snapshot_bytes(layout, ends[-1].length, ends[-1].logits) <= store.entry_bytes
        offers = [("prefix", heads[-1])] if heads and (not fits or (self.level == GRID and heads[-1] is not ends[-1])) else []
        offers += [("session", ends[-1])] if fits else []  # after the head: where only one of them fits, this one stays
        for use, a in offers:
            if self.budget.before_copy(snapshot_bytes(layout, a.length, a.logits)):
                store.offer(session.keys[: a.length], session.tenant, a.sequence, a.logits, use, a.tainted)

    def take(self, hit: Hit) -> Restored:
        """Raises Unusable."""
        if hit.tier is self.store:  # it needs pages of its own
            pages = -(-hit.start // self.pool.layout.grid)
            if (most := self.pool.free + self.resident.freeable) < pages:
                raise Unusable(f"expected {pages} pages that nobody else holds, found {most}")  # and nothing is given up for it
            self.make_room(lambda: self.pool.free >= pages)
        return hit.tier.take(hit)

    def anchor_bytes(self, new: int) -> int:
        """Bytes that the anchors of a request with so many new tokens take at the most: a grid line each, three lines more, two ends."""
        layout = self.pool.layout
        most = (new // layout.grid + 5) * layout.section_bytes + 2 * layout.open_bytes
        return min(most, max(self.config.bytes("resident_gb"), 5 * layout.section_bytes + 2 * layout.open_bytes))

    def stats(self) -> dict[str, dict]:
        counted = {tier.name: tier for tier in self.tiers} | {"responses": self.responses, "budget": self.budget}
        return {name: one.stats() for name, one in counted.items()} | {"ledger": self.ledger.totals()}

    def clear(self) -> None:
        """Empties every tier."""
        self.clears += 1
        for one in (*self.tiers, self.responses):
            one.clear()


class Request:
    """One request on its way through the caches: where it starts, which lines it marks, and what it leaves.

    slot: where it runs; whoever opens it puts it here, and from then on others find what was read. keys, tenant, anchors: what they find.
    restored: what was found, its pages held for the caller; None for a cold start. start: tokens that need no forward. exact: it starts on
    a state that a cold run makes too, bit for bit. promised: bytes that its anchors may take.
    """

    def __init__(self, caches: Caches, tokens: np.ndarray, keys: np.ndarray, tenant: str, history: int | None, user: int | None):
        self.caches, self._tokens, self.keys, self.tenant = caches, tokens, keys, tenant
        self._history = tokens.size if history is None else history
        self.anchors: list[Anchor] = []
        self.slot: Slot | None = None
        self._dropped, self._clears = caches.resident.dropped.copy(), caches.clears
        begin = time.perf_counter()
        nearest, self._agrees = caches.resident.nearest(keys, tenant)
        self.restored: Restored | None = None
        taken, failed = None, []
        for hit in caches.find(keys, tenant):
            try:
                self.restored, taken = caches.take(hit), hit
                break
            except Unusable as e:
                failed.append(f"{hit.tier.name}: {e}")
        try:
            self._prepare(taken, failed, nearest, {"history": history, "user": user}, begin)
        except BaseException:
            self._give_up()
            raise

    def _prepare(self, taken: Hit | None, failed: list[str], nearest: Session | None, lines: dict[str, int | None], begin: float) -> None:
        """Makes way for what will be run, from the hit that was taken. lines: those that the caller named."""
        caches, tokens, keys, tenant = self.caches, self._tokens, self.keys, self.tenant
        self.start, source, self.exact = (taken.start, taken.source, taken.exact) if taken else (0, "cold", True)
        self._plan = caches.resident.begin(keys, tenant, taken)
        self.promised = caches.budget.before_prefill(caches.anchor_bytes(tokens.size - self.start))
        lines = lines | {"branch": self._agrees if self._agrees < keys.size else None}
        unit = BLOCK if caches.level == TOKEN else caches.pool.layout.grid
        below = {kind: at // unit * unit for kind, at in reversed(lines.items()) if at is not None}  # at one line the first named stays
        # the anchor at the prompt's end serves its whole open block
        self._lines = {line: kind for kind, line in below.items() if self.start < line < tokens.size // BLOCK * BLOCK}
        self.record = Record(
            tenant=tenant,
            prompt_tokens=tokens.size,
            source=source,
            start=self.start,
            exact=self.exact,
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
        resident = self.caches.resident
        if failed:
            return Why.DAMAGED
        if gone := resident.missed(self.keys, self.tenant, max(self.start, self._agrees)):
            return Why.CLEARED if gone == "cleared" else Why.EVICTED
        if self.start >= max(1, self._agrees):
            return Why.NONE if nearest is None or self.start > self._agrees or self._agrees == min(self.keys.size, nearest.length) else Why.DIFFERS
        if nearest is None:
            return Why.EMPTY
        if self._agrees > self.start:
            return Why.NO_ANCHOR if self._agrees >= self.caches.pool.layout.grid else Why.BELOW_GRID
        return Why.DIFFERS if self._agrees < min(self.keys.size, nearest.length) else Why.NONE

    def _text(self, ids: np.ndarray) -> str | None:
        """Tokens around the first that differs."""
        at = self._agrees
        return None if self.caches.decode is None else self.caches.decode(ids[max(0, at - CONTEXT) : at + CONTEXT].tolist())

    def marks(self, start: int, end: int) -> list[int]:
        """Lines to be captured inside a forward of rows start .. end, ascending."""
        return sorted(line for line in self._lines if start < line < end)

    def kind_at(self, length: int) -> str | None:
        """The kind of anchor to take where a forward ended, if any."""
        return self._lines.get(length) or ("grid" if length % self.caches.pool.layout.grid == 0 else None)

    def add(self, kind: str, sequence: Sequence, logits: np.ndarray | None = None) -> None:
        """Takes an anchor. logits: copied, because they are a row of more."""
        length = int(sequence.length)
        if length <= self._tokens.size:
            sequence = sequence.replace(tokens=self._tokens[:length])  # a hundred anchors keep one copy
        tainted = self.caches.level == GRID and (kind == "end" or not self.exact)
        anchor = Anchor(kind, sequence, None if logits is None else np.array(logits), tainted)
        self.anchors = [a for a in self.anchors if a.length != length]
        self.caches.resident.fit(self._plan, self.anchors, anchor, self.promised)
        self.record.anchors_taken[kind] = self.record.anchors_taken.get(kind, 0) + 1

    def caught(self, sequences: list[Sequence]) -> None:
        """Anchors at lines that a forward captured."""
        for sequence in sequences:
            self.add(self._lines[int(sequence.length)], sequence)

    def finish(self, sequence: Sequence, logits: np.ndarray | None = None) -> None:
        """Keeps the request's state: `sequence` is the last one, held by the caller. logits: float32 [V] of its last token."""
        length = int(sequence.length)
        keys = np.concatenate([self.keys, sequence.tokens[self.keys.size :].astype(np.int64)])[:length]
        caches = self.caches
        # of a prefill that was cancelled off a grid line, at level grid nothing can go on from there
        serves = caches.config.end_anchor if length > self._tokens.size else caches.level == TOKEN or length % caches.pool.layout.grid == 0
        if length and serves and all(a.length != length for a in (*self.anchors, *self._plan.inherited)):
            self.add("end" if length > self._tokens.size else "prompt", sequence, logits)
        if caches.clears > self._clears:  # what was taken before a clear does not come back by a request that it overtook
            self._plan, self.anchors = replace(self._plan, inherited=[]), self.anchors[-1:]
        caches.running.remove(self)
        caches.resident.keep(self._plan, keys, self.tenant, sequence, self.anchors, min(self._history, length))
        caches.budget.before_prefill(0)
        self._record()

    def _give_up(self) -> None:
        if self.restored is not None:
            self.caches.pool.release(self.restored.sequence.pages)
            self.restored = None

    def fail(self) -> None:
        """The request broke off with an error, and left no state; what was restored is released where nobody has taken it over."""
        self._give_up()
        self.caches.running.remove(self)
        self.caches.resident.give_back(self._plan)
        self.record.finish = "failed"
        self._record()

    def _record(self) -> None:
        self.record.anchors_dropped = dict(self.caches.resident.dropped - self._dropped)
        self.caches.ledger.add(self.record)
