"""The index: the catalog of what lies in the storage, and which of it goes first."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from qjax.caches.nvme.catalog import Catalog
from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import DISK, PAGE, FiledAnchor, FiledSession
from qjax.caches.nvme.values import Values
from storage import Entry, Storage

DAY = 86_400


class Index(Catalog):
    """Any thread may call any method."""

    def __init__(self, storage: Storage, grid: int, counted: Callable[[str], int] = lambda line: 0):
        """counted: as of Values."""
        super().__init__(storage, grid)
        self._values = Values(grid, counted)

    def arrived(self, key: str, entry: Entry | None) -> None:
        """An expected anchor is there, or will not be. ValueError as of add_anchor."""
        with self._lock:
            filed = self._coming.pop(key, None)
            if entry is not None and filed is not None:
                self.add_anchor(entry)
                self.anchors[key].hits += filed.hits
                if filed.use == DISK:
                    self._values.waits(self.anchors[key])
        if entry is not None and filed is None:
            self._remove([key], "damaged")  # it was dropped on its way

    def served(self, filed: FiledAnchor) -> None:
        """Notes that a prompt started on an anchor."""
        now = self.now()
        with self._lock:
            sessions = [s for s in self.sessions.values() if filed.key in s.anchors]
            serve = [filed, *sessions] if filed.use == DISK else sessions
            for one in serve:
                self._values.serves(one, now)
            filed.hits += 1
            for one in (filed, *sessions):
                one.used = now
            for one in serve:
                self._values.waits(one)
        for key in (filed.key, *(s.key for s in sessions)):
            self._storage.touch(key)

    def served_session(self, key: str, start: int) -> None:
        """Notes that a prompt started in memory on a session that was read back, after so many tokens."""
        with self._lock:
            session = self.sessions.get(key)
            anchors = self._anchors_of(session) if session else []
        if anchors:
            self.served(next((a for a in anchors if a.length >= start), anchors[-1]))

    def value(self, one: FiledAnchor | FiledSession, now: float) -> float:
        """Tokens a second that it will save for each byte that it holds, see Values."""
        saves, holds = self.worth(one)
        return self.returns(one, now) * saves / max(1, holds)

    def returns(self, one: FiledAnchor | FiledSession, now: float) -> float:
        """Prompts a second that will start on it."""
        with self._lock:
            return self._values.returns(one, now)

    def missed(self, chain: Chain, start: int) -> None:
        """Notes that a prompt will be forwarded from here: a head that was given up might have served it."""
        with self._lock:
            self._values.missed(chain.lines()[start // self._grid + 1 :], self.now())

    def worth(self, one: FiledAnchor | FiledSession) -> tuple[int, int]:
        """What is lost and won where it goes: tokens past the longest anchor of its chain that stays, and bytes that nothing else stands on."""
        with self._lock:
            anchors = [one] if isinstance(one, FiledAnchor) else self.own(one)
            if not anchors:  # a session of heads, and of others' states
                return 0, 0
            last, own = anchors[-1], {a.key for a in anchors}
            lines = (self._by_line.get(page.removeprefix(PAGE), set()) - own for page in reversed(last.pages[: last.length // self._grid]))
            stays = (max((n for key in keys if (n := self.anchors[key].length) <= last.length), default=0) for keys in lines)
            below = next(filter(None, stays), 0)
            pages = [self._pages[key] for key in dict.fromkeys(key for a in anchors for key in a.pages)]
            holds = sum(a.nbytes for a in anchors) + sum(page.nbytes for page in pages if page.over <= own)
        return last.length - below, holds

    def candidates(self, use: str | None = None, held: Collection[str] = ()) -> list[FiledAnchor | FiledSession]:
        """What can go by itself of a use, None for both: whole sessions, and anchors that are no session's. held: keys that stay."""
        sessions = [s for s in self.sessions.values() if use != DISK and not any(key in held for key in s.anchors)]
        stay = set(held).union(*(s.anchors for s in sessions))
        return [*sessions, *(a for a in self.anchors.values() if use in (None, a.use) and a.key not in stay)]

    def evict(self, use: str | None, limit: int, enough: Callable[[], bool] = lambda: True) -> bool:
        """Drops what is worth least until a use, None for both, holds at most so many bytes and it is `enough`; whether that came true.

        What is held stays; where that alone is too much, nothing goes.
        """
        if self.held_bytes(use) > limit:
            return False
        while self.bytes(use) > limit or not enough():
            with self._left:
                doomed = self._least(use, set(self._in_use))
                if not doomed:
                    if not self._leaving:
                        return False
                    self._left.wait()  # what another thread has taken out is about to free its room
            self._remove(doomed, "budget")
        return True

    def held_bytes(self, use: str | None = None) -> int:
        """Of what is held and of the pages below it, of a use or of both."""
        with self._lock:
            keys = set(self._in_use).union(*(self.anchors[key].pages for key in self._in_use if key in self.anchors))
            there = [one for key in keys if (one := self._pages.get(key) or self.anchors.get(key))]
        return sum(one.nbytes for one in there if use in (None, one.use))

    def _least(self, use: str | None, held: set[str]) -> list[str]:
        """Takes what is worth least out of the index: its keys."""
        now = self.now()
        one = min(self.candidates(use, held), key=lambda one: self.value(one, now), default=None)
        if one is None:
            return []
        if isinstance(one, FiledAnchor):
            self._values.given_up(one, one.line)
            return self._forget(one)
        self._values.given_up(one, self._anchors_of(one)[-1].line)
        return self._forget_session(one)

    def _anchors_of(self, session: FiledSession) -> list[FiledAnchor]:
        """Those that are there, ascending; at least one."""
        return sorted((self.anchors[key] for key in session.anchors if key in self.anchors), key=lambda a: a.length)

    def drop_unused(self, days: float, now: float | None = None) -> None:
        """Drops what was not used for so many days. now: Unix seconds, the clock's where not given."""
        oldest, doomed = (self.now() if now is None else now) - days * DAY, []
        with self._lock:
            for session in [s for s in self.sessions.values() if s.used < oldest]:
                doomed += self._forget_session(session)
            for filed in [a for a in self.anchors.values() if a.used < oldest and a.key not in self._of_sessions]:
                doomed += self._forget(filed)
        self._remove(doomed, "age")

    def drop(self, filed: FiledAnchor, reason: str) -> None:
        """Removes an anchor, and the pages that no other stands on."""
        with self._lock:
            self._coming.pop(filed.key, None)
            doomed = self._forget(filed)
        self._remove(doomed, reason)

    def drop_session(self, session: FiledSession, reason: str) -> None:
        """Removes a session, and the anchors that are its own."""
        with self._lock:
            doomed = self._forget_session(session) if session.key in self.sessions else []
        self._remove(doomed, reason)

    def drop_over(self, page: str, reason: str) -> None:
        """Removes every anchor over a page, and so every longer page of its chain."""
        with self._lock:
            self._coming = {key: filed for key, filed in self._coming.items() if page not in filed.pages}
            over = sorted(self._pages[page].over) if page in self._pages else []
            doomed = [key for anchor in over for key in self._forget(self.anchors[anchor])]
            if page in self._pages:  # it was held
                self._forget_page(page)
                doomed.append(page)
        self._remove(doomed, reason)

    def supersede(self, key: str, keys: np.ndarray, used: float) -> None:
        """Takes the session of these key ids for the last of those that it goes on with, which are removed. used: Unix seconds of its last use."""
        self._storage.touch(key, used)
        with self._lock:
            if (new := self.sessions.get(key)) is None:
                return
            new.used = used
            olds = [s for s in self.sessions.values() if s is not new and s.tenant == new.tenant and s.is_begun_by(keys, new.pages, self._grid)]
            had = {self.anchors[one] for old in olds for one in old.anchors if one in self.anchors}
            doomed = [key for old in olds for key in self._forget_session(old)]
            self._values.waits(new)
            last = self._anchors_of(new)[-1]
            last.hits += sum(one.hits for one in had if one.key not in self.anchors)  # it is the same conversation
        self._remove(doomed, "superseded")

    def discard(self, key: str) -> None:
        """Drops what is damaged, with all that stands on it; and so whatever else the storage has found damaged meanwhile: pages are read two
        at a time, and of those the first alone is told. What stood in the index would count as written.
        """
        for lost in [key, *(one for one in self._storage.damaged if self.has(one) and self._storage.find(one) is None)]:
            with self._lock:
                filed, session = self.anchors.get(lost), self.sessions.get(lost)
            if filed is not None:
                self.drop(filed, "damaged")
            elif session is not None:
                self.drop_session(session, "damaged")
            else:
                self.drop_over(lost, "damaged")

    def drop_all(self) -> None:
        """Removes all anchors and sessions."""
        with self._lock:
            doomed = [key for session in list(self.sessions.values()) for key in self._forget_session(session)]
            for filed in list(self.anchors.values()):
                doomed += self._forget(filed)
        self._remove(doomed, "cleared")
