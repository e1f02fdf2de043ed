"""The page pool: one allocation, and who holds which page.

A page holds the rows of one grid interval, all views. Full pages are never rewritten, so they are shared by count. The last,
partly filled page has a fill mark: a sequence that ends at the mark writes on in place, any other gets a copy first.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from qjax.interrupts import deferred
from qjax.state import Layout, Sequence, held

ALIGNMENT = 64
"""Bytes of an address that a CPU device reads at without a copy."""
STAMPS = itertools.count(1)
"""A number for every time that any pool gives a page out, so that a page number of before is not taken for one of now."""


class PoolFull(RuntimeError):
    """No free page; the message says how many there are and how many were wanted."""


class PagePool:
    """views: name -> `[pages, layers, heads, grid, dim]`, unsigned integers of the rows' width, donated through every forward."""

    def __init__(self, layout: Layout, pages: int):
        if pages < 1:
            raise ValueError(f"a page pool needs at least one page of {layout.page_bytes:,} bytes, found {pages}")
        self.layout, self.pages = layout, pages
        # zeros, not empty: 0 x NaN in a masked row would leak
        self.views = {v.name: jnp.zeros((pages, *v.page_shape(layout.grid)), held(v.dtype)) for v in layout.views}
        self.holders = np.zeros(pages, np.int32)
        self.fill = np.zeros(pages, np.int32)
        self.stamps = np.zeros(pages, np.int64)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return self.pages * self.layout.page_bytes

    def take(self) -> int:
        """A page of its own, held once, with nothing in it."""
        if not self._free:
            raise PoolFull(f"all {self.pages} pages of {self.layout.grid} tokens are held: release a sequence or raise --kv-gb")
        page = self._free.pop()
        self.holders[page], self.fill[page], self.stamps[page] = 1, 0, next(STAMPS)
        return page

    def check(self, sequence: Sequence) -> None:
        """ValueError where a page is no longer the one that the sequence was made with, or is another pool's."""
        stamps = np.zeros(0) if sequence.stamps is None else sequence.stamps
        if not np.array_equal(stamps, self.stamps[sequence.pages]):
            raise ValueError(
                f"the sequence of {int(sequence.length):,} tokens is not this engine's, or was released before: expected pages that are still its own"
            )

    def hold(self, pages) -> None:
        """One hold more on each; ValueError, and no change, where one of them is free."""
        for page in pages:
            if self.holders[page] < 1:
                raise ValueError(f"page {page} is held by nobody: the sequence was released before")
        for page in pages:
            self.holders[page] += 1

    def release(self, pages) -> None:
        """One hold less on each, different pages; ValueError, and no change, where one of them is free."""
        for page in pages:
            if self.holders[page] < 1:
                raise ValueError(f"page {page} is released more often than it was held")
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self._free.append(int(page))

    def rows(self, view: str, pages, length: int) -> np.ndarray:
        """The rows `[layers, heads, length, dim]` of a sequence, on the host (for checks and for files)."""
        of = self.views[view]
        parts = [np.zeros((*of.shape[1:3], 0, of.shape[4]), of.dtype), *(np.asarray(_page(of, np.int32(p))) for p in pages)]
        return np.concatenate(parts, axis=2)[:, :, :length]

    def compile_copies(self) -> None:
        """Compiles ahead what `copy_out` and `copy_in` run; without it the first of them does."""
        _copies(self.layout, self.pages)

    def copy_out(self, pages, length: int) -> dict[str, np.ndarray]:
        """The rows of a sequence in host memory of their own: view -> `[layers, heads, length, dim]`. A page is read at a time."""
        read, _ = _copies(self.layout, self.pages)
        rows = {v.name: np.empty((v.layers, v.heads, length, v.dim), held(v.dtype)) for v in self.layout.views}
        for first, page in zip(range(0, length, self.layout.grid), pages, strict=True):
            for name, one in read(self.views, np.int32(page)).items():
                to = rows[name][:, :, first : first + self.layout.grid]
                to[...] = np.asarray(one)[:, :, : to.shape[2]]
        return rows

    def read_page(self, page: int, fill: int | None = None) -> dict[str, jax.Array | np.ndarray]:
        """The rows of a page in arrays of their own, which no forward changes: view -> `[layers, heads, grid, dim]`.

        fill: rows past so many are zeros, in memory of the host; None for all rows, on the device until somebody fetches them.
        """
        read, _ = _copies(self.layout, self.pages)
        rows = read(self.views, np.int32(page))
        if fill not in (None, self.layout.grid):
            rows = {name: np.array(of) for name, of in rows.items()}
            for of in rows.values():
                of[:, :, fill:] = 0
        return rows

    @deferred()
    def write_page(self, page: int, rows: dict[str, np.ndarray], fill: int) -> None:
        """Writes such rows, of which the first `fill` are a sequence's. Returns before they were read: nobody changes them any more."""
        _, write = _copies(self.layout, self.pages)
        self.views = write(self.views, np.int32(page), rows)
        self.fill[page] = fill

    @deferred()
    def copy_in(self, rows: dict[str, np.ndarray], length: int) -> list[int]:
        """Writes the first `length` of such rows into new pages, held once, with zeros past them.

        PoolFull, and no page held, where they do not fit.
        """
        _, write = _copies(self.layout, self.pages)
        pages, firsts = [], range(0, length, self.layout.grid)
        staged = {v.name: _aligned(v.page_shape(self.layout.grid), held(v.dtype)) for v in self.layout.views}
        try:
            for _ in firsts:
                pages.append(self.take())  # all of them before the first is written
            for first, page in zip(firsts, pages, strict=True):
                self.fill[page] = n = min(self.layout.grid, length - first)
                for name, to in staged.items():
                    to[:, :, :n], to[:, :, n:] = rows[name][:, :, first : first + n], 0
                self.views = write(self.views, np.int32(page), staged)
                jax.block_until_ready(self.views)  # by then the staged rows were read, which a CPU device does where they lie
        except BaseException:
            self.release(pages)
            raise
        return pages


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array, not filled, that a CPU device takes as it is: at an odd address it copies it first, into memory that is new every time.

    128 MiB came in in 9.7 ms with it and in 14.7 without, the best of 40 in turn.
    """
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    return room[-room.ctypes.data % ALIGNMENT :][:size].view(dtype).reshape(shape)


@functools.cache
def _copies(layout: Layout, pages: int):
    """The compiled (read, write) of one page's rows in every view, for all pools of this size."""
    views, page = ({v.name: jax.ShapeDtypeStruct((*n, *v.page_shape(layout.grid)), held(v.dtype)) for v in layout.views} for n in ((pages,), ()))
    number = jax.ShapeDtypeStruct((), np.int32)
    write = jax.jit(_write_page, donate_argnums=0).lower(views, number, page).compile()
    return jax.jit(_read_page).lower(views, number).compile(), write


def _read_page(views, page):
    return {name: jax.lax.dynamic_index_in_dim(view, page, 0, keepdims=False) for name, view in views.items()}


def _write_page(views, page, rows):
    return {name: jax.lax.dynamic_update_index_in_dim(view, rows[name], page, 0) for name, view in views.items()}


@jax.jit
def _page(view, page):
    return jax.lax.dynamic_index_in_dim(view, page, 0, keepdims=False)
