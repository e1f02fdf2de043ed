"""An engine whose caches have a tier on NVMe: starts, stops, what lies in the directory, and what a test does to a writer or a restore."""

import dataclasses
import threading
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from qjax.caches.lookup import Caches
from qjax.caches.nvme.disk import Nvme
from qjax.caches.nvme.filed import ANCHOR, DISK, PAGE, SESSION, SPILL
from qjax.caches.nvme.place import open_storage
from qjax.config import CacheConfig, DiskConfig
from qjax.engine import Engine
from qjax.pages import PagePool
from storage import Storage

GB = 2**30
IDENTITY = {"weights": "1"}
SMALL = {"disk_free_gb": 0, "disk_min_tokens": 64, "spill_min_tokens": 128}
"""For prompts of a few pages of 64 tokens."""


@contextmanager
def started(engine: Engine, directory: Path, rates: bool = False, caches: dict | None = None, **config):
    """One start of the program, on a new pool; at the end a planned stop, after which nothing is held.

    rates: they are measured; else every read pays, so that no test depends on a clock. caches: of a CacheConfig. config: of a DiskConfig.
    """
    config = DiskConfig(**(SMALL | {"disk_cache": str(directory)} | config))
    engine.pool = PagePool(engine.layout, engine.pool.pages)
    nvme = Nvme(engine.pool, open_storage(config, IDENTITY, "golden"), config, engine.level)
    if not rates:
        nvme.forwarded = lambda tokens, seconds: None
    engine.caches = Caches(engine.pool, CacheConfig(**caches or {}), engine.level, engine.model.tokenizer.decode, nvme)
    try:
        yield engine.caches
    finally:
        engine.caches.close()
        engine.caches.clear()
        free, engine.caches = engine.pool.free, None
    assert free == engine.pool.pages


def written(caches: Caches) -> set[str]:
    """Waits for the writer; the keys of the anchors that are there then."""
    caches.nvme._writer.drain()
    return set(caches.nvme.index.anchors)


def lengths(caches: Caches, use: str = DISK) -> list[int]:
    """Of a use's anchors, when all is written."""
    written(caches)
    return sorted(a.length for a in caches.nvme.index.anchors.values() if a.use == use)


def stats(caches: Caches) -> dict:
    return caches.nvme.stats()


def on_disk(directory: Path) -> dict[str, int]:
    """key -> bytes of its arrays, as the files have them, of every entry in a directory."""
    entries = (meta.parent for meta in Path(directory).glob("*/*/meta"))
    return {entry.name: sum(f.stat().st_size for f in entry.rglob("*") if f.is_file() and f.name != "meta") for entry in entries}


def recount(caches: Caches, directory: Path) -> None:
    """What the index says is what lies in the directory, entry by entry and byte by byte; nothing is staged and nothing in use."""
    nvme = caches.nvme
    nvme._writer.drain()
    index, files = nvme.index, {key: n for key, n in on_disk(directory).items() if key.startswith((PAGE, ANCHOR, SESSION))}
    under = {page for a in index.anchors.values() for page in a.pages}
    assert files.keys() == {*under, *index.anchors, *index.sessions}
    counted = {DISK: 0, SPILL: 0}
    for anchor in index.anchors.values():
        counted[anchor.use] += files[anchor.key]
        assert anchor.nbytes == files[anchor.key]
    for page in under:
        counted[DISK if any(a.use == DISK for a in index.anchors.values() if page in a.pages) else SPILL] += files[page]
    stats = nvme.stats()
    assert {use: stats[f"{use}_bytes"] for use in counted} == counted
    assert (stats["anchors"], stats["pages"], stats["sessions"]) == (len(index.anchors), len(under), len(index.sessions))
    assert (stats["staged_bytes"], stats["waiting"]) == (0, 0)
    assert not +index._in_use
    for use, budget in ((DISK, "disk_gb"), (SPILL, "spill_gb")):
        assert counted[use] <= nvme._config.bytes(budget), use


class Slow:
    """A storage whose puts wait until they may go on. puts: keys, as they come."""

    def __init__(self, monkeypatch, wanted=lambda key: True):
        self.puts: list[str] = []
        self._go, put = threading.Event(), Storage.put

        def slow(storage, key, arrays, /, **fields):
            if wanted(key):
                self.puts.append(key)
                assert self._go.wait(60)
            return put(storage, key, arrays, **fields)

        monkeypatch.setattr(Storage, "put", slow)

    def go(self) -> None:
        self._go.set()


class Puts:
    """Counts the entries that are written: keys, as they come."""

    def __init__(self, monkeypatch):
        self.keys: list[str] = []
        write = Storage._write

        def counted(storage, key, arrays, fields):
            self.keys.append(key)
            return write(storage, key, arrays, fields)

        monkeypatch.setattr(Storage, "_write", counted)

    def of(self, prefix: str) -> list[str]:
        return [key for key in self.keys if key.startswith(prefix)]


def zeroed_sections(monkeypatch, name: str) -> None:
    """From now on one section comes back as zeros."""
    take = Nvme.take

    def broken(self, hit):
        restored = take(self, hit)
        sections = restored.sequence.sections
        wrong = sections | {name: jax.numpy.zeros_like(sections[name])}
        return dataclasses.replace(restored, sequence=restored.sequence.replace(sections=wrong))

    monkeypatch.setattr(Nvme, "take", broken)


def zeroed_rows(monkeypatch, view: str) -> None:
    """From now on the rows of a view come back as zeros."""
    write = PagePool.write_page
    monkeypatch.setattr(PagePool, "write_page", lambda pool, page, rows, fill: write(pool, page, rows | {view: np.zeros_like(rows[view])}, fill))
