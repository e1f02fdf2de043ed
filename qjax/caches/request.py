"""A request on its way through the caches: where it starts, what it marks, and what becomes of its state."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from qjax.caches.anchors import Anchor
from qjax.caches.running import Slot
from qjax.caches.session import Session
from qjax.caches.tier import Gone, Hit, NoRoom, Restored, Tier, Unusable
from qjax.config import GRID, TOKEN
from qjax.ledger import Record, Why
from qjax.pages import PoolFull
from qjax.state import BLOCK, Sequence

if TYPE_CHECKING:
    from qjax.caches.lookup import Caches

CONTEXT = 4
"""Tokens on each side of the first one that differs, in the ledger's texts."""


class Request:
    """One request on its way through the caches: where it starts, which lines it marks, and what it leaves.

    slot: where it runs; whoever opens it puts it here, and from then on others find what was read. keys, tenant, anchors: what they find.
    restored: what was found, its pages held for the caller; None for a cold start. start: tokens that need no forward. exact: it starts on
    a state that a cold run makes too, bit for bit. promised: bytes that its anchors may take.
    """

    def __init__(
        self,
        caches: Caches,
        tokens: np.ndarray,
        keys: np.ndarray,
        tenant: str,
        history: int | None,
        user: int | None,
        session: str | None,
        parent: str | None,
        parted: str | None,
    ):
        caches.resident.named(tenant, session, parent)
        self.caches, self._tokens, self.keys, self.tenant = caches, tokens, keys, tenant
        self._history = tokens.size if history is None else history
        self.anchors: list[Anchor] = []
        self.slot: Slot | None = None
        self._dropped, self._clears = caches.resident.dropped.copy(), caches.clears
        begin = time.perf_counter()
        nearest, self._agrees = caches.resident.nearest(keys, tenant)
        self.restored: Restored | None = None
        taken, failed = self._take()
        self._hit = taken
        try:
            self._prepare(taken, failed, nearest, {"history": history, "user": user}, begin, session)
            self.record.session, self.record.parted = session, parted
        except BaseException:
            self._give_up()
            raise

    def _take(self) -> tuple[Hit | None, list[tuple[str, Unusable]]]:
        """Takes the best hit that can be taken: it, and why others, by their tiers' names, could not be."""
        passed: list[Tier] = []
        failed: list[tuple[str, Unusable]] = []
        while hits := [hit for hit in self.caches.find(self.keys, self.tenant) if hit.tier not in passed]:
            try:
                self.restored = self._restore(hits[0])
                return hits[0], failed
            except Unusable as e:
                failed.append((hits[0].tier.name, e))
                if not isinstance(e, Gone):
                    passed.append(hits[0].tier)
        return None, failed

    def _restore(self, hit: Hit) -> Restored:
        """Raises Unusable, also where the tokens are not the prompt's though the key ids are."""
        restored = self.caches.take(hit)
        if np.array_equal(restored.sequence.tokens, self._tokens[: hit.start]):
            return restored
        self.caches.pool.release(restored.sequence.pages)
        if hit.tier is not self.caches.nvme:
            raise Unusable("it has other tokens than the prompt")
        self.caches.nvme.failed(hit)
        raise Gone("it has other tokens than the prompt")

    def _prepare(
        self,
        taken: Hit | None,
        failed: list[tuple[str, Unusable]],
        nearest: Session | None,
        lines: dict[str, int | None],
        begin: float,
        owner: str | None,
    ) -> None:
        """Makes way for what will be run, from the hit that was taken. lines: those that the caller named."""
        caches, tokens, keys, tenant = self.caches, self._tokens, self.keys, self.tenant
        self.start, source, self.exact = (taken.start, taken.source, taken.exact) if taken else (0, "cold", True)
        self._plan = caches.resident.begin(keys, tenant, taken, owner)
        if self.restored and self.restored.uncut:  # where others with this head start too, as long as it is in the pool
            sequence, logits = self.restored.sequence, self.restored.logits
            self.anchors = [Anchor("grid", sequence, logits, tainted=caches.level == GRID and not taken.exact)]
        branch = self._agrees if self._agrees < keys.size else None
        self._intake = None
        if caches.nvme:
            self._intake = caches.nvme.begin(keys, tenant, self.start, first=self._plan.turns == 1, user=lines["user"], branch=branch)
        self.promised = caches.budget.before_prefill(caches.anchor_bytes(tokens.size - self.start))
        lines = lines | {"branch": branch}
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
            why=self._why(nearest, [e for _, e in failed]),
            failed=[f"{name}: {e}" for name, e in failed],
            lookup_seconds=time.perf_counter() - begin,
        )
        if nearest is not None and self._agrees < min(keys.size, nearest.length):
            self.record.differs_at = self._agrees
            self.record.kept_text, self.record.found_text = (self._text(ids) for ids in (nearest.keys, keys))

    def _why(self, nearest, failed: list[Unusable]) -> Why:
        """Why tokens that had been read before are read again."""
        resident = self.caches.resident
        if failed and all(isinstance(e, NoRoom) for e in failed):
            return Why.NO_ROOM
        if failed or (self.caches.nvme and self.caches.nvme.lost(self.keys, self.tenant, self.start)):
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
        if self._intake:
            self.caches.nvme.capture(self._intake, anchor)
            if length == self._tokens.size:
                self.caches.nvme.offer(self._intake)

    def pump(self) -> None:
        """Between two steps of an answer: what is to be written goes on its way, as far as there is room."""
        if self._intake:
            self.caches.nvme.pump()

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
        if self._intake:
            caches.nvme.offer(self._intake)
            caches.nvme.pump()
            caches.nvme.keep_book()
        caches.running.remove(self)
        caches.resident.keep(self._plan, keys, self.tenant, sequence, self.anchors, min(self._history, length))
        caches.budget.before_prefill(0)
        self._record()

    def _give_up(self) -> None:
        if self.restored is not None:
            self.caches.pool.release(self.restored.sequence.pages)
            self.restored = None

    def fail(self, error: BaseException | None = None) -> None:
        """The request broke off, and left no state; what was restored is released where nobody has taken it over.

        error: what it broke off with, where it may come of the state on which it started.
        """
        self._give_up()
        if isinstance(error, Exception) and not isinstance(error, PoolFull) and self._hit:
            self.caches.distrust(self._hit)
        self.caches.running.remove(self)
        self.caches.resident.give_back(self._plan)
        self.record.finish = "failed"
        self._record()

    def _record(self) -> None:
        if self.caches.nvme:
            self.caches.nvme.forwarded(self._tokens.size - self.start, self.record.prefill_seconds - self.record.lookup_seconds)
        self.record.anchors_dropped = dict(self.caches.resident.dropped - self._dropped)
        self.caches.ledger.add(self.record)
