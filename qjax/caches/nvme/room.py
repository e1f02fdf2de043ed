"""Room on NVMe: what the budgets and the free space leave, and what makes way. What has none is said once a start."""

from __future__ import annotations

import logging
import time

from qjax.caches.nvme.filed import SPILL
from qjax.caches.nvme.index import Index
from qjax.config import DiskConfig
from storage import Storage

log = logging.getLogger(__name__)

SWEEP = 3600.0
"""Seconds from one look for what was not used for days to the next."""
FILE = 8192
"""Bytes that a file takes at the most beside its own: the rest of its last block, and a directory."""
SPARE = 16 * FILE
"""Bytes that an entry takes so."""


class Room:
    """Any thread may call any method."""

    def __init__(self, storage: Storage, index: Index, config: DiskConfig):
        """spills: whether whole sessions are written: not to a bucket, which engines share."""
        self._storage, self._index, self._config, self._said = storage, index, config, set()
        self.spills = config.session_spill and config.spill_gb > 0 and not storage.read_only and not storage.shared
        self._swept = time.monotonic()
        self._epoch = index.now() - self._swept  # a clock that is set forward while it runs makes nothing old

    @property
    def budget(self) -> int:
        """Bytes of heads and conversations together: each may take what the other does not need. On agents' traffic in 20 GiB for each that
        reused 93.2 % where apart they reused 91.8 (`qjax bench replay`); where no conversations are written, those there keep their room.
        """
        spill = self._config.bytes("spill_gb")
        return self._config.bytes("disk_gb") + (spill if self.spills else min(spill, self._index.bytes(SPILL)))

    def trim(self) -> None:
        """Brings what an earlier engine left within this one's days and budgets."""
        self._index.drop_unused(self._config.disk_days)
        self._index.evict(None, self.budget)
        if not self._leaves_free(0):
            free, left = self._storage.free() / 2**30, self._config.disk_free_gb
            self._say("free", f"nothing more is written: {free:.1f} GiB are free, and {left:g} are left to others (--disk-free-gb)")

    def fits(self, what: str, nbytes: int, files: int, has: int, written: int) -> bool:
        """Whether so many bytes, in so many files, would have room if all else made way; before any of it is begun.

        has: bytes of what is there of it, or on its way, which would stay. written: of what is being written, which is neither free nor in the index.
        """
        if self._storage.shared:
            return True
        if nbytes + has > self.budget:
            self._say("budget", f"{what} is not written: it takes {_mb(nbytes + has)}, and --disk-gb and --spill-gb allow {_mb(self.budget)} in all")
            return False
        if not self._leaves_free(nbytes + files * FILE + has - self._index.bytes() - self._index.leaving - written):
            self._say_free(what, nbytes + files * FILE, has)
            return False
        return True

    def _say_free(self, what: str, nbytes: int, stays: int) -> None:
        free, left, others = (_mb(n) for n in (self._storage.free(), self._config.bytes("disk_free_gb"), self._index.bytes() - stays))
        needs = f"it needs {_mb(nbytes)} more, {free} are free, {others} could make way, and {left} are left to others (--disk-free-gb)"
        self._say("free", f"{what} is not written: {needs}")

    def half(self, what: str, nbytes: int) -> bool:
        """Whether something leaves room for as much of others: a head that does not puts them out for itself, or has no room at last."""
        if not self._storage.shared and 2 * nbytes > self.budget:
            self._say(
                "budget", f"{what} is not written: it takes {_mb(nbytes)}, over half of what --disk-gb and --spill-gb allow, {_mb(self.budget)}"
            )
            return False
        return True

    def make(self, nbytes: int, rest: int = 0, what: str = "") -> bool:
        """Makes room for an entry within the budget and beside the free space that is left to others. For a writing thread.

        rest: bytes of what is written together with it, and of no use without: where that has no room, nothing goes, and it is said of `what`.
        """
        if self._storage.shared:
            return True
        if (passed := time.monotonic()) > self._swept + SWEEP:
            self._swept = passed
            self._index.drop_unused(self._config.disk_days, self._epoch + passed)
        held, whole = self._index.held_bytes(), max(nbytes, rest)
        if whole > (left := self.budget - held):
            if what:
                self._say(
                    "budget", f"{what} is not written: it takes {_mb(whole)} more, and what is in use leaves {_mb(left)} of --disk-gb and --spill-gb"
                )
            return False
        fits = self._leaves_free(whole + SPARE + held - self._index.bytes() - self._index.leaving)
        made = fits and self._index.evict(None, self.budget - nbytes, lambda: self._leaves_free(nbytes + SPARE))
        if what and not made:
            self._say_free(what, whole + SPARE, held)
        return made

    def _leaves_free(self, nbytes: int) -> bool:
        free = self._storage.free()
        return free is None or free - nbytes >= self._config.bytes("disk_free_gb")

    def _say(self, why: str, text: str) -> None:
        if why not in self._said:
            self._said.add(why)
            log.warning("%s", text)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
