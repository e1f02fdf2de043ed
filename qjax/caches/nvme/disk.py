"""The tiers on NVMe, as one: what it finds, what it takes, what it has written, what goes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from qjax.caches.anchors import Anchor
from qjax.caches.nvme.admission import Admission
from qjax.caches.nvme.backlog import Backlog
from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import ANCHOR, FiledAnchor
from qjax.caches.nvme.head import NONE, Head, longest
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.rates import Rates
from qjax.caches.nvme.restore import Damaged, Reader, restore
from qjax.caches.nvme.room import Room
from qjax.caches.nvme.spill import read_back, spill
from qjax.caches.nvme.staging import Staging
from qjax.caches.nvme.writer import Writer
from qjax.caches.session import Session
from qjax.caches.tier import Gone, Hit, NoRoom, Restored, Unusable
from qjax.config import TOKEN, DiskConfig
from qjax.interrupts import deferred
from qjax.pages import PagePool, PoolFull
from qjax.state import Sequence
from storage import Storage, StorageError

log = logging.getLogger(__name__)

WAIT = 30.0
"""Seconds that an eviction waits for each page of a session that is written before it goes; the chapter's engine wrote 5 GB in one."""
PAUSE = 30.0
"""Seconds in which nothing is looked for after something could not be reached: a server that is gone costs every request a second or more."""


@dataclass
class Intake:
    """What of one request is to be written: at which lengths, and the anchors that were taken there. clears: of the tier, before it began."""

    chain: Chain
    lines: set[int]
    clears: int
    anchors: list[Anchor] = field(default_factory=list)


class Nvme:
    """A tier. One thread owns it, as the pool; the writer's threads never touch the pool."""

    name = "nvme"

    def __init__(self, pool: PagePool, storage: Storage, config: DiskConfig, level: str = TOKEN, *, index=Index, writer=Writer, reader=Reader):
        """Takes the storage over, and closes it. index, writer, reader: the classes, for whoever counts instead of writing."""
        self._pool, self.storage, self._config, self._level = pool, storage, config, level
        pool.compile_copies()
        self._admission = Admission(pool.layout.grid, config.admit_after, config.disk_min_tokens)
        self.index, self.rates, self.counts = index(storage, pool.layout.grid, self._admission.counted), Rates(), Counter()
        self.room = Room(storage, self.index, config)
        self._writer = writer(storage, config.bytes("staging_gb"), self.room.make)
        self._staging = Staging(pool, self.index, self._writer, level)
        self.reader = reader(storage, self._writer, pool.layout)
        self._backlog = Backlog(pool, self._staging, self.room, self.counts)
        self._clears = 0
        self._resumes = 0.0  # when something is looked for again
        self.closed = False
        self._writes, self._last = not storage.read_only, Chain(np.zeros(0, np.int64), "", pool.layout.grid)
        for key, hits in self._admission.load(storage).items():
            if filed := self.index.anchors.get(key):
                filed.hits = hits
        if self._writes and not storage.shared:
            if found := self.index.found_unusable():
                log.warning("%s: found unusable at the start and removed: %s", config.disk_cache, found)
            self.room.trim()

    @property
    def spills(self) -> bool:
        """Whether whole sessions are written."""
        return self._writes and self.room.spills

    def _chain_of(self, keys: np.ndarray, tenant: str) -> Chain:
        """The chain of a prompt, which is asked for several times in a row."""
        if self._last.keys is not keys or self._last.tenant != tenant:
            self._last = Chain(keys, tenant, self._pool.layout.grid)
        return self._last

    # -- what it finds and takes

    def find(self, keys: np.ndarray, tenant: str) -> Hit | None:
        if time.monotonic() < self._resumes:
            return None
        found = self.index.find(self._chain_of(keys, tenant), self._level)
        if found is None:
            return None
        filed, reach = found
        return Hit(reach.start, filed.use, self, (filed, self._last), reach.whole, reach.exact)

    def head(self, hit: Hit, there: Callable[[str], Iterable[tuple[np.ndarray, Sequence]]]) -> Head:
        """What the pool has of a hit already. there: for a tenant, see `longest`. Where a hit is not exact, its rows have bits of their own."""
        _, chain = hit.entry
        return longest(there(chain.tenant), chain.keys[: hit.start], chain.grid) if hit.exact else NONE

    def needs(self, hit: Hit, head: Head) -> int:
        """Pages that are read of a hit, beside a head."""
        return -(-hit.start // self._pool.layout.grid) - head.pages.size

    def _reads(self, hit: Hit, head: Head) -> int:
        """Bytes of these pages and of the anchor."""
        return hit.entry[0].nbytes + self.needs(hit, head) * self._pool.layout.page_bytes

    def pays(self, hit: Hit, tokens: int, head: Head) -> bool:
        """Whether a hit's read costs less than the prefill of the tokens that it saves, as far as both are known."""
        return self.rates.pays(self._reads(hit, head), tokens)

    def held(self, hit: Hit) -> contextlib.AbstractContextManager:
        """Inside, what a hit stands on is not evicted."""
        return self.index.holding(hit.entry[0])

    def take(self, hit: Hit, head: Head = NONE) -> Restored:
        """head: of the prompt, held by somebody."""
        filed, chain = hit.entry
        begin = time.perf_counter()
        try:
            if not filed.summed and not chain.has(filed.pages[: hit.start // chain.grid]):
                raise Damaged(filed.key, "has the pages of another chain")
            with self.held(hit):
                restored, _ = restore(self._pool, self.reader, filed, chain.keys, hit.start, hit.whole, head)
        except Damaged as damaged:
            if filed.key not in self.index.anchors:  # since it was found it was evicted, or a page below it found no room in the files
                self.index.drop(filed, "budget")
                raise Gone(f"{filed.key} was given up meanwhile") from damaged
            if not damaged.told:
                log.warning("entry %s, and is removed", damaged)
            self._discard(filed, damaged.key)
            raise
        except PoolFull as full:
            raise NoRoom(str(full)) from full
        except Unusable as unusable:
            log.warning("%s; nothing is looked for here for %g s", unusable, PAUSE)
            self._resumes = time.monotonic() + PAUSE
            raise
        self.index.served(filed)
        self.counts.update({f"{filed.use}_hits": 1, "read_tokens": hit.start - head.tokens.size, "shared_tokens": head.tokens.size})
        self.rates.read.add(self._reads(hit, head), time.perf_counter() - begin)
        return restored

    def served(self, key: str, start: int) -> None:
        """Told that a prompt started, after so many tokens, on a session that was read back."""
        self.index.served_session(key, start)

    def lost(self, keys: np.ndarray, tenant: str, start: int) -> bool:
        """Whether the files had more of a prompt than this, and it was damaged or lacked a part."""
        return self.index.lost(self._chain_of(keys, tenant).lines()[start // self._pool.layout.grid + 1 :])

    def _discard(self, filed: FiledAnchor, key: str) -> None:
        """Drops what stands on an entry that is not what it was."""
        self.counts["damaged"] += 1
        self.index.discard(key)

    def failed(self, hit: Hit) -> None:
        """A request that started on a hit broke off with an error: the entry goes, so that the next try is cold."""
        filed = hit.entry[0]
        log.warning("entry %s is removed: a request could not go on from it", filed.key)
        self._discard(filed, filed.key)

    def failed_session(self, key: str) -> None:
        """The same of one on a session that was read back."""
        if session := self.index.sessions.get(key):
            log.warning("entry %s is removed: a request could not go on from it", key)
            self.counts["damaged"] += 1
            self.index.drop_session(session, "damaged")

    # -- what it has written

    def begin(self, keys: np.ndarray, tenant: str, start: int, *, first: bool, user: int | None, branch: int | None) -> Intake | None:
        """Decides what of a request is written, before its prefill. The arguments are those of Admission.lines."""
        if not self._writes or not self._config.bytes("disk_gb"):
            return None
        chain = self._chain_of(keys, tenant)
        self.index.missed(chain, start)
        lines = self._admission.lines(chain, start, first=first, user=user, branch=branch)
        return Intake(chain, {line for line in lines if self._fits(line)}, self._clears)

    def _fits(self, line: int) -> bool:
        layout = self._pool.layout
        return self.room.half(f"a head of {line:,} tokens", line // layout.grid * layout.page_bytes + layout.section_bytes)

    def capture(self, intake: Intake, anchor: Anchor) -> None:
        """Takes an anchor at one of the lines; not one that is there, is tainted, or for which the staging has no room."""
        if anchor.tainted or anchor.length not in intake.lines or self._staging.has(ANCHOR + intake.chain.at(anchor.length)):
            return
        size = self._pool.layout.section_bytes
        if not self._writer.has_room(size * (1 + len(intake.anchors) + len(self._backlog))):
            self.counts["dropped_no_room"] += 1
            return
        intake.anchors.append(anchor)

    @deferred()
    def offer(self, intake: Intake) -> None:
        """Has the anchors of a request written, and the pages below them, which stay held until they were staged."""
        anchors, intake.anchors = intake.anchors, []
        if self._writes and intake.clears == self._clears:  # what was taken before a clear does not come back
            self._backlog.add(intake.chain, anchors)

    def pump(self) -> None:
        """Stages what there is room for. Costs a copy of a page for each, and waits for nothing."""
        self._backlog.pump()

    @property
    def waits(self) -> bool:
        """Whether something waits to be staged."""
        return bool(self._backlog)

    @deferred()
    def give_up(self) -> bool:
        """Gives up what waits to be staged, because the pool needs its pages; whether there was anything."""
        self._backlog.pump()
        return self._backlog.forget()

    def forwarded(self, tokens: int, seconds: float) -> None:
        """Told how long a prefill took, and when a request has ended; no time is that of one that did not end."""
        if tokens >= self._pool.layout.grid and seconds > 0:
            self.rates.prefill.add(tokens, seconds)

    def keep_book(self) -> None:
        """Writes the counts of lines and the hits of anchors, where they have changed, beside what the writer does."""
        if self._writes and not self.storage.shared:
            self._admission.save(self.storage, self._writer, {key: filed.hits for key, filed in self.index.anchors.items() if filed.hits})

    def spill(self, session: Session, seconds: float) -> bool:
        """Has a session written; whether it is there or all of it was staged. seconds: to wait for room."""
        if not self.spills or not session.anchors:
            return False
        if session.filed in self.index.sessions:  # read back, and not gone on with
            return True
        written = spill(self._staging, self.room, self._pool.layout.grid, session, seconds)
        self.counts["spilled" if written else "dropped_no_room"] += 1
        return written

    def evicted(self, session: Session) -> None:
        """Told of a session that the pool gives up, while it is whole: a long one is written, for as long as that takes."""
        if session.length >= max(self._config.spill_min_tokens, session.history):
            self.spill(session, WAIT)

    def read_back(self) -> Session | None:
        """The session that was resident at the last planned stop, in the pool."""
        if not self._config.session_spill:
            return None
        return read_back(self._pool, self.reader, self.index, self.counts)

    # -- what goes

    def stats(self) -> dict:
        """Counters, bytes, rates; and what the storage says of itself."""
        counts = {
            name: self.counts[name] for name in ("disk_hits", "spill_hits", "read_tokens", "shared_tokens", "damaged", "dropped_no_room", "spilled")
        }
        stored = {f"storage_{name}": value for name, value in self.storage.stats().items()}
        return counts | self.index.stats() | self._writer.stats() | self.rates.stats() | {"waiting": len(self._backlog)} | stored

    def clear(self) -> None:
        """Empties the tier: files too, where they may be removed."""
        self._clears += 1
        self.give_up()
        self._writer.drain()
        if self._writes:
            self.index.drop_all()

    def drain(self) -> None:
        """Writes what waits."""
        while self._backlog:
            self.pump()
            self._writer.drain()
        self._writer.drain()

    def close(self) -> None:
        """Writes what waits, and closes the storage. A second time is nothing."""
        self.drain()
        self.keep_book()
        self._writer.close()
        self._writes = False
        self._close()

    @deferred()
    def abandon(self) -> None:
        """Closes the storage without what waits, after what is being written."""
        self._writes = False
        self._backlog.forget()
        self._writer.abandon()
        self._close()

    def _close(self) -> None:
        self.closed = True
        with contextlib.suppress(StorageError):
            self.storage.close()
