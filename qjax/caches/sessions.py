"""The sessions whose rows stay held in the page pool, each in a role, and what goes when there is no room for all."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from qjax.caches.anchors import Depths, live_bytes, spread, thin
from qjax.caches.keys import common
from qjax.caches.returns import Returns
from qjax.caches.session import ROLES, Session
from qjax.config import CacheConfig
from qjax.pages import PagePool

PIN_ANCHORS = 8
AWAITED = 16
"""Conversations that are kept for their sub-agents at the most: the names are the clients' own."""
GONE = 8
"""Dropped sessions whose keys are remembered, to tell in the ledger that a prompt was kept once."""
BUDGETS = {"guest": ("resident_stash_gb", "stash"), "parked": ("resident_park_gb", "park"), "pinned": ("resident_pin_gb", "pin")}
"""Each role's budget, and the reason for which its sessions go."""


class Sessions:
    """A role is a budget on the anchors that may stay held; rows lie in the pool, which takes them back page by page when it needs them.

    Where sessions must go, those go first that are least likely to be gone on with for the time that they are kept (`Returns`).
    """

    def __init__(
        self,
        pool: PagePool,
        config: CacheConfig,
        demote: Callable[[Session], None] = lambda session: None,
        write: Callable[[Session], None] = lambda session: None,
    ):
        """demote: told of a session that goes for want of room in the pool, or of its role's budget, while it is still whole.

        write: of one that goes because all caches together have no room, so that no other one may have it.
        """
        self._pool, self._config, self._demote, self._write = pool, config, demote, write
        self.sessions: list[Session] = []
        self.depths, self.returns = Depths(), Returns(pool.layout.grid)
        self.dropped: Counter[str] = Counter()  # anchors, by reason
        self._gone: deque[tuple[str, str, np.ndarray]] = deque(maxlen=GONE)  # (reason, tenant, keys)
        self._awaited: deque[tuple[str, str]] = deque(maxlen=AWAITED)  # (tenant, owner)
        self._clock = self._requests = 0

    def _of(self, role: str) -> list[Session]:
        """Sessions of a role, the least recently used first, those that are awaited last."""
        return sorted((s for s in self.sessions if s.role == role), key=lambda s: (self._is_awaited(s), s.used))

    def _is_awaited(self, session: Session) -> bool:
        """Whether its client has it wait for a sub-agent."""
        return session.owner is not None and (session.tenant, session.owner) in self._awaited

    def named(self, tenant: str, owner: str | None, parent: str | None) -> None:
        """Told of each request whose conversation it is, and for which other one it works: that is idle now, and will go on."""
        for name in (owner, parent):
            if (tenant, name) in self._awaited:
                self._awaited.remove((tenant, name))
        if parent not in (None, owner):
            self._awaited.append((tenant, parent))

    @property
    def resident(self) -> Session | None:
        return next((s for s in self.sessions if s.role == "resident"), None)

    @property
    def freeable(self) -> int:
        """Pages that nobody but sessions holds."""
        held = Counter(p for s in self.sessions for p in s.pages)
        return sum(int(self._pool.holders[page]) == times for page, times in held.items())

    @property
    def anchor_bytes(self) -> int:
        """Bytes that the anchors of all sessions keep alive."""
        return live_bytes(a for s in self.sessions for a in s.anchors)

    def own_bytes(self, role: str) -> int:
        """What the anchors of a role's sessions keep that the resident one's do not. Rows lie in the pool: `make_room` takes them back."""
        now = self.resident
        states = {a.state for a in now.anchors} if now and role != "resident" else set()
        return live_bytes(a for s in self._of(role) for a in s.anchors if a.state not in states)

    def missed(self, keys: np.ndarray, tenant: str, agrees: int) -> str | None:
        """Why a session that agreed with a prompt further than this is no longer there, if there was one."""
        return next((reason for reason, of, gone in self._gone if of == tenant and common(gone, keys) > agrees), None)

    def make_room(self, enough: Callable[[], bool]) -> bool:
        """Gives rows up until it is enough: of a session its end first, the rest stays as a pinned head; of the resident one last, and whole.

        Sessions that free no page, because others hold theirs too, are spared as long as possible.
        """
        if enough():
            return True
        for sparing in (True, False):
            for session in [*self._least("guest", "pinned", "parked"), *self._of("resident")]:
                if not sparing or any(self._pool.holders[p] == 1 for p in session.pages):
                    self._cut(session, enough)
                    if enough():
                        return True
        return enough()

    def _cut(self, session: Session, enough: Callable[[], bool]) -> None:
        """Gives a session's rows up from its end, anchor by anchor, until it is enough or nothing is left that no other session has."""
        while session.role != "resident" and len(session.anchors) > 1 and not enough():
            if session.role != "pinned":
                self._demote(session)
                self._forget(session, "pool")
                session.role = "pinned"
            self.dropped["pool"] += 1
            session.cut(session.anchors[-2].length)
            if self._has(session, session.length):
                break
        else:
            if enough():
                return
        self._close(session, "pool")

    def shrink(self, limit: int) -> None:
        """Gives sessions up, and then the resident one's anchors but its newest, until the anchors hold no more than so many bytes."""
        for role in ("guest", "pinned", "parked"):
            for session in self._of(role):
                if self.anchor_bytes > limit:
                    self._write(session)
                    self._close(session, "budget")
        for session in self._of("resident"):
            self._thin(session, limit)

    def _hold_budgets(self) -> None:
        """Brings every role within its budget."""
        config = self._config
        for session in self._of("resident"):
            self._thin(session, config.bytes("resident_gb"))
        for role, (name, _) in BUDGETS.items():
            self._hold_budget(role, config.bytes(name))

    def _hold_budget(self, role: str, budget: int) -> None:
        """Brings a role's sessions within a budget. Anchors go before sessions, and of the sessions first those that are worth least."""
        while (own := self.own_bytes(role)) > budget:
            least = self._least(role)
            if any(self._thin_all(least, own - budget, few) for few in (False, True)):
                continue
            if role == "parked":
                self._pin(least[0])
            else:
                self._close(least[0], BUDGETS[role][1])

    def _thin_all(self, sessions: list[Session], over: int, few: bool) -> bool:
        """Thins sessions, one after the other, until so many bytes are saved; False, and no change, where that is not to be had."""
        kept = {}
        for session in sessions:
            if over <= 0:
                break
            own = live_bytes(session.anchors)
            kept[session] = thin(session.anchors, own - over, self.depths, session.length, few)
            over -= own - live_bytes(kept[session])
        if over > 0:
            return False
        for session, anchors in kept.items():
            self.dropped["thinned"] += len(session.anchors) - len(anchors)
            session.anchors = anchors
        return True

    def _pin(self, session: Session) -> None:
        """Keeps a parked session's head, the longest that fits the budget with up to PIN_ANCHORS spread over it."""
        budget = self._config.bytes("resident_pin_gb")
        for last in range(len(session.anchors), 0, -1):
            for most in range(PIN_ANCHORS, 0, -1):
                some = spread(session.anchors[:last], most)
                if self._has(session, some[-1].length):
                    self._close(session, "park")
                    return
                if live_bytes(some) <= budget:
                    self._demote(session)
                    self._forget(session, "park")
                    session.role, session.anchors = "pinned", some
                    session.cut(some[-1].length)
                    return
        self._close(session, "park")

    def _has(self, session: Session, length: int) -> bool:
        """Whether another session keeps the same head with an anchor at its end."""
        others = (s for s in self.sessions if s is not session and s.tenant == session.tenant)
        return any(common(s.keys, session.keys) >= length and any(a.length == length for a in s.anchors) for s in others)

    def _thin(self, session: Session, limit: int) -> None:
        kept = thin(session.anchors, limit, self.depths, session.length)
        self.dropped["thinned"] += len(session.anchors) - len(kept)
        session.anchors = kept

    def _least(self, *roles: str) -> list[Session]:
        """Sessions of some roles, those first that are least likely to be gone on with for the time that they are kept."""

        def order(s: Session) -> tuple[bool, float, int]:
            return self._is_awaited(s), self.returns.worth(s.turns, self._requests - s.request + 1), s.used

        return sorted((s for s in self.sessions if s.role in roles), key=order)

    def _forget(self, session: Session, reason: str) -> None:
        """Remembers a session that is no longer whole, for the ledger and for when a request would have gone on with it."""
        if session.length >= session.history:  # else that was done before
            self._gone.appendleft((reason, session.tenant, session.keys))
            if reason != "cleared":
                self.returns.gone(session.keys[: session.history], session.tenant, session.turns, session.request)

    def _touch(self, session: Session) -> None:
        self._clock += 1
        session.used, session.touched = self._clock, time.monotonic()

    def _close(self, session: Session, reason: str, but: Session | None = None) -> None:
        """Drops a session; anchors that another one has too, or `but`, are not dropped."""
        if reason not in ("superseded", "cleared", "budget"):
            self._demote(session)
        if reason != "superseded":
            self._forget(session, reason)
        self.sessions = [s for s in self.sessions if s is not session]
        others = {a.state for s in (*self.sessions, but) if s is not None for a in s.anchors}
        self.dropped[reason] += sum(a.state not in others for a in session.anchors)
        session.close()

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
