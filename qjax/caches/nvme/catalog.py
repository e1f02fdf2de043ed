"""The catalog: which anchors and sessions lie in the storage, and over which pages.

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

from qjax.caches.nvme.chain import Chain, at_end
from qjax.caches.nvme.filed import ANCHOR, DISK, PAGE, SESSION, SPILL, FiledAnchor, FiledSession
from qjax.caches.reach import Reach, reach
from storage import Entry, Storage

log = logging.getLogger(__name__)


class Incomplete(ValueError):
    """What an entry stands on is not there. missing: keys."""

    def __init__(self, reason: str, missing: Iterable[str]):
        super().__init__(reason)
        self.missing = set(missing)


@dataclass(eq=False)
class Page:
    """over: keys of the anchors that stand on it. use: the disk's where one of them is, and that for which it was written where none is."""

    nbytes: int
    use: str
    over: set[str] = field(default_factory=set)


class Catalog:
    """Any thread may call any method. What is dropped leaves the index first and the storage then: a prompt never waits for files to go."""

    def __init__(self, storage: Storage, grid: int):
        self._storage, self._grid = storage, grid
        self._lock = threading.RLock()
        self._left = threading.Condition(self._lock)  # something has gone from the storage
        self.anchors: dict[str, FiledAnchor] = {}
        self.sessions: dict[str, FiledSession] = {}
        self._of_sessions: Counter[str] = Counter()  # keys of anchors: how many sessions have each
        self._pages: dict[str, Page] = {}
        self._bytes: Counter[str] = Counter()  # by use: asked for before every write
        self._by_line: dict[str, set[str]] = {}
        self._coming: dict[str, FiledAnchor] = {}  # on their way to the storage: what they are is still in memory
        self._in_use: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._leaving: dict[str, int] = {}  # bytes by key, from the moment that the index has it no more until the storage has not
        self.unusable: dict[str, ValueError] = {}  # anchors and sessions that were found and cannot be used, by key: why
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
            self.unusable[entry.key] = error
            log.log(logging.INFO if isinstance(error, Incomplete) else logging.WARNING, "%s is not used: %s", entry.key, error)

    def _remove(self, keys: Iterable[str], reason: str) -> None:
        """Takes files away that the index no longer has; not what has come back, or is about to: it would be lost after it was written."""
        keys = list(dict.fromkeys(keys))
        try:
            for key in keys:
                self.dropped[reason] += 1
                if not self._storage.read_only:
                    self._storage.drop(key, lambda key=key: reason != "damaged" and self._is_wanted(key))
                self._has_left([key])
        finally:
            self._has_left(keys)

    def _has_left(self, keys: Iterable[str]) -> None:
        with self._left:
            for key in keys:
                self._leaving.pop(key, None)
            self._left.notify_all()

    @property
    def leaving(self) -> int:
        """Bytes that the index has no more and the storage has still."""
        with self._lock:
            return sum(self._leaving.values())

    def found_unusable(self) -> str:
        """What was found at the start and is of no use, in words; empty where nothing was, or only what has a line of its own, being damaged.

        Not pages with no anchor over them: a process that ends while it writes has written those first.
        """
        lacking = sum(isinstance(error, Incomplete) for error in self.unusable.values())
        counts = {
            "unfinished": len(self._storage.unfinished),
            "damaged": len(self._storage.damaged) + len(self.unusable) - lacking,
            "that lack what they stand on": lacking,
        }
        return ", ".join(f"{n:,} {what}" for what, n in counts.items() if n) if lacking or self._storage.unfinished else ""

    def lost(self, lines: list[str]) -> bool:
        """Whether something at one of some lines was found damaged, or lacks what it stood on, and was not written anew."""
        gone = {*self._storage.damaged, *self.unusable}.union(*(e.missing for e in self.unusable.values() if isinstance(e, Incomplete)))
        return any(key in gone and not self.has(key) for line in lines for key in (PAGE + line, ANCHOR + line)) if gone else False

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
            raise Incomplete(f"{len(missing)} of the {len(pages)} pages below it are not there", missing)
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
        self._leaving[key] = page.nbytes

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
                raise Incomplete("none of its anchors is there", session.anchors)
            self._forget_record(session.key)
            self.sessions[session.key] = session
            self._of_sessions.update(session.anchors)

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

    def bytes(self, use: str | None = None) -> int:
        """Of a use's anchors and of the pages below them, or of all; a page below anchors of both uses is the disk's."""
        with self._lock:
            return self._bytes.total() if use is None else self._bytes[use]

    def _forget(self, filed: FiledAnchor) -> list[str]:
        """Takes an anchor out: the keys of what goes with it."""
        self._coming.pop(filed.key, None)
        if self.anchors.pop(filed.key, None) is None:
            return []
        self._by_line[filed.line].discard(filed.key)
        if not self._by_line[filed.line]:
            del self._by_line[filed.line]
        self._bytes[filed.use] -= filed.nbytes
        self._leaving[filed.key] = filed.nbytes
        for page in filed.pages:
            self._pages[page].over.discard(filed.key)
            self._belongs(self._pages[page])
        alone = [page for page in reversed(filed.pages) if not self._pages[page].over and page not in self._in_use]
        for page in alone:
            self._forget_page(page)
        bare = [s.key for s in self.sessions.values() if filed.key in s.anchors and self.anchors.keys().isdisjoint(s.anchors)]
        for key in bare:  # all its states were heads of the disk's
            self._forget_record(key)
        return [filed.key, *alone, *bare]

    def _forget_session(self, session: FiledSession) -> list[str]:
        """Takes a session out, with the anchors that are its own: the keys of what goes."""
        own = [filed for filed in self.own(session) if filed.key not in self._in_use]  # another one is about to be written over those
        self._forget_record(session.key)
        return [session.key, *(key for filed in own for key in self._forget(filed))]

    def _forget_record(self, key: str) -> None:
        session = self.sessions.pop(key, None)
        for anchor in session.anchors if session else ():
            self._of_sessions[anchor] -= 1
            if not self._of_sessions[anchor]:
                del self._of_sessions[anchor]

    def own(self, session: FiledSession) -> list[FiledAnchor]:
        """The anchors that go with a session, ascending: no head, and none that another session has."""
        with self._lock:
            own = [self.anchors[key] for key in session.anchors if key in self.anchors and self._of_sessions[key] == 1]
        return sorted((filed for filed in own if filed.use == SPILL), key=lambda filed: filed.length)

    def stats(self) -> dict[str, int]:
        with self._lock:
            counts = {"anchors": len(self.anchors), "pages": len(self._pages), "sessions": len(self.sessions)}
            return (
                counts | {f"{use}_bytes": self.bytes(use) for use in (DISK, SPILL)} | {f"dropped_{why}": n for why, n in sorted(self.dropped.items())}
            )
