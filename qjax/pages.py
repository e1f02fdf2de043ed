"""The page pool: one allocation, and who holds which page.

A page holds the rows of one grid interval, all views. Full pages are never rewritten, so they are shared by count. The last,
partly filled page has a fill mark: a sequence that ends at the mark writes on in place, any other gets a copy first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from qjax.state import Layout, held


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
        self.holders[page], self.fill[page] = 1, 0
        return page

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


@jax.jit
def _page(view, page):
    return jax.lax.dynamic_index_in_dim(view, page, 0, keepdims=False)
