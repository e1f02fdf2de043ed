"""The caches of one engine: the lookup over all tiers, and what goes when there is no room."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qjax.caches.budget import Budget
from qjax.caches.nvme.disk import Nvme
from qjax.caches.nvme.head import Head
from qjax.caches.request import Request
from qjax.caches.resident import ResidentPrefix
from qjax.caches.response import Response, ResponseCache
from qjax.caches.running import Running
from qjax.caches.session import Session
from qjax.caches.store import StateStore, snapshot_bytes
from qjax.caches.tier import Hit, NoRoom, Restored, Tier
from qjax.config import GRID, TOKEN, CacheConfig
from qjax.ledger import Ledger
from qjax.pages import PagePool

STOP = 600.0
"""Seconds that a planned stop waits for each page to be written."""


class Caches:
    """All tiers of an engine, in the order of the lookup. One thread owns them, as the pool."""

    def __init__(
        self, pool: PagePool, config: CacheConfig | None = None, level: str = TOKEN, decode: Callable | None = None, nvme: Nvme | None = None
    ):
        """level: where a resume has a cold run's bits on this engine. decode: token ids -> text, for the ledger.

        nvme: the tier on NVMe, which these caches close; the session that it reads back is the resident one.
        """
        config = config or CacheConfig()
        self.pool, self.config, self.level, self.ledger = pool, config, level, Ledger(path=config.ledger)
        self.decode, self.clears = decode, 0
        self.resident = ResidentPrefix(pool, config, level, self._demote, self._write)
        self.store = StateStore(pool, config.bytes("cache_budget_gb"), config.bytes("store_entry_gb"), config.prefix_chunk, level)
        self.running = Running(pool, level)
        self.nvme = nvme
        self.tiers: tuple[Tier, ...] = (self.resident, self.running, self.store, *([nvme] if nvme else []))
        self.responses = ResponseCache(config.bytes("response_gb"))
        self.budget = Budget(config.together, self.resident, self.running, self.store, self.responses)
        if nvme and (session := nvme.read_back()):
            self.resident.adopt(session)

    def find(self, keys: np.ndarray, tenant: str) -> list[Hit]:
        """What the tiers offer, the best first. A deeper tier counts only where it starts later than every tier above it.

        The tier on NVMe also only where its read costs less than the prefill that it saves.
        """
        hits: list[Hit] = []
        for tier in self.tiers:
            hit = tier.find(keys, tenant)
            if hit is None or any((hit.start, hit.whole, hit.exact) <= (h.start, h.whole, h.exact) for h in hits):
                continue
            if tier is not self.nvme or tier.pays(hit, hit.start - (hits[-1].start if hits else 0), self._head(hit)):
                hits.append(hit)
        return hits[::-1]

    def begin(
        self,
        tokens: np.ndarray,
        keys: np.ndarray | None = None,
        tenant: str = "",
        history: int | None = None,
        user: int | None = None,
        session: str | None = None,
        parent: str | None = None,
        parted: str | None = None,
    ) -> Request:
        """Looks a prompt up, takes the best hit that can be taken, and makes way for what will be run.

        tokens: int32 [n]. keys: int64 [n], the tokens themselves where not given. history: tokens of the prompt without its generation
        prompt (the template's beginning of an answer). user: where the last user message starts. session, parent: the client's names of the
        conversation and of the one that it works for; what they own stays longer, and nothing is found by them. parted: for the ledger.
        """
        request = Request(self, tokens, tokens.astype(np.int64) if keys is None else keys, tenant, history, user, session, parent, parted)
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
        if not enough() and self.nvme:
            self.nvme.give_up()
        return self.resident.make_room(enough)

    def pump(self) -> bool:
        """Between two requests: what waits for NVMe goes on its way, as far as there is room; whether some is left."""
        if self.nvme is None:
            return False
        self.nvme.pump()
        return self.nvme.waits

    def _demote(self, session: Session) -> None:
        """Gives the state store what the pool has no room for: the session's end, or else the longest head that it may keep.

        At level grid both: there the end serves only what goes on from all of it, and no other prompt that begins alike. A long session
        is written to NVMe too.
        """
        layout, store = self.pool.layout, self.store
        self._write(session)
        heads = [a for a in session.anchors if store.may_be_head(a.length) and not a.tainted]
        ends = [a for a in session.anchors if self.level == TOKEN or a.tainted or a.length % layout.grid == 0]
        fits = bool(ends) and snapshot_bytes(layout, ends[-1].length, ends[-1].logits) <= store.entry_bytes
        offers = [("prefix", heads[-1])] if heads and (not fits or (self.level == GRID and heads[-1] is not ends[-1])) else []
        offers += [("session", ends[-1])] if fits else []  # after the head: where only one of them fits, this one stays
        for use, a in offers:
            if self.budget.before_copy(snapshot_bytes(layout, a.length, a.logits)):
                store.offer(session.keys[: a.length], session.tenant, a.sequence, a.logits, use, a.tainted)

    def _write(self, session: Session) -> None:
        if self.nvme:
            self.nvme.evicted(session)

    def take(self, hit: Hit) -> Restored:
        """Raises Unusable."""
        if hit.tier is self.store:
            self._make_way(-(-hit.start // self.pool.layout.grid))
        elif hit.tier is self.nvme:
            head = self._head(hit)
            self.pool.hold(head.pages)  # and what makes way does not take them, nor is it written in the hit's place
            try:
                with self.nvme.held(hit):
                    self._make_way(self.nvme.needs(hit, head))
                    return self.nvme.take(hit, head)
            finally:
                self.pool.release(head.pages)
        restored = hit.tier.take(hit)
        if hit.tier is self.resident and self.nvme and (key := hit.entry[0].filed):
            self.nvme.served(key, hit.start)
        return restored

    def _make_way(self, pages: int) -> None:
        """Makes room for what needs pages of its own. Raises NoRoom, and gives nothing up, where there are too few."""
        if (most := self.pool.free + self.resident.freeable) < pages:
            raise NoRoom(f"expected {pages} pages that nobody else holds, found {most}")
        self.make_room(lambda: self.pool.free >= pages)

    def _head(self, hit: Hit) -> Head:
        """What the pool has of a hit on NVMe."""
        return self.nvme.head(hit, lambda tenant: (*self.resident.clean(tenant), *self.running.clean(tenant)))

    def distrust(self, hit: Hit) -> None:
        """A request that started on a hit broke off with an error: what came from NVMe goes, there and here, so that the next try is cold."""
        if hit.tier is self.nvme:
            self.nvme.failed(hit)
        elif hit.tier is self.resident and (key := hit.entry[0].filed):
            self.resident.drop(hit.entry[0])
            self.nvme.failed_session(key)

    def anchor_bytes(self, new: int) -> int:
        """Bytes that the anchors of a request with so many new tokens take at the most: a grid line each, three lines more, two ends."""
        layout = self.pool.layout
        most = (new // layout.grid + 5) * layout.section_bytes + 2 * layout.open_bytes
        return min(most, max(self.config.bytes("resident_gb"), 5 * layout.section_bytes + 2 * layout.open_bytes))

    def stats(self) -> dict[str, dict]:
        counted = {tier.name: tier for tier in self.tiers} | {"responses": self.responses, "budget": self.budget}
        return {name: one.stats() for name, one in counted.items()} | {"ledger": self.ledger.totals()}

    def clear(self, files: bool = False, memory: bool = True) -> None:
        """Empties every tier in memory. files: and that on NVMe."""
        self.clears += memory
        for one in (*self.tiers, self.responses):
            if files if one is self.nvme else memory:
                one.clear()

    def close(self) -> None:
        """A planned stop: all conversations in the pool are written to NVMe, the last one last, and what waits to be written.

        Not those below a grid line, which one forward reads again. An interrupt leaves out what was not begun.
        """
        if self.nvme is None or self.nvme.closed:
            return
        try:
            self.nvme.drain()  # heads first: a conversation holds what it stands on until it is written, which may have to make way for them
            for session in sorted(self.resident.sessions, key=lambda s: (s.role == "resident", s.used)):
                if session.role != "pinned" and session.length >= self.pool.layout.grid:
                    self.nvme.spill(session, STOP)
            self.nvme.close()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Ends what is written to NVMe: what was begun is finished, nothing else is written. Nothing after `close`."""
        if self.nvme is not None and not self.nvme.closed:
            self.nvme.abandon()
