"""What the tier on NVMe is compared with: plain LRU by bytes, over what the tier writes and over all that there is to write."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qjax.bench.counting import CountingPool
from qjax.bench.counting_nvme import CountingIndex, CountingNvme
from qjax.bench.counting_storage import CountingStorage
from qjax.caches.nvme.disk import WAIT, Intake
from qjax.caches.nvme.filed import FiledSession
from qjax.caches.session import Session
from qjax.config import MOST_GB, DiskConfig


class LruIndex(CountingIndex):
    """What was used least recently goes first."""

    def _least(self, use: str | None, held: set[str]) -> list[str]:
        oldest = min(self.candidates(use, held), key=lambda one: one.used, default=None)
        if oldest is None:
            return []
        return self._forget_session(oldest) if isinstance(oldest, FiledSession) else self._forget(oldest)


class LruNvme(CountingNvme):
    """Writes what the tier writes, and gives up what was used least recently: anchors and sessions."""

    index_class = LruIndex


class LruOfAll(LruNvme):
    """Writes every grid line that the budget lets be written and the end of every request, whatever it costs to stage them."""

    def __init__(self, pool: CountingPool, storage: CountingStorage, config: DiskConfig):
        super().__init__(pool, storage, replace(config, staging_gb=float(MOST_GB)))

    def begin(self, keys: np.ndarray, tenant: str, start: int, **more) -> Intake | None:
        intake, grid = super().begin(keys, tenant, start, **more), self._pool.layout.grid
        return intake and replace(intake, lines=set(filter(self._fits, range(start // grid * grid + grid, keys.size + 1, grid))))

    def ended(self, session: Session) -> None:
        self.spill(session, WAIT)
