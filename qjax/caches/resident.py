"""The resident prefix: sessions whose rows stay in the page pool, where the next turn finds them.

One session is the resident one, the last that was not a guest. The others are guests (short requests in between), parked
sessions (other conversations, which come back where they left) and pinned heads (what is left of a session that there is no room
for). Nothing is copied: a role is a budget on what may stay held, and sessions with a common head hold its pages together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from qjax.caches.anchors import Anchor, last_clean, live_bytes, thin
from qjax.caches.keys import common
from qjax.caches.session import ROLES, Session
from qjax.caches.sessions import Sessions
from qjax.caches.tier import Hit, Restored, Unusable
from qjax.config import GRID, TOKEN, CacheConfig
from qjax.pages import PagePool
from qjax.state import BLOCK, Sequence

GUEST_SHARE = 4
"""A guest's prompt is shorter than the resident session's by this factor."""


@dataclass(frozen=True)
class Plan:
    """What becomes of a request's rows. role: the session's. inherited: anchors it shares with the one before it. replaces: that one,
    where the request goes on with it. parked: the resident session that made way. turns: which turn of its session this is. owner: of it.
    """

    role: str
    inherited: list[Anchor]
    replaces: Session | None
    parked: Session | None = None
    turns: int = 1
    owner: str | None = None


class ResidentPrefix(Sessions):
    """A tier, over all sessions in the pool. One thread owns it, as the pool."""

    name = "resident"

    def __init__(self, pool: PagePool, config: CacheConfig, level: str = TOKEN, *told: Callable[[Session], None]):
        """told: as of Sessions."""
        super().__init__(pool, config, *told)
        self._level = level

    def find(self, keys: np.ndarray, tenant: str) -> Hit | None:
        best, furthest = None, None
        for session in sorted(self.sessions, key=lambda s: (ROLES.index(s.role), -s.used)):
            if session.tenant != tenant:
                continue
            anchor, found, _ = session.best(keys, self._level)
            if found is not None and (furthest is None or found > furthest):
                source, furthest = session.role, found
                if source == "resident" and anchor.length == found.start and anchor.kind in ("end", "prompt"):
                    source = anchor.kind
                source = session.source or source
                best = Hit(found.start, source, self, (session, anchor), found.whole, found.exact)
        return best

    def take(self, hit: Hit) -> Restored:
        session, anchor = hit.entry
        if anchor not in session.anchors:
            raise Unusable("it made room for another hit, which could not be taken")
        self._touch(session)
        sequence = anchor.sequence.cut(hit.start, self._pool.layout.grid)
        self._pool.hold(sequence.pages)
        return Restored(sequence, anchor.logits if hit.whole else None)

    def nearest(self, keys: np.ndarray, tenant: str) -> tuple[Session | None, int]:
        """The session of this tenant whose rows agree furthest with a prompt, and how far."""
        agrees = [(common(s.keys, keys), s.used, s) for s in self.sessions if s.tenant == tenant]
        furthest = max(agrees, key=lambda a: a[:2], default=(0, 0, None))
        return furthest[2], furthest[0]

    def clean(self, tenant: str) -> Iterator[tuple[np.ndarray, Sequence]]:
        """(key ids, rows in a cold run's bits) of every session of a tenant."""
        for session in self.sessions:
            if session.tenant == tenant and (anchor := last_clean(session.anchors)):
                yield session.keys, anchor.sequence

    def begin(self, keys: np.ndarray, tenant: str, hit: Hit | None, owner: str | None = None) -> Plan:
        """Makes way for a request that will be run, from a hit that was taken or from nothing.

        A resident session that the request does not go on with is parked, here and not later: its anchors count against the park's
        budget before the first of the new ones is taken.
        """
        now = self.resident
        before, agrees = self.nearest(keys, tenant)
        goes_on = before is not None and agrees >= before.history
        turns = self._turn(keys, tenant, before if goes_on else None, agrees)
        heir, most = before, agrees  # the rows that are read again have the same bits
        if self._level == GRID:  # there they may not: an anchor stays with the rows that it was taken over
            heir, most = (hit.entry[0], hit.start) if hit is not None and hit.tier is self else (None, 0)
        anchors = [a for a in heir.anchors if a.length <= most] if heir is not None else []
        plan = Plan("resident", anchors, before if goes_on else None, turns=turns, owner=owner)
        if before is not None and agrees >= BLOCK:
            self.depths.add(before.length - agrees)
        if now is None or (goes_on and before is now):
            return plan
        if self._is_guest(keys.size, now):
            return replace(plan, role="guest")
        now.role = "parked"
        self._hold_budgets()
        return replace(plan, parked=now)

    def _is_guest(self, size: int, now: Session) -> bool:
        return size <= self._config.resident_guest_max and GUEST_SHARE * size < now.length

    def _turn(self, keys: np.ndarray, tenant: str, before: Session | None, agrees: int) -> int:
        """Which turn of its session a request is. before: the session that it goes on with."""
        self._requests += 1
        grid = self._pool.layout.grid
        gone = self.returns.find_gone(keys, tenant, max(agrees, grid - 1))
        turns, at = gone or ((before.turns, before.request) if before is not None and agrees >= grid else (0, 0))
        if turns:
            self.returns.back(turns, self._requests - at)
        self.returns.turn(turns + 1)
        return turns + 1

    def keep(self, plan: Plan, keys: np.ndarray, tenant: str, sequence: Sequence, anchors: list[Anchor], history: int) -> None:
        """Keeps what a request left: its last sequence, and the anchors taken on the way. keys: int64 of the sequence's tokens.

        history: the prompt without its generation prompt. Rows past the last anchor are not kept. A session that the request went on
        with is replaced.
        """
        merged = {a.length: a for a in (*plan.inherited, *anchors) if a.length <= keys.size}
        if not merged:
            self.give_back(plan)
            return
        role, now = plan.role, self.resident
        if role == "resident" and now not in (None, plan.replaces) and self._is_guest(keys.size, now):
            role = "guest"  # a longer one has come to be resident while this one ran
        session = Session(self._pool, keys, tenant, sequence, merged.values(), history, role)
        session.cut(session.length)
        session.turns, session.request, session.owner = plan.turns, self._requests, plan.owner
        if plan.replaces in self.sessions:
            self._close(plan.replaces, "superseded", but=session)
        for other in self._of("resident"):
            if role == "resident":
                other.role = "parked"
        self.sessions.append(session)
        self._touch(session)
        self._hold_budgets()

    def adopt(self, session: Session) -> None:
        """Takes a session that was read back, before the first request."""
        self.sessions.append(session)
        self._touch(session)
        self._hold_budgets()

    def drop(self, session: Session) -> None:
        """Gives a session up, and whatever else keeps its rows does not matter: it is of no use."""
        if session in self.sessions:
            self._close(session, "cleared")

    def give_back(self, plan: Plan) -> None:
        """The request left nothing: who made way for it is resident again."""
        if plan.parked in self.sessions and self.resident is None:
            plan.parked.role = "resident"

    def fit(self, plan: Plan, anchors: list[Anchor], new: Anchor, most: int) -> None:
        """Adds a running request's anchor to its others, after thinning them so that all fit the budget together. most: bytes of its own."""
        room = min(self._config.bytes("resident_gb") - live_bytes(plan.inherited), most) - live_bytes([new])
        kept = thin(anchors, max(0, room), self.depths, new.length)
        self.dropped["thinned"] += len(anchors) - len(kept)
        anchors[:] = [*kept, new]
