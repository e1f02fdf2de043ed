"""An engine whose caches have a tier on NVMe: its starts and stops, what lies in the directory, and what a test does to a writer or a restore."""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from tests.bits import assert_bits_equal
from tests.equivalence.test_resident import answer, cold

GB = 2**30
SMALL = {"disk_free_gb": 0, "disk_min_tokens": 64, "spill_min_tokens": 128}
"""For prompts of a few pages of 64 tokens."""
HEADS = {"session_spill": False}
"""The disk tier alone."""
SESSIONS = {"disk_gb": 0}
"""The spill alone."""


@contextmanager
def started(engine: Engine, directory: Path, rates: bool = False, caches: dict | None = None, **config) -> Iterator[Caches]:
    """One start of the program, on a new pool; at the end a planned stop, after which nothing is held.

    rates: they are measured; else every read pays, so that no test depends on a clock. caches: of a CacheConfig. config: of a DiskConfig.
    """
    config = DiskConfig(**(SMALL | {"disk_cache": str(directory)} | config))
    engine.pool = PagePool(engine.layout, engine.pool.pages)
    nvme = Nvme(engine.pool, open_storage(config, {"weights": "1"}, "golden"), config, engine.level)
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


def assert_restored(engine: Engine, tokens, source: str, start: int, most: int = 5, **request):
    """A prompt through the caches: the hit is the named one, nothing failed, and every bit is a cold run's. The record and the answer."""
    record, *warm = answer(engine, tokens, most, **request)
    assert (record.source, record.start, record.failed) == (source, start, []), record
    expected = cold(engine, tokens, most)
    assert warm[0] == expected[0]
    assert_bits_equal(warm[1], expected[1])
    return record, warm[0]


def joined(*parts) -> np.ndarray:
    """A prompt of several."""
    return np.concatenate(parts).astype(np.int32)


def same_state(a: dict, b: dict) -> bool:
    """Of two that `kept` gave."""
    leaves = (jax.tree.leaves(one) for one in (a, b))
    return all(np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


def lengths(caches: Caches, use: str = DISK) -> list[int]:
    """Of a use's anchors, when all is written."""
    caches.nvme.drain()
    return sorted(a.length for a in caches.nvme.index.anchors.values() if a.use == use)


def on_disk(directory: Path) -> dict[str, int]:
    """key -> bytes of its arrays, as the files have them, of every entry in a directory but the book and the golden one."""
    found = {}
    for meta in Path(directory).glob("*/*/meta"):
        if meta.parent.name.startswith((PAGE, ANCHOR, SESSION)):
            with suppress(FileNotFoundError):  # it is being removed
                found[meta.parent.name] = sum(f.stat().st_size for f in meta.parent.rglob("*") if f.is_file() and f.name != "meta")
    return found


def recount(caches: Caches, directory: Path) -> None:
    """When all is written, the index says what lies in the directory, entry by entry and byte by byte, within the budgets; nothing is held."""
    nvme = caches.nvme
    nvme.drain()
    index, files = nvme.index, on_disk(directory)
    pages = {page for a in index.anchors.values() for page in a.pages}
    known = {*pages, *index.anchors, *index.sessions}
    assert (sorted(files.keys() - known), sorted(known - files.keys())) == ([], [])
    sums = {DISK: 0, SPILL: 0}
    for anchor in index.anchors.values():
        sums[anchor.use] += files[anchor.key]
        assert anchor.nbytes == files[anchor.key]
    for page in pages:
        sums[DISK if any(a.use == DISK for a in index.anchors.values() if page in a.pages) else SPILL] += files[page]
    stats = nvme.stats()
    assert {use: stats[f"{use}_bytes"] for use in sums} == sums
    assert (stats["anchors"], stats["pages"], stats["sessions"]) == (len(index.anchors), len(pages), len(index.sessions))
    assert (stats["staged_bytes"], stats["waiting"]) == (0, 0)
    assert not index._in_use
    assert not index._coming
    for session in index.sessions.values():
        assert not index.anchors.keys().isdisjoint(session.anchors)
    assert sum(sums.values()) <= nvme.room.budget


class Slow:
    """Puts of entries whose keys begin alike wait until they may go on. keys: those that came."""

    def __init__(self, monkeypatch, prefixes: tuple[str, ...] = (PAGE, ANCHOR, SESSION)):
        self.keys: list[str] = []
        self._go, put = threading.Event(), Storage.put

        def slow(storage, key, arrays, /, **fields):
            if key.startswith(prefixes):
                self.keys.append(key)
                assert self._go.wait(60)
            return put(storage, key, arrays, **fields)

        monkeypatch.setattr(Storage, "put", slow)

    def __enter__(self) -> "Slow":
        return self

    def __exit__(self, *_) -> None:
        self.go()

    def go(self) -> None:
        self._go.set()


class Written:
    """Keys of the entries that are really written, as they come."""

    def __init__(self, monkeypatch):
        self.keys: list[str] = []
        write = Storage._write

        def counted(storage, key, arrays, fields):
            self.keys.append(key)
            return write(storage, key, arrays, fields)

        monkeypatch.setattr(Storage, "_write", counted)

    def of(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self.keys)


def spoil(monkeypatch, engine: Engine, name: str) -> None:
    """From now on a section, or the rows of a view, come back as zeros."""
    if name in {v.name for v in engine.layout.views}:
        write = PagePool.write_page
        monkeypatch.setattr(PagePool, "write_page", lambda pool, page, rows, fill: write(pool, page, rows | {name: np.zeros_like(rows[name])}, fill))
        return
    take = Nvme.take

    def broken(self, *hit):
        restored = take(self, *hit)
        sections = restored.sequence.sections
        wrong = sections | {name: jax.numpy.zeros_like(sections[name])}
        return dataclasses.replace(restored, sequence=restored.sequence.replace(sections=wrong))

    monkeypatch.setattr(Nvme, "take", broken)
