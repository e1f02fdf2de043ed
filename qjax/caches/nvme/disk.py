"""The tiers on NVMe, as one: what it finds, what it takes, what it has written, what goes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from qjax.caches.anchors import Anchor
from qjax.caches.nvme.admission import Admission
from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import ANCHOR, DISK, SPILL, FiledAnchor
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.rates import Rates
from qjax.caches.nvme.restore import Damaged, Reader, restore
from qjax.caches.nvme.spill import read_back, spill
from qjax.caches.nvme.staging import Staging
from qjax.caches.nvme.writer import Writer
from qjax.caches.session import Session
from qjax.caches.tier import Gone, Hit, Restored, Unusable
from qjax.config import TOKEN, DiskConfig
from qjax.interrupts import deferred
from qjax.pages import PagePool, PoolFull
from storage import Storage, StorageError

log = logging.getLogger(__name__)

SWEEP = 3600.0
"""Seconds from one look for what was not used for days to the next."""
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


@dataclass
class Waiting:
    """An anchor whose pages are staged one by one; until then they are held in the pool. pages: keys of those that are."""

    chain: Chain
    anchor: Anchor
    pages: list[str] = field(default_factory=list)


class Nvme:
    """A tier. One thread owns it, as the pool; the writer's threads never touch the pool."""

    name = "nvme"

    def __init__(self, pool: PagePool, storage: Storage, config: DiskConfig, level: str = TOKEN, *, index=Index, writer=Writer, reader=Reader):
        """Takes the storage over, and closes it. index, writer, reader: the classes, for whoever counts instead of writing."""
        self._pool, self.storage, self._config, self._level = pool, storage, config, level
        pool.compile_copies()
        self._admission = Admission(pool.layout.grid, config.admit_after, config.disk_min_tokens)
        self.index, self.rates, self.counts = index(storage, pool.layout.grid, self._admission.counted), Rates(), Counter()
        self._writer = writer(storage, config.bytes("staging_gb"), self._make_room)
        self._staging = Staging(pool, self.index, self._writer, level)
        self.reader = reader(storage, self._writer, pool.layout)
        self._backlog: deque[Waiting] = deque()
        self._clears = 0
        self._resumes = 0.0  # when something is looked for again
        self.closed = False
        self._writes, self._last = not storage.read_only, Chain(np.zeros(0, np.int64), "", pool.layout.grid)
        for key, hits in self._admission.load(storage).items():
            if filed := self.index.anchors.get(key):
                filed.hits = hits
        self._swept = time.monotonic()
        self._epoch = self.index.now() - self._swept  # a clock that is set forward while it runs makes nothing old
        if self._writes and not storage.shared:
            self.index.drop_unused(config.disk_days)
            self._trim()

    @property
    def spills(self) -> bool:
        """Whether whole sessions are written: not to a bucket, which engines share."""
        return self._config.session_spill and self._writes and not self.storage.shared

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

    def pays(self, hit: Hit, tokens: int) -> bool:
        """Whether a hit's read costs less than the prefill of the tokens that it saves, as far as both are known."""
        pages = -(-hit.start // self._pool.layout.grid)
        return self.rates.pays(hit.entry[0].nbytes + pages * self._pool.layout.page_bytes, tokens)

    def held(self, hit: Hit) -> contextlib.AbstractContextManager:
        """Inside, what a hit stands on is not evicted."""
        return self.index.holding(hit.entry[0])

    def take(self, hit: Hit) -> Restored:
        filed, chain = hit.entry
        begin = time.perf_counter()
        try:
            if not filed.summed and not chain.has(filed.pages[: hit.start // chain.grid]):
                raise Damaged(filed.key, "has the pages of another chain")
            with self.held(hit):
                restored, _ = restore(self._pool, self.reader, filed, chain.keys, hit.start, hit.whole)
        except Damaged as damaged:
            if filed.key not in self.index.anchors:  # since it was found it was evicted, or a page below it found no room in the files
                self.index.drop(filed, "budget")
                raise Gone(f"{filed.key} was given up meanwhile") from damaged
            if not damaged.told:
                log.warning("entry %s, and is removed", damaged)
            self._discard(filed, damaged.key)
            raise
        except PoolFull as full:
            raise Unusable(str(full)) from full
        except Unusable as unusable:
            log.warning("%s; nothing is looked for here for %g s", unusable, PAUSE)
            self._resumes = time.monotonic() + PAUSE
            raise
        self.index.served(filed)
        self.counts.update({f"{filed.use}_hits": 1, "read_tokens": hit.start})
        pages = restored.sequence.pages.size
        self.rates.read.add(filed.nbytes + pages * self._pool.layout.page_bytes, time.perf_counter() - begin)
        return restored

    def _discard(self, filed: FiledAnchor, key: str) -> None:
        """Drops what stands on an entry that is not what it was."""
        self.counts["damaged"] += 1
        if key == filed.key:
            self.index.drop(filed, "damaged")
        else:
            self.index.drop_over(key, "damaged")

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
        return Intake(chain, lines, self._clears)

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
        for anchor in anchors if intake.clears == self._clears else ():  # what was taken before a clear does not come back
            self._pool.hold(anchor.sequence.pages)
            self._backlog.append(Waiting(intake.chain, anchor))

    @deferred()
    def pump(self) -> None:
        """Stages what there is room for. Costs a copy of a page for each, and waits for nothing."""
        while self._backlog:
            one = self._backlog[0]
            sequence, length = one.anchor.sequence, one.anchor.length
            for number in range(len(one.pages), sequence.pages.size):
                key = self._staging.page(one.chain, sequence.tokens, length, number, int(sequence.pages[number]), DISK)
                if key is None:
                    return
                one.pages.append(key)
            key = self._staging.anchor(one.chain, one.anchor, one.pages, DISK)
            if key is None:
                return
            self._staging.let_go([key, *one.pages])
            self._pool.release(sequence.pages)
            self._backlog.popleft()

    @deferred()
    def give_up(self) -> bool:
        """Gives up what waits to be staged, because the pool needs its pages; whether there was anything."""
        self.pump()
        there = bool(self._backlog)
        for one in self._backlog:
            self._staging.let_go(one.pages)
            self._pool.release(one.anchor.sequence.pages)
        self.counts["dropped_no_room"] += len(self._backlog)
        self._backlog.clear()
        return there

    def forwarded(self, tokens: int, seconds: float) -> None:
        """Told how long a prefill took, and when a request has ended; no time is that of one that did not end."""
        if tokens >= self._pool.layout.grid and seconds > 0:
            self.rates.prefill.add(tokens, seconds)

    def keep_book(self) -> None:
        """Writes the counts of lines and the hits of anchors, where they have changed, beside what the writer does."""
        if self._writes and not self.storage.shared:
            self._admission.save(self.storage, self._writer, {key: filed.hits for key, filed in self.index.anchors.items() if filed.hits})

    def spill(self, session: Session, seconds: float) -> bool:
        """Has a session written; whether all of it was staged. seconds: to wait for room."""
        if not self.spills or not session.anchors:
            return False
        written = spill(self._staging, self._pool.layout.grid, session, seconds)
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

    def _make_room(self, nbytes: int, use: str) -> bool:
        """Makes room for an entry within its use's budget and beside the free space that is left to others. For a writing thread."""
        if self.storage.shared:
            return True
        if (passed := time.monotonic()) > self._swept + SWEEP:
            self._swept = passed
            self.index.drop_unused(self._config.disk_days, self._epoch + passed)
        budget = self._config.bytes("spill_gb" if use == SPILL else "disk_gb")
        if nbytes > budget or not self._leaves_free(nbytes - self.index.bytes(use)):
            return False  # and nothing goes for it in vain
        room = self.index.evict(use, budget - nbytes, lambda: self._leaves_free(nbytes))
        if use == DISK:  # pages below anchors of both may be the spill's now
            self.index.evict(SPILL, self._config.bytes("spill_gb"))
        return room

    def _leaves_free(self, nbytes: int) -> bool:
        free = self.storage.free()
        return free is None or free - nbytes >= self._config.bytes("disk_free_gb")

    def _trim(self) -> None:
        """Brings what an earlier engine left within this one's budgets."""
        for use, name in ((DISK, "disk_gb"), (SPILL, "spill_gb")):
            self.index.evict(use, self._config.bytes(name))
        if not self._leaves_free(0):
            free, left = self.storage.free() / 2**30, self._config.disk_free_gb
            log.warning("nothing more is written: %.1f GiB are free, and %g are left to others (--disk-free-gb)", free, left)

    def stats(self) -> dict:
        """Counters, bytes, rates; and what the storage says of itself."""
        counts = {name: self.counts[name] for name in ("disk_hits", "spill_hits", "read_tokens", "damaged", "dropped_no_room", "spilled")}
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

    def abandon(self) -> None:
        """Closes the storage without what waits; what is being written is written."""
        self._writer.abandon()
        self._close()

    def _close(self) -> None:
        self.closed = True
        with contextlib.suppress(StorageError):
            self.storage.close()
