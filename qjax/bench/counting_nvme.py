"""The tier on NVMe over a modelled drive, and what it is compared with: the same code, told by the drive's clock what time it is."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from qjax.bench.counting import Counted, CountingPool
from qjax.bench.drive import READ, CountingStorage
from qjax.caches.nvme.disk import WAIT, Intake, Nvme
from qjax.caches.nvme.filed import LOGITS, FiledAnchor, FiledSession
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.rates import Rate
from qjax.caches.nvme.restore import Reader
from qjax.caches.nvme.writer import Writer
from qjax.caches.session import Session
from qjax.caches.tier import Hit, Restored
from qjax.config import MOST_GB, DiskConfig


class CountingIndex(Index):
    def now(self) -> float:
        return self._storage.drive.now


class CountingWriter(Writer):
    """Entries are written by the drive, one after another, as its time passes."""

    def __init__(self, storage: CountingStorage, *args):
        super().__init__(storage, *args)
        self._drive, self._threads = storage.drive, self

    def submit(self, write, key, arrays, fields, use, before, after, nbytes, done) -> Future:
        """In the place of threads."""
        future = Future()

        def told() -> None:
            write(key, arrays, fields, use, before, after, nbytes, done)
            future.set_result(None)

        self._drive.write(nbytes, told)
        return future

    def has_room(self, nbytes: int, seconds: float = 0.0) -> bool:
        end = self._drive.now + seconds
        while not (room := super().has_room(nbytes)) and self._drive.next <= end:
            self._drive.step()
        if not room:
            self._drive.until(end)
        return room

    def drain(self) -> None:
        while self._drive.writes:
            self._drive.step()

    close = drain


class CountingReader(Reader):
    def anchor(self, filed: FiledAnchor, logits: bool) -> Mapping[str, np.ndarray | Counted]:
        arrays = super().anchor(filed, logits)
        return {name: array if name == LOGITS else Counted(array.shape, array.dtype) for name, array in arrays.items()}


class CountingNvme(Nvme):
    """A start of the tier: one over the same storage finds there what the one before it left."""

    index_class = CountingIndex

    def __init__(self, pool: CountingPool, storage: CountingStorage, config: DiskConfig):
        super().__init__(pool, storage, config, index=self.index_class, writer=CountingWriter, reader=CountingReader)

    def take(self, hit: Hit) -> Restored:
        return self._timed(lambda: super(CountingNvme, self).take(hit))

    def read_back(self) -> Session | None:
        return self._timed(super().read_back)

    def _timed(self, read):
        """Lets the time pass that a read takes."""
        before = self.storage.read_bytes
        try:
            return read()
        finally:
            self.storage.drive.advance((self.storage.read_bytes - before) / READ)
            self.rates.read = Rate()
            self.rates.read.add(int(READ), 1.0)  # the drive's, not what was measured of counting

    def keep_book(self) -> None:
        """At the end only, see `close`: an engine writes it beside every answer, 3 MB at the most, in the time of a thousand lookups."""

    def close(self) -> None:
        super().keep_book()
        super().close()

    def ended(self, session: Session) -> None:
        """Told of what a request left."""


class LruIndex(CountingIndex):
    """Disk and spill are one, and what was used least recently goes first."""

    def bytes(self, use: str) -> int:
        with self._lock:
            return self._bytes.total()

    def _least(self, use: str, held: set[str]) -> list[str]:
        sessions = [s for s in self.sessions.values() if held.isdisjoint(s.anchors)]
        of_sessions = {key for s in self.sessions.values() for key in s.anchors}
        anchors = [a for a in self.anchors.values() if a.key not in of_sessions and a.key not in held]
        oldest = min((*sessions, *anchors), key=lambda one: one.used, default=None)
        if oldest is None:
            return []
        return self._forget_session(oldest) if isinstance(oldest, FiledSession) else self._forget(oldest)


class LruNvme(CountingNvme):
    """Writes what the tier writes, and gives up what was used least recently: anchors and sessions, in the bytes of both budgets."""

    index_class = LruIndex

    def __init__(self, pool: CountingPool, storage: CountingStorage, config: DiskConfig):
        both = config.disk_gb + (config.spill_gb if config.session_spill else 0)
        super().__init__(pool, storage, replace(config, disk_gb=both, spill_gb=both))


class LruOfAll(LruNvme):
    """Writes every grid line and the end of every request, whatever it costs to stage them."""

    def __init__(self, pool: CountingPool, storage: CountingStorage, config: DiskConfig):
        super().__init__(pool, storage, replace(config, staging_gb=float(MOST_GB)))

    def begin(self, keys: np.ndarray, tenant: str, start: int, **more) -> Intake | None:
        intake, grid = super().begin(keys, tenant, start, **more), self._pool.layout.grid
        return intake and replace(intake, lines=set(range(start // grid * grid + grid, keys.size + 1, grid)))

    def ended(self, session: Session) -> None:
        self.spill(session, WAIT)
