"""Entries that are only described: an index over them has no files behind it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import ANCHOR, DISK, LOGITS, SECTIONS, SESSION, FiledAnchor
from storage import Entry, Leaf

GRID = 64


class Files:
    """In the place of a storage."""

    read_only = shared = False

    def __init__(self, *entries: Entry):
        self.there = {entry.key: entry for entry in entries}
        self.dropped: list[str] = []

    def entries(self) -> dict[str, Entry]:
        return dict(self.there)

    def find(self, key: str) -> Entry | None:
        return self.there.get(key)

    def drop(self, key: str, unless: Callable[[], bool] = lambda: False) -> bool:
        if unless():
            return False
        self.dropped.append(key)
        return self.there.pop(key, None) is not None

    def touch(self, key: str, used: float | None = None) -> None:
        """Times of use are the index's own here."""

    def add(self, *entries: Entry) -> None:
        self.there |= {entry.key: entry for entry in entries}


def entry(key: str, nbytes: int, fields: dict | None = None, used: float = 0.0, logits: bool = False) -> Entry:
    leaves = {SECTIONS + "S": Leaf("uint8", (nbytes - 4 * logits,), "")} | ({LOGITS: Leaf("float32", (1,), "")} if logits else {})
    return Entry(key, leaves, fields or {}, used, used)


def chain(tokens, tenant: str = "") -> Chain:
    return Chain(np.asarray(tokens, np.int64), tenant, GRID)


def pages(of: Chain, length: int, nbytes: int = 100) -> list[Entry]:
    """Those of the first `length` key ids."""
    return [entry(of.page(first, length), nbytes) for first in range(0, length, GRID)]


def anchor(of: Chain, length: int, nbytes: int = 10, use: str = DISK, used: float = 0.0, logits: bool = False, tainted: bool = False) -> Entry:
    """Of a chain's first `length` key ids, over pages of the chain."""
    below = [page.key for page in pages(of, length)]
    line, tail = of.line(length // GRID), of.keys[length - length % GRID : length]
    return entry(ANCHOR + of.at(length), nbytes, FiledAnchor.fields("grid", length, line, tail, below, tainted, use), used, logits)


def session(name: str, of: Chain, lengths: list[int], used: float = 0.0, resident: bool = False, history: int | None = None) -> Entry:
    """One that ends with the last of its anchors."""
    length = lengths[-1]
    fields = {"tenant": of.tenant, "length": length, "history": length if history is None else history, "turns": 1, "resident": resident}
    fields |= {"tail": of.keys[length - length % GRID : length].tolist(), "pages": [page.key for page in pages(of, length)]}
    return entry(SESSION + name, 0, fields | {"anchors": [ANCHOR + of.at(one) for one in lengths]}, used)
