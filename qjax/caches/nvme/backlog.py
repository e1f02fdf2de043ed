"""The backlog: heads on their way from the pool to the staging, a page at a time."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from qjax.caches.anchors import Anchor
from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import DISK
from qjax.caches.nvme.room import Room
from qjax.caches.nvme.staging import Staging
from qjax.caches.nvme.writer import Lot
from qjax.interrupts import deferred
from qjax.pages import PagePool
from qjax.state import Sequence


@dataclass
class Waiting:
    """An anchor whose pages are staged one by one; until then they are held in the pool. pages: keys of those that are.

    before: the next shorter one of its request, whose pages it shares. lot: None where it was not begun.
    """

    chain: Chain
    anchor: Anchor
    before: Waiting | None
    lot: Lot | None = None
    pages: list[str] = field(default_factory=list)


class Backlog:
    """One thread owns it, as the pool."""

    def __init__(self, pool: PagePool, staging: Staging, room: Room, counts: Counter):
        """counts: of the tier."""
        self._pool, self._staging, self._room, self._counts = pool, staging, room, counts
        self._waiting: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def sequences(self) -> list[Sequence]:
        """What is held."""
        return [one.anchor.sequence for one in self._waiting]

    def add(self, chain: Chain, anchors: list[Anchor]) -> None:
        """Takes the anchors of a request, the shorter ones first, and holds their pages."""
        one = None
        for anchor in anchors:
            self._pool.hold(anchor.sequence.pages)
            self._waiting.append(one := Waiting(chain, anchor, one))

    @deferred()
    def pump(self) -> None:
        """Stages what there is room for. Costs a copy of a page for each, and waits for nothing."""
        while self._waiting:
            one = self._waiting[0]
            sequence, length = one.anchor.sequence, one.anchor.length
            if not self._goes_on(one):
                self._give_up(self._waiting.popleft())
                continue
            for number in range(len(one.pages), sequence.pages.size):
                key = self._staging.page(one.chain, sequence.tokens, length, number, int(sequence.pages[number]), DISK, lot=one.lot)
                if key is None:
                    return
                one.pages.append(key)
            key = self._staging.anchor(one.chain, one.anchor, one.pages, DISK, lot=one.lot)
            if key is None:
                return
            self._staging.let_go([key, *one.pages])
            self._pool.release(sequence.pages)
            self._waiting.popleft()

    def _goes_on(self, one: Waiting) -> bool:
        """Whether an anchor is on its way; it is not begun where it has no room with all pages below it that are not there."""
        if one.lot is None:
            one.lot = self._staging.lot(self._room, f"a head of {one.anchor.length:,} tokens", one.chain, one.anchor.length, [one.anchor], DISK)
            if one.lot is None:
                return False
            one.lot.on = one.before and one.before.lot
        return not one.lot.lost

    def _give_up(self, one: Waiting) -> None:
        if one.lot is not None:
            one.lot.failed = True
        self._staging.let_go(one.pages)
        self._pool.release(one.anchor.sequence.pages)
        self._counts["dropped_no_room"] += 1

    def forget(self) -> bool:
        """Gives all of it up; whether there was anything."""
        there = bool(self._waiting)
        while self._waiting:
            self._give_up(self._waiting.popleft())
        return there
