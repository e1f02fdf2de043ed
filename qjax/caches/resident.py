"""The resident prefix: sessions whose rows stay in the page pool, where the next turn finds them.

One session is the resident one, the last that was not a guest. The others are guests (short requests in between), parked
sessions (other conversations, which come back where they left) and pinned heads (what is left of a session that the park has
no room for). Nothing is copied: a role is a budget on what may stay held, and sessions with a common head hold its pages together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from qjax.caches.anchors import Anchor, Depths, live_bytes, newest, spread, thin
from qjax.caches.keys import common
from qjax.caches.session import ROLES, Session
from qjax.caches.tier import Hit, Restored
from qjax.config import GRID, TOKEN, CacheConfig
from qjax.pages import PagePool
from qjax.state import BLOCK, Sequence

PIN_ANCHORS = 8
GONE = 8
"""Dropped sessions whose keys are remembered, to tell in the ledger that a prompt was kept once."""
GUEST_SHARE = 4
"""A guest's prompt is shorter than the resident session's by this factor."""


@dataclass(frozen=True)
class Plan:
    """What becomes of a request's rows. role: the session's. inherited: anchors it shares with the one before it. replaces: that one,
    where the request goes on with it. parked: the resident session that made way.
    """

    role: str
    inherited: list[Anchor]
    replaces: Session | None
    parked: Session | None = None


class ResidentPrefix:
    """A tier, and the keeper of all sessions in the pool. One thread owns it, as the pool."""

    name = "resident"

    def __init__(self, pool: PagePool, config: CacheConfig, level: str = TOKEN, demote: Callable[[Session], None] = lambda session: None):
        """demote: told of a session that goes for want of room, while it is still whole."""
        self._pool, self._config, self._level, self._demote = pool, config, level, demote
        self.sessions: list[Session] = []
        self.depths = Depths()
        self.dropped: Counter[str] = Counter()  # anchors, by reason
        self._gone: deque[tuple[str, str, np.ndarray]] = deque(maxlen=GONE)  # (reason, tenant, keys)
        self._clock = 0

    def _of(self, role: str) -> list[Session]:
        """Sessions of a role, the least recently used first."""
        return sorted((s for s in self.sessions if s.role == role), key=lambda s: s.used)

    @property
    def resident(self) -> Session | None:
        return next((s for s in self.sessions if s.role == "resident"), None)

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
                best = Hit(found.start, source, self, (session, anchor), found.whole, found.exact)
        return best

    def take(self, hit: Hit) -> Restored:
        session, anchor = hit.entry
        self._touch(session)
        sequence = anchor.sequence.cut(hit.start, self._pool.layout.grid)
        self._pool.hold(sequence.pages)
        return Restored(sequence, anchor.logits if hit.whole else None)

    def nearest(self, keys: np.ndarray, tenant: str) -> tuple[Session | None, int]:
        """The session of this tenant whose rows agree furthest with a prompt, and how far."""
        agrees = [(common(s.keys, keys), s.used, s) for s in self.sessions if s.tenant == tenant]
        furthest = max(agrees, key=lambda a: a[:2], default=(0, 0, None))
        return furthest[2], furthest[0]

    def missed(self, keys: np.ndarray, tenant: str, agrees: int) -> str | None:
        """Why a session that agreed with a prompt further than this is no longer there, if there was one."""
        return next((reason for reason, of, gone in self._gone if of == tenant and common(gone, keys) > agrees), None)

    def begin(self, keys: np.ndarray, tenant: str, hit: Hit | None) -> Plan:
        """Makes way for a request that will be run, from a hit that was taken or from nothing.

        A resident session that the request does not go on with is parked, here and not later: its pages count against the park's
        budget before the first of the new ones is taken.
        """
        now = self.resident
        before, agrees = self.nearest(keys, tenant)
        goes_on = before is not None and agrees >= before.history
        heir, most = before, agrees  # the rows that are read again have the same bits
        if self._level == GRID:  # there they may not: an anchor stays with the rows that it was taken over
            heir, most = (hit.entry[0], hit.start) if hit is not None and hit.tier is self else (None, 0)
        anchors = [a for a in heir.anchors if a.length <= most] if heir is not None else []
        plan = Plan("resident", anchors, before if goes_on else None)
        if before is not None and agrees >= BLOCK:
            self.depths.add(before.length - agrees)
        if now is None or (goes_on and before is now):
            return plan
        if keys.size <= self._config.resident_guest_max and GUEST_SHARE * keys.size < now.length:
            return replace(plan, role="guest")
        now.role = "parked"
        self._hold_budgets()
        return replace(plan, parked=now)

    def keep(self, plan: Plan, keys: np.ndarray, tenant: str, sequence: Sequence, anchors: list[Anchor], history: int) -> None:
        """Keeps what a request left: its last sequence, and the anchors taken on the way. keys: int64 of the sequence's tokens.

        history: the prompt without its generation prompt. Rows past the last anchor are not kept. A session that the request went on
        with is replaced.
        """
        merged = {a.length: a for a in (*plan.inherited, *anchors) if a.length <= keys.size}
        if not merged:
            self.give_back(plan)
            return
        session = Session(self._pool, keys, tenant, sequence, merged.values(), history, plan.role)
        session.cut(session.length)
        if plan.replaces in self.sessions:
            self._close(plan.replaces, "superseded", but=session)
        for other in self._of("resident"):
            if plan.role == "resident":
                other.role = "parked"
        self.sessions.append(session)
        self._touch(session)
        self._hold_budgets()

    def give_back(self, plan: Plan) -> None:
        """The request left nothing: who made way for it is resident again."""
        if plan.parked in self.sessions and self.resident is None:
            plan.parked.role = "resident"

    def fit(self, plan: Plan, anchors: list[Anchor], new: Anchor) -> None:
        """Adds a running request's anchor to its others, after thinning them so that all fit the budget together."""
        room = self._config.bytes("resident_gb") - live_bytes([new]) - live_bytes(plan.inherited)
        kept = thin(anchors, max(0, room), self.depths)
        self.dropped["thinned"] += len(anchors) - len(kept)
        anchors[:] = [*kept, new]

    def make_room(self, enough: Callable[[], bool]) -> bool:
        """Gives sessions up until it is enough: guests go first, then pinned heads, parked sessions, the resident one last.

        Those that free no page, because others hold theirs too, are spared as long as possible.
        """
        for sparing in (True, False):
            for role in ("guest", "pinned", "parked", "resident"):
                for session in self._of(role):
                    if enough():
                        return True
                    if not sparing or any(self._pool.holders[p] == 1 for p in session.pages):
                        self._close(session, "pool")
        return enough()

    @property
    def anchor_bytes(self) -> int:
        """Bytes that the anchors of all sessions keep alive."""
        return live_bytes(a for s in self.sessions for a in s.anchors)

    def shrink(self, limit: int) -> None:
        """Gives sessions up, and then the resident one's anchors but its newest, until the anchors hold no more than so many bytes."""
        for role in ("guest", "pinned", "parked"):
            for session in self._of(role):
                if self.anchor_bytes > limit:
                    self._close(session, "budget")
        for session in self._of("resident"):
            self._thin(session, limit)

    def _thin(self, session: Session, limit: int) -> None:
        kept = thin(session.anchors, limit, self.depths)
        self.dropped["thinned"] += len(session.anchors) - len(kept)
        session.anchors = kept

    def _touch(self, session: Session) -> None:
        self._clock += 1
        session.used = self._clock

    def _close(self, session: Session, reason: str, but: Session | None = None) -> None:
        """Drops a session; anchors that another one has too, or `but`, are not dropped."""
        if reason not in ("superseded", "cleared", "budget"):
            self._demote(session)
        self.sessions = [s for s in self.sessions if s is not session]
        others = {a.state for s in (*self.sessions, but) if s is not None for a in s.anchors}
        self.dropped[reason] += sum(a.state not in others for a in session.anchors)
        if reason != "superseded":
            self._gone.appendleft((reason, session.tenant, session.keys))
        session.close()

    def own_bytes(self, role: str) -> int:
        """What the sessions of a role keep that the resident one does not: pages and anchors."""
        now = self.resident
        pages, states = (set(now.pages), {a.state for a in now.anchors}) if now and role != "resident" else (set(), set())
        sessions = self._of(role)
        held = {p for s in sessions for p in s.pages} - pages
        return len(held) * self._pool.layout.page_bytes + live_bytes(a for s in sessions for a in s.anchors if a.state not in states)

    def _hold_budgets(self) -> None:
        """Brings every role within its budget."""
        config = self._config
        for session in self._of("resident"):
            self._thin(session, config.bytes("resident_gb"))
        for session in self._of("guest"):
            if self.own_bytes("guest") > config.bytes("resident_stash_gb"):
                self._close(session, "stash")
        for session in self._of("parked"):
            kept = newest(session.anchors)
            self.dropped["parked"] += len(session.anchors) - len(kept)
            session.anchors = kept
            if self.own_bytes("parked") > config.bytes("resident_park_gb"):
                self._pin(session)
        for session in self._of("pinned"):
            if self.own_bytes("pinned") > config.bytes("resident_pin_gb"):
                self._close(session, "pin")

    def _pin(self, session: Session) -> None:
        """Keeps a parked session's head, the longest that fits the budget with up to PIN_ANCHORS spread over it."""
        budget, layout = self._config.bytes("resident_pin_gb"), self._pool.layout
        for last in range(len(session.anchors), 0, -1):
            rows = -(-session.anchors[last - 1].length // layout.grid) * layout.page_bytes
            for most in range(PIN_ANCHORS, 0, -1):
                some = spread(session.anchors[:last], most)
                if self._has(session, some[-1].length):
                    self._close(session, "park")
                    return
                if rows + live_bytes(some) <= budget:
                    self._demote(session)
                    session.role, session.anchors = "pinned", some
                    session.cut(some[-1].length)
                    return
        self._close(session, "park")

    def _has(self, session: Session, length: int) -> bool:
        """Whether another session keeps the same head with an anchor at its end."""
        others = (s for s in self.sessions if s is not session and s.tenant == session.tenant)
        return any(common(s.keys, session.keys) >= length and any(a.length == length for a in s.anchors) for s in others)

    def stats(self) -> dict[str, int]:
        stats = {}
        for role in ROLES:
            stats[f"{role}_sessions"] = len(self._of(role))
        pages = {p for s in self.sessions for p in s.pages}
        anchors = [a for s in self.sessions for a in s.anchors]
        stats["anchors"] = len({a.state for a in anchors})
        stats["anchor_bytes"] = self.anchor_bytes
        stats["page_bytes"] = len(pages) * self._pool.layout.page_bytes
        return stats | {f"dropped_{reason}": n for reason, n in sorted(self.dropped.items())}

    def clear(self) -> None:
        for session in list(self.sessions):
            self._close(session, "cleared")
