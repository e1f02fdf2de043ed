"""The tier on NVMe over a modelled drive: the same code, told by the drive's clock what time it is."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np

from qjax.bench.counting import Counted, CountingPool
from qjax.bench.counting_storage import CountingStorage
from qjax.bench.drive import READ
from qjax.caches.nvme.disk import Nvme
from qjax.caches.nvme.filed import LOGITS, FiledAnchor
from qjax.caches.nvme.head import NONE, Head
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.rates import Rate
from qjax.caches.nvme.restore import Reader
from qjax.caches.nvme.writer import Writer
from qjax.caches.session import Session
from qjax.caches.tier import Hit, Restored
from qjax.config import DiskConfig


class CountingIndex(Index):
    def now(self) -> float:
        return self._storage.drive.now


class CountingWriter(Writer):
    """Entries are written by the drive, one after another, as its time passes."""

    def __init__(self, storage: CountingStorage, *args):
        super().__init__(storage, *args)
        self._drive, self._threads = storage.drive, self

    def submit(self, write, key, arrays, fields, before, after, nbytes, *more) -> Future:
        """In the place of threads."""
        future = Future()

        def told() -> None:
            write(key, arrays, fields, before, after, nbytes, *more)
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

    def take(self, hit: Hit, head: Head = NONE) -> Restored:
        return self._timed(lambda: super(CountingNvme, self).take(hit, head))

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
        """At the end only, see `close`: an engine writes it after every answer, 3 MB at the most, and takes up to 9 ms to put it together."""

    def close(self) -> None:
        super().keep_book()
        super().close()

    def ended(self, session: Session) -> None:
        """Told of what a request left."""
