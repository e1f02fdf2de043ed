"""The caches of an engine that computes nothing: a trace's requests through their lookup and placement, with counted bytes for arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np

from qjax.bench.baselines import Served
from qjax.bench.cost import Cost
from qjax.bench.counting import LOGITS, CountingPool, CountingSlot
from qjax.bench.counting_nvme import CountingNvme
from qjax.bench.counting_storage import CountingStorage
from qjax.bench.drive import Drive
from qjax.bench.shelf import Shelf
from qjax.bench.trace import Call
from qjax.bench.traffic import ANSWER_RATE
from qjax.caches.lookup import Caches
from qjax.caches.request import Request
from qjax.config import CacheConfig, DiskConfig
from qjax.programs import MARKS
from qjax.state import Layout
from qjax.state import Sequence as State


class Cached:
    """A request takes its pages, marks and anchors as in the engine; requests follow each other as they came, one at a time.

    waited: modelled seconds of the last one, to its first token, that were not forwards: reads, and waiting for the drive.
    """

    def __init__(
        self,
        layout: Layout,
        pages: int,
        config: CacheConfig,
        shelf: bool = False,
        disk: DiskConfig | None = None,
        nvme: type[CountingNvme] = CountingNvme,
    ):
        """shelf: nothing is ever given up for room, see Shelf. disk: with a tier on NVMe, of this class; it needs the time, which passes."""
        self._layout, self._pages, self._config, self._shelved, self._disk, self._nvme = layout, pages, config, shelf, disk, nvme
        self._empty, self._cost = State.empty(layout), Cost()
        self._drive = Drive()
        self._storage = CountingStorage(self._drive)
        self._counts: Counter[str] = Counter()
        self.waited = 0.0
        self._start()

    def _start(self) -> None:
        """A start of the engine: nothing is in memory."""
        self._pool = CountingPool(self._layout, self._pages)
        self.caches = Caches(self._pool, self._config, nvme=self._nvme(self._pool, self._storage, self._disk) if self._disk else None)
        self._shelf = Shelf(self.caches.resident) if self._shelved else None

    def restart(self) -> None:
        """A planned stop, and a start."""
        self.caches.close()
        if self.caches.nvme:
            self._count()
        self._start()

    def _count(self) -> None:
        stats = self.caches.nvme.stats()
        self._counts.update({name: stats.get(f"dropped_{name}", 0) for name in ("budget", "no_room")} | {"spilled": stats["spilled"]})

    def drain(self) -> None:
        """What waits to be written is written."""
        self.caches.nvme.drain()

    def written_and_read(self) -> dict[str, int]:
        """Bytes over the whole trace, and those that lie there at its end; entries given up, and not written for want of room to stage them;
        sessions written.
        """
        self._count()
        stored = self._storage.stats()
        return {name: stored[name] for name in ("read_bytes", "written_bytes", "nbytes")} | dict(self._counts)

    def serve(self, call: Call, keys: np.ndarray) -> Served:
        if self._shelf:
            self._shelf.fetch(call)
        self._drive.until(call.at)
        begin = self._drive.now
        request = self.caches.begin(keys, keys, history=call.history, user=call.user)
        self.waited = self._drive.now - begin
        restored, pool = request.restored, self._pool
        ids = np.concatenate([keys, call.answer_keys()])
        slot = CountingSlot(pool, restored.sequence if restored else self._empty, ids)
        if restored:
            pool.release(restored.sequence.pages)
        self._prompt(slot, request, keys.size)
        if self.caches.nvme:
            request.record.prefill_seconds = self._drive.now - begin
        waited = self.waited
        while slot.length < ids.size:
            self._answer(request, self._forward(slot, ids.size))
        self.waited = waited
        end = slot.at(slot.length)
        pool.hold(end.pages)
        slot.close()
        request.finish(end)
        pool.release(end.pages)
        if self.caches.nvme and self.caches.resident.sessions:
            self.caches.nvme.ended(self.caches.resident.sessions[-1])
        if self._shelf:
            self._shelf.put_back(call)
        return Served(request.start, request.record.source)

    def _prompt(self, slot: CountingSlot, request: Request, size: int) -> None:
        """Forwards what is left of the prompt, as Engine.run_prompt does."""
        while slot.length < size:
            start = slot.length
            marks = request.marks(start, start + min(slot.room(), size - start))[-MARKS:]
            self._drive.advance(self._cost.seconds(start, start + self._forward(slot, size)))
            request.caught([slot.at(mark) for mark in marks])
            if kind := "prompt" if slot.length == size else request.kind_at(slot.length):
                request.add(kind, slot.at(slot.length), LOGITS if slot.length == size else None)

    def _answer(self, request: Request, tokens: int) -> None:
        """Lets the time of so many tokens pass, in which what is to be written goes on its way."""
        for first in range(0, tokens, int(ANSWER_RATE)):
            self._drive.advance(min(tokens - first, ANSWER_RATE) / ANSWER_RATE)
            request.pump()

    def _forward(self, slot: CountingSlot, end: int) -> int:
        """Up to the next grid line; how many tokens."""
        begin = self._drive.now
        self.caches.make_room(lambda: self._pool.free > 0 or not slot.needs_page())
        self.waited += self._drive.now - begin
        slot.forward(rows := min(slot.room(), end - slot.length))
        return rows
