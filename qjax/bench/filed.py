"""Pages and an anchor with random bits, written as the tiers on NVMe write them and restored as a hit of theirs is."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from qjax.caches.nvme.filed import ANCHOR, DISK, IDS, OPEN, PAGE, SECTIONS, TOKENS, FiledAnchor
from qjax.caches.nvme.restore import Reader, restore
from qjax.caches.nvme.writer import Writer
from qjax.caches.tier import Restored
from qjax.interrupts import deferred
from qjax.pages import PagePool
from qjax.state import BLOCK, Layout, held
from storage import Storage


class Filed:
    """What a sequence of so many tokens leaves on NVMe. Its pages differ in their key ids only: rows are the same memory."""

    def __init__(self, root: Path, layout: Layout, tokens: int):
        rng = np.random.default_rng(tokens)
        self.root, self.layout, self.tokens = root, layout, tokens
        self._keys = rng.integers(0, 2**62, tokens)
        self._pool = PagePool(layout, -(-tokens // layout.grid))
        self._pool.compile_copies()
        self._pool.write_page(0, {v.name: _random(rng, v.page_shape(layout.grid), v.dtype) for v in layout.views}, 0)
        rows = self._pool.read_page(0)  # on the device, where the tiers take theirs from
        self.pages = {f"{PAGE}{number}": rows | self._numbers(number) for number in range(self._pool.pages)}
        sections = {SECTIONS + s.name: _random(rng, s.shape, s.dtype) for s in layout.sections}
        self.anchor = sections | {OPEN + s.name: _random(rng, s.shape, s.dtype) for s in layout.open if tokens % BLOCK}
        self.storage = Storage.open(root, {"written by": "qjax bench storage"})
        self._writer = Writer(self.storage, 0, lambda nbytes: True)
        self._reader = Reader(self.storage, self._writer, layout)

    def _numbers(self, page: int) -> dict[str, np.ndarray]:
        ids = np.zeros(self.layout.grid, np.int64)
        here = self._keys[page * self.layout.grid :][: self.layout.grid]
        ids[: here.size] = here
        return {IDS: ids, TOKENS: _tokens(ids)}

    @property
    def page_bytes(self) -> int:
        return _nbytes(self.pages[f"{PAGE}0"])

    @property
    def anchor_bytes(self) -> int:
        return _nbytes(self.anchor)

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.page_bytes + self.anchor_bytes

    def files(self) -> list[Path]:
        """Those of the arrays."""
        return sorted(path for path in self.root.glob("*/*/*/*") if path.is_file())

    def write(self) -> None:
        """Returns when all of it is durable; ValueError where it is not."""
        for key, arrays in self.pages.items():
            self._writer.put(key, arrays, {})
        self.write_anchor()

    def write_anchor(self) -> None:
        line = self.tokens - self.tokens % self.layout.grid
        fields = FiledAnchor.fields("line", self.tokens, "", self._keys[line:], list(self.pages), False, DISK)
        self._writer.put(ANCHOR, self.anchor, fields, after=self.pages)
        self._writer.drain()
        if self.storage.find(ANCHOR) is None:
            raise ValueError(f"not all of {len(self.pages)} pages and an anchor could be written to {self.root}: {self._writer.stats()}")

    def drop(self) -> None:
        for key in (ANCHOR, *self.pages):
            self.storage.drop(key)

    def drop_anchor(self) -> None:
        self.storage.drop(ANCHOR)

    def restore(self) -> None:
        """Brings it into the pool, as far as its first use, and lets it go."""
        self._pool.release(self._restored()[0].sequence.pages)

    def read_anchor(self) -> None:
        self._reader.anchor(self._filed(), False)

    def _filed(self) -> FiledAnchor:
        return FiledAnchor.of(self.storage.find(ANCHOR), self.layout.grid)

    def _restored(self) -> tuple[Restored, np.ndarray]:
        restored, ids = restore(self._pool, self._reader, self._filed(), self._keys, self.tokens)
        jax.block_until_ready((restored.sequence.sections, restored.sequence.open))
        return restored, ids

    def check(self) -> None:
        """RuntimeError where a restore brings back other bits than were written."""
        restored, ids = self._restored()
        sequence = restored.sequence
        pairs = [(sequence.sections[s.name], self.anchor[SECTIONS + s.name]) for s in self.layout.sections]
        pairs += [(ids, self._keys), (sequence.tokens, _tokens(self._keys))]
        for page in sequence.pages:
            rows = self._pool.read_page(page)
            pairs += [(rows[v.name], self.pages[f"{PAGE}0"][v.name]) for v in self.layout.views]
        if not all(np.array_equal(_bits(found), _bits(wanted)) for found, wanted in pairs):
            raise RuntimeError(f"{self.tokens:,} tokens came back from {self.root} with other bits than were written")
        self._pool.release(sequence.pages)

    def close(self) -> None:
        """What an interrupt has left to write is left out."""
        with deferred():
            self._writer.abandon()
            self.storage.close()


def _tokens(keys: np.ndarray) -> np.ndarray:
    return (keys % 2**17).astype(np.int32)


def _nbytes(arrays) -> int:
    return sum(a.nbytes for a in arrays.values())


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    dtype = held(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def _bits(array) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
