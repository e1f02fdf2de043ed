"""The index: the catalog of what lies in the storage, and which of it goes first."""

from __future__ import annotations

from collections.abc import Callable

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
                    self._values.written(self.anchors[key])
        if entry is not None and filed is None:
            self._remove([key], "damaged")  # it was dropped on its way

    def served(self, filed: FiledAnchor) -> None:
        """Notes that a prompt started on an anchor."""
        now = self.now()
        with self._lock:
            if filed.use == DISK:
                self._values.serves(filed, now)
            filed.hits, filed.used = filed.hits + 1, now
            sessions = [s for s in self.sessions.values() if filed.key in s.anchors]
            for session in sessions:
                session.used = filed.used
        for key in (filed.key, *(s.key for s in sessions)):
            self._storage.touch(key)

    def served_session(self, key: str, start: int) -> None:
        """Notes that a prompt started in memory on a session that was read back, after so many tokens."""
        with self._lock:
            session = self.sessions.get(key)
            anchors = sorted((self.anchors[one] for one in session.anchors if one in self.anchors), key=lambda a: a.length) if session else []
        if anchors:
            self.served(next((a for a in anchors if a.length >= start), anchors[-1]))

    def value(self, filed: FiledAnchor, now: float) -> float:
        """Tokens a second that it will save for each byte that it holds, see Values."""
        saves, holds = self.worth(filed)
        return self.returns(filed, now) * saves / holds

    def returns(self, filed: FiledAnchor, now: float) -> float:
        """Prompts a second that will start on it."""
        with self._lock:
            return self._values.returns(filed, now)

    def missed(self, chain: Chain, start: int) -> None:
        """Notes that a prompt will be forwarded from here: a head that was given up might have served it."""
        with self._lock:
            self._values.missed(chain.lines()[start // self._grid + 1 :], self.now())

    def worth(self, filed: FiledAnchor) -> tuple[int, int]:
        """Tokens that it saves, past the next shorter anchor of its chain; and bytes that it holds, its own and of pages that no other has."""
        with self._lock:
            lines = (page.removeprefix(PAGE) for page in reversed(filed.pages[: filed.length // self._grid]))
            lengths = (max((n for key in self._by_line.get(line, ()) if (n := self.anchors[key].length) < filed.length), default=0) for line in lines)
            below = next(filter(None, lengths), 0)
            own = filed.nbytes + sum(self._pages[page].nbytes for page in filed.pages if len(self._pages[page].over) == 1)
        return filed.length - below, max(1, own)

    def evict(self, use: str | None, limit: int, enough: Callable[[], bool] = lambda: True) -> bool:
        """Drops what is worth least until a use, None for both, holds at most so many bytes and it is `enough`; whether that came true.

        Of the spill whole sessions, by their last use; of both what was not used for longer, the session or the anchor that is worth least.
        What is held stays; where that alone is too much, nothing goes.
        """
        if self.held_bytes(use) > limit:
            return False
        while self.bytes(use) > limit or not enough():
            with self._lock:
                doomed = self._least(use, set(self._in_use))
            if not doomed:
                return False
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
        now, sessions = self.now(), [s for s in self.sessions.values() if use != DISK and held.isdisjoint(s.anchors)]
        stay = held.union(*(s.anchors for s in sessions))
        anchors = [a for a in self.anchors.values() if use in (None, a.use) and a.key not in stay]
        least = [min(anchors, key=lambda a: self.value(a, now))] if anchors else []
        one = min((*sessions, *least), key=lambda one: one.used, default=None)
        if one is None:
            return []
        if isinstance(one, FiledSession):
            return self._forget_session(one)
        if one.use == DISK:
            self._values.given_up(one)
        return self._forget(one)

    def drop_unused(self, days: float, now: float | None = None) -> None:
        """Drops what was not used for so many days. now: Unix seconds, the clock's where not given."""
        oldest, doomed = (self.now() if now is None else now) - days * DAY, []
        with self._lock:
            for session in [s for s in self.sessions.values() if s.used < oldest]:
                doomed += self._forget_session(session)
            stay = {key for s in self.sessions.values() for key in s.anchors}
            for filed in [a for a in self.anchors.values() if a.used < oldest and a.key not in stay]:
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

    def supersede(self, key: str, keys: np.ndarray) -> None:
        """Notes a session as used now, and removes those that it, of these key ids, goes on with."""
        self._storage.touch(key)
        with self._lock:
            if (new := self.sessions.get(key)) is None:
                return
            new.used = self.now()
            olds = [s for s in self.sessions.values() if s is not new and s.tenant == new.tenant and s.is_begun_by(keys, new.pages, self._grid)]
            had = {self.anchors[one] for old in olds for one in old.anchors if one in self.anchors}
            doomed = [key for old in olds for key in self._forget_session(old)]
            last = max((self.anchors[one] for one in new.anchors if one in self.anchors), key=lambda a: a.length)
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
