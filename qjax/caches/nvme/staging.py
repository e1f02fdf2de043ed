"""Staging: what becomes of pages, anchors and sessions on their way to the writer."""

from __future__ import annotations

import time

import numpy as np

from qjax.caches.anchors import Anchor
from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import ANCHOR, DISK, IDS, LOGITS, OPEN, PAGE, SECTIONS, SESSION, TOKENS, FiledAnchor, anchor_sum, content_sum
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.room import Room
from qjax.caches.nvme.writer import Lot, Writer
from qjax.caches.session import Session
from qjax.config import TOKEN
from qjax.pages import PagePool
from storage import Entry


class Staging:
    """Keys are of the chain where equal tokens have equal bytes: at level token, and at level grid what the disk tier writes, rows of
    prefills. What else is written at level grid, of sessions, has the sum of its bytes for a key.
    """

    def __init__(self, pool: PagePool, index: Index, writer: Writer, level: str):
        self._pool, self._index, self._writer, self._level = pool, index, writer, level

    def by_content(self, use: str) -> bool:
        return self._level != TOKEN and use != DISK

    def has(self, key: str) -> bool:
        """Whether an entry is there, or on its way."""
        return self._index.has(key) or self._writer.pending(key) is not None

    def lot(self, room: Room, what: str, chain: Chain, length: int, anchors: list[Anchor], use: str) -> Lot | None:
        """A lot of a sequence of `length` tokens and anchors over it; None where what is not there of them has no room.

        By content nobody knows what is there before it is copied: nothing counts as that.
        """
        layout, missing = self._pool.layout, not self.by_content(use)
        page, pages = self._page_bytes, range(-(-length // layout.grid))
        there = sum(missing and self.has(chain.page(number * layout.grid, length)) for number in pages)
        new = len(pages) - there
        nbytes, files, has = new * page, new * (len(layout.views) + 3), there * page
        for anchor in anchors:
            arrays = _arrays(anchor)
            size = sum(a.nbytes for a in arrays.values())
            if missing and self.has(ANCHOR + chain.at(anchor.length)):
                has += size
            else:
                nbytes, files = nbytes + size, files + len(arrays) + 1
        return Lot(what, nbytes) if room.fits(what, nbytes, files, has, self._writer.granted) else None

    @property
    def _page_bytes(self) -> int:
        return self._pool.layout.page_bytes + 12 * self._pool.layout.grid

    def page(
        self, chain: Chain, tokens: np.ndarray, length: int, number: int, page: int, use: str, seconds: float = 0.0, lot: Lot | None = None
    ) -> str | None:
        """Stages a page of a sequence of `length` tokens, unless it is there; its key, or None where there is no room after so long.

        The index holds it from then on, until it is let go.

        tokens: int32, the sequence's. number: of the page in it. page: in the pool, held by somebody.
        """
        grid = self._pool.layout.grid
        first = number * grid
        key = None if self.by_content(use) else chain.page(first, length)
        if key is not None and self._holds(key):
            return key
        if not self._writer.has_room(self._page_bytes, seconds):
            return None
        n = min(grid, length - first)
        rows = self._pool.read_page(page, n) | {
            IDS: _padded(chain.keys[first : first + n], np.int64, grid),
            TOKENS: _padded(tokens[first : first + n], np.int32, grid),
        }
        if key is None and self._holds(key := f"{PAGE}{content_sum(rows)}"):
            if lot is not None:
                lot.left -= self._page_bytes
            return key

        def done(entry: Entry | None) -> None:
            if entry is not None:
                self._index.add_page(entry, use)
            else:
                self._index.drop_over(key, "budget")  # nothing can stand on it

        self._index.hold([key])
        self._writer.put(key, rows, {"rows": n}, done=done, lot=lot)
        return key

    def _holds(self, key: str) -> bool:
        """Holds an entry that is there, or on its way; False for one that is neither."""
        self._index.hold([key])
        if there := self.has(key):
            return there
        self._index.let_go([key])
        return False

    def let_go(self, keys: list[str]) -> None:
        """Pages and anchors that were staged: something stands on them now, or nothing will."""
        self._index.let_go(keys)

    def anchor(self, chain: Chain, anchor: Anchor, pages: list[str], use: str, seconds: float = 0.0, lot: Lot | None = None) -> str | None:
        """Stages an anchor over pages that were staged, unless it is there; its key, or None where there is no room after so long.

        The index holds it from then on, until it is let go.
        """
        length, arrays = anchor.length, _arrays(anchor)
        line, rest = chain.line(length // self._pool.layout.grid), length % self._pool.layout.grid
        key = ANCHOR + (anchor_sum(arrays, line, pages, length, anchor.tainted) if self.by_content(use) else chain.at(length))
        if anchor.logits is not None and self._lacks_logits(key):  # it was taken inside a longer prompt
            key = ANCHOR + anchor_sum(arrays, line, pages, length, anchor.tainted)
        if self._holds(key):
            if lot is not None and self.by_content(use):
                lot.left -= sum(a.nbytes for a in arrays.values())
            return key
        if not self._writer.has_room(nbytes := sum(a.nbytes for a in arrays.values()), seconds):
            return None
        tail, has = chain.keys[length - rest : length], {"logits": anchor.logits is not None, "open": length > anchor.line}
        fields = FiledAnchor.fields(anchor.kind, length, line, tail, pages, anchor.tainted, use)
        summed = key != ANCHOR + chain.at(length)
        filed = FiledAnchor(**fields | has | {"key": key, "tail": tail, "pages": tuple(pages)}, nbytes=nbytes, used=self._index.now(), summed=summed)
        self._index.hold([key])
        self._index.hold(held := [key, *pages])
        self._index.expect(filed)
        if not all(map(self.has, pages)):  # one could not be written
            self._index.drop(filed, "budget")

        def done(entry: Entry | None) -> None:
            try:
                self._index.arrived(key, entry)
            finally:
                self._index.let_go(held)

        self._writer.put(key, arrays, fields, pages, done, lot)
        return key

    def _lacks_logits(self, key: str) -> bool:
        """Whether an anchor is there, or on its way, without its last token's logits."""
        filed, pending = self._index.anchors.get(key), self._writer.pending(key)
        return (filed is not None and not filed.logits) or (pending is not None and LOGITS not in pending)

    def session(self, chain: Chain, session: Session, pages: list[str], anchors: list[str], lot: Lot | None = None) -> None:
        """Stages the record of a session over anchors that were staged. chain: of its tokens up to the last of them."""
        length, resident, grid = chain.keys.size, session.role == "resident", self._pool.layout.grid
        history = min(session.history, length)
        fields = {"tenant": session.tenant, "length": length, "history": history, "turns": session.turns, "resident": resident}
        fields |= {"tail": chain.keys[length - length % grid : length].tolist(), "pages": pages, "anchors": anchors}
        used = self._index.now() - (time.monotonic() - session.touched)
        key = f"{SESSION}{content_sum({}, f'{pages} {anchors} {history} {resident}')}"

        self._index.hold(held := [key, *anchors])

        def done(entry: Entry | None) -> None:
            try:
                if entry is not None:
                    self._index.add_session(entry)
                    self._index.supersede(entry.key, chain.keys, used)
            finally:
                self._index.let_go(held)

        self._writer.put(key, {}, fields, anchors, done, lot)


def _arrays(anchor: Anchor) -> dict:
    """What is stored of an anchor."""
    arrays = {SECTIONS + name: a for name, a in anchor.sequence.sections.items()}
    if anchor.length > anchor.line:
        arrays |= {OPEN + name: a for name, a in anchor.sequence.open.items()}
    return arrays if anchor.logits is None else arrays | {LOGITS: anchor.logits}


def _padded(values: np.ndarray, dtype, size: int) -> np.ndarray:
    padded = np.zeros(size, dtype)
    padded[: values.size] = values
    return padded
