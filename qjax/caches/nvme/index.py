"""The index: which anchors and sessions lie in the storage, over which pages, and which of them go first.

An anchor can be used when every page below it is there. A page with no anchor over it is of no use, and goes with the last one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from qjax.caches.nvme.chain import Chain, at_end
from qjax.caches.nvme.filed import ANCHOR, DISK, PAGE, SESSION, SPILL, FiledAnchor, FiledSession
from qjax.caches.nvme.values import Values
from qjax.caches.reach import Reach, reach
from storage import Entry, Storage

log = logging.getLogger(__name__)

DAY = 86_400


class Incomplete(ValueError):
    """What an entry stands on is not there."""


@dataclass(eq=False)
class Page:
    """over: keys of the anchors that stand on it. use: the disk's where one of them is, and that for which it was written where none is."""

    nbytes: int
    use: str
    over: set[str] = field(default_factory=set)


class Index:
    """Any thread may call any method. What is dropped leaves the index first and the storage then: a prompt never waits for files to go."""

    def __init__(self, storage: Storage, grid: int, counted: Callable[[str], int] = lambda line: 0):
        """counted: as of Values."""
        self._storage, self._grid = storage, grid
        self._lock = threading.RLock()
        self.anchors: dict[str, FiledAnchor] = {}
        self.sessions: dict[str, FiledSession] = {}
        self._pages: dict[str, Page] = {}
        self._bytes: Counter[str] = Counter()  # by use: asked for before every write
        self._by_line: dict[str, set[str]] = {}
        self._coming: dict[str, FiledAnchor] = {}  # on their way to the storage: what they are is still in memory
        self._in_use: Counter[str] = Counter()
        self._values = Values(grid, counted)
        self.dropped: Counter[str] = Counter()
        for add, prefix in ((self.add_anchor, ANCHOR), (self.add_session, SESSION)):
            for key, entry in storage.entries().items():
                if key.startswith(prefix):
                    self._take_in(add, entry)
        if not storage.read_only and not storage.shared:  # in a bucket another engine may be about to write what they belong to
            self._remove([key for key in storage.entries() if key.startswith((PAGE, ANCHOR, SESSION)) and not self.has(key)], "incomplete")

    def _take_in(self, add: Callable[[Entry], None], entry: Entry) -> None:
        try:
            add(entry)
        except ValueError as error:  # of what is not there something was said when it went
            log.log(logging.INFO if isinstance(error, Incomplete) else logging.WARNING, "%s is not used: %s", entry.key, error)

    def _remove(self, keys: Iterable[str], reason: str) -> None:
        """Takes files away that the index no longer has; not what has come back, or is about to: it would be lost after it was written."""
        for key in keys:
            self.dropped[reason] += 1
            if not self._storage.read_only:
                self._storage.drop(key, lambda key=key: reason != "damaged" and self._is_wanted(key))

    def _is_wanted(self, key: str) -> bool:
        """Without the lock, which the storage's must not wait for."""
        return key in self._in_use or key in self._pages or key in self.anchors or key in self.sessions

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def add_anchor(self, entry: Entry) -> None:
        """ValueError for one that lacks a page, or is not what this version writes."""
        filed = FiledAnchor.of(entry, self._grid)
        whole = filed.pages[: filed.length // self._grid]
        filed.summed = filed.key != ANCHOR + at_end(filed.line, filed.tail)
        if not filed.summed and whole and whole[-1] != PAGE + filed.line:
            raise ValueError(f"its page {whole[-1]} is not that of its line {filed.line}")
        pages = {key: self._storage.find(key) for key in filed.pages}
        if missing := [key for key, page in pages.items() if page is None]:
            raise Incomplete(f"{len(missing)} of the {len(pages)} pages below it are not there")
        with self._lock:
            if filed.key not in self.anchors:
                self._bytes[filed.use] += filed.nbytes
            self.anchors[filed.key] = filed
            self._by_line.setdefault(filed.line, set()).add(filed.key)
            for key, page in pages.items():
                of = self._page(key, page.nbytes, filed.use)
                of.over.add(filed.key)
                self._belongs(of)

    def expect(self, filed: FiledAnchor) -> None:
        """Takes an anchor that is about to be written, with the pages below it: prompts find it from now on."""
        with self._lock:
            self._coming[filed.key] = filed

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

    def _page(self, key: str, nbytes: int, use: str) -> Page:
        if key not in self._pages:
            self._pages[key] = Page(nbytes, use)
            self._bytes[use] += nbytes
        return self._pages[key]

    def _belongs(self, page: Page) -> None:
        """Counts a page for the use that it has now."""
        self._bytes[page.use] -= page.nbytes
        if page.over:
            page.use = DISK if any(self.anchors[key].use == DISK for key in page.over) else SPILL
        self._bytes[page.use] += page.nbytes

    def _forget_page(self, key: str) -> None:
        page = self._pages.pop(key)
        self._bytes[page.use] -= page.nbytes

    def add_page(self, entry: Entry, use: str) -> None:
        """Takes a page on which an anchor is about to stand; it goes where nobody holds it any more."""
        with self._lock:
            if wanted := entry.key in self._in_use:
                self._page(entry.key, entry.nbytes, use)
        if not wanted:
            self._remove([entry.key], "unused")

    def add_session(self, entry: Entry) -> None:
        """ValueError for one that has lost all its anchors, or is not what this version writes."""
        session = FiledSession.of(entry, self._grid)
        with self._lock:
            if not any(key in self.anchors for key in session.anchors):
                raise Incomplete("none of its anchors is there")
            self.sessions[session.key] = session

    def has(self, key: str) -> bool:
        with self._lock:
            return key in self._pages or key in self.anchors or key in self.sessions

    def find(self, chain: Chain, level: str) -> tuple[FiledAnchor, Reach] | None:
        """The anchor on which a prompt starts best. chain: the prompt's."""
        with self._lock:
            lines = chain.lines() if self._by_line or self._coming else []
            for number in range(len(lines) - 1, -1, -1):
                best = None
                there = [self.anchors[key] for key in self._by_line.get(lines[number], ())]
                for filed in there + [a for a in self._coming.values() if a.line == lines[number]]:
                    how = {"logits": filed.logits, "tainted": filed.tainted, "level": level, "grid": self._grid}
                    found = reach(filed.length, chain.agrees(number, filed.tail), chain.keys.size, **how)
                    if found is not None and found.start and (best is None or found > best[1]):
                        best = filed, found
                if best is not None:
                    return best
        return None

    @contextlib.contextmanager
    def holding(self, filed: FiledAnchor) -> Iterator[None]:
        """Inside, an anchor and what it stands on is not evicted."""
        self.hold(keys := (filed.key, *filed.pages))
        try:
            yield
        finally:
            self.let_go(keys)

    def hold(self, keys: Iterable[str]) -> None:
        """What has these keys, or stands on them, is not evicted until `let_go`."""
        with self._lock:
            self._in_use.update(keys)

    def let_go(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._in_use -= Counter(keys)
            alone = [key for key in dict.fromkeys(keys) if key in self._pages and not self._pages[key].over and key not in self._in_use]
            for key in alone:
                self._forget_page(key)
        self._remove(alone, "unused")

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

    def bytes(self, use: str) -> int:
        """Of a use's anchors and of the pages below them; a page below anchors of both uses is the disk's."""
        with self._lock:
            return self._bytes[use]

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

    def evict(self, use: str, limit: int, enough: Callable[[], bool] = lambda: True) -> bool:
        """Drops what is worth least until a use holds at most so many bytes and it is `enough`; whether that came true.

        Of the spill whole sessions, by their last use. What is held stays; where that alone is too much, nothing goes.
        """
        with self._lock:
            there = [one for key in self._in_use if (one := self._pages.get(key) or self.anchors.get(key))]
        if sum(one.nbytes for one in there if one.use == use) > limit:
            return False
        while self.bytes(use) > limit or not enough():
            with self._lock:
                doomed = self._least(use, set(self._in_use))
            if not doomed:
                return False
            self._remove(doomed, "budget")
        return True

    def _least(self, use: str, held: set[str]) -> list[str]:
        """Takes what is worth least out of the index: its keys."""
        sessions = [s for s in self.sessions.values() if held.isdisjoint(s.anchors)] if use == SPILL else []
        if sessions:
            return self._forget_session(min(sessions, key=lambda s: s.used))
        anchors = [a for a in self.anchors.values() if a.use == use and a.key not in held]
        if not anchors:
            return []
        now = self.now()
        least = min(anchors, key=lambda a: self.value(a, now))
        if use == DISK:
            self._values.given_up(least)
        return self._forget(least)

    def drop_unused(self, days: float) -> None:
        """Drops what was not used for so many days."""
        oldest, doomed = self.now() - days * DAY, []
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
            doomed = [key for old in olds for key in self._forget_session(old)]
        self._remove(doomed, "superseded")

    def drop_all(self, use: str | None = None) -> None:
        """Removes a use's anchors and sessions, or all."""
        with self._lock:
            sessions = list(self.sessions.values()) if use != DISK else []
            doomed = [key for session in sessions for key in self._forget_session(session)]
            for filed in [a for a in self.anchors.values() if use in (None, a.use)]:
                doomed += self._forget(filed)
        self._remove(doomed, "cleared")

    def _forget(self, filed: FiledAnchor) -> list[str]:
        """Takes an anchor out: the keys of what goes with it."""
        self._coming.pop(filed.key, None)
        if self.anchors.pop(filed.key, None) is None:
            return []
        self._by_line[filed.line].discard(filed.key)
        if not self._by_line[filed.line]:
            del self._by_line[filed.line]
        self._bytes[filed.use] -= filed.nbytes
        for page in filed.pages:
            self._pages[page].over.discard(filed.key)
            self._belongs(self._pages[page])
        alone = [page for page in reversed(filed.pages) if not self._pages[page].over and page not in self._in_use]
        for page in alone:
            self._forget_page(page)
        bare = [s.key for s in self.sessions.values() if filed.key in s.anchors and self.anchors.keys().isdisjoint(s.anchors)]
        for key in bare:  # all its states were heads of the disk's
            del self.sessions[key]
        return [filed.key, *alone, *bare]

    def _forget_session(self, session: FiledSession) -> list[str]:
        """Takes a session out, with the anchors that are its own: the keys of what goes."""
        del self.sessions[session.key]
        others = {key for s in self.sessions.values() for key in s.anchors}
        others.update(self._in_use)  # another one is about to be written over them
        own = [self.anchors[key] for key in session.anchors if key in self.anchors and key not in others and self.anchors[key].use == SPILL]
        return [session.key, *(key for filed in own for key in self._forget(filed))]

    def stats(self) -> dict[str, int]:
        with self._lock:
            counts = {"anchors": len(self.anchors), "pages": len(self._pages), "sessions": len(self.sessions)}
            return (
                counts | {f"{use}_bytes": self.bytes(use) for use in (DISK, SPILL)} | {f"dropped_{why}": n for why, n in sorted(self.dropped.items())}
            )
