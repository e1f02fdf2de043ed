"""State that is counted and not there: what the caches keep, at full size and with no memory behind it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace

import jax
import numpy as np

from qjax.pages import PagePool
from qjax.slot import Slot
from qjax.state import Layout, Section, Sequence, held

LOGITS = np.zeros(1, np.float32)
"""In the place of a token's logits, 1 MB at the 27B vocabulary beside 154 of the anchor that has them."""


@jax.tree_util.register_pytree_node_class
class Counted:
    """A shape and a dtype in the place of an array. A pytree without leaves, so that jax may move it, which makes another one."""

    __slots__ = ("dtype", "nbytes", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype, self.nbytes = shape, dtype, math.prod(shape) * dtype.itemsize

    @property
    def sharding(self) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """One zero in the place of all: no memory."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)

    def tree_flatten(self):
        return (), (self.shape, self.dtype)

    @classmethod
    def tree_unflatten(cls, aux, _):
        return cls(*aux)


class CountedSection(Section):
    def zeros(self) -> Counted:
        return Counted(self.shape, held(self.dtype))


def counted(layout: Layout) -> Layout:
    """The layout with sections that take no memory."""

    def all_of(sections: tuple[Section, ...]) -> tuple[CountedSection, ...]:
        return tuple(CountedSection(s.name, s.shape, s.dtype) for s in sections)

    return replace(layout, sections=all_of(layout.sections), open=all_of(layout.open))


class CountingPool(PagePool):
    """A page pool whose pages are numbers."""

    def __init__(self, layout: Layout, pages: int):
        super().__init__(replace(layout, views=()), pages)
        self.layout = layout

    def compile_copies(self) -> None:
        """There is nothing to copy."""

    def read_page(self, page: int, fill: int | None = None) -> dict[str, Counted]:
        return {v.name: Counted(v.page_shape(self.layout.grid), held(v.dtype)) for v in self.layout.views}

    def write_page(self, page: int, rows, fill: int) -> None:
        self.fill[page] = fill

    def copy_out(self, pages, length: int) -> dict[str, np.ndarray]:
        shapes = {v.name: ((v.layers, v.heads, length, v.dim), held(v.dtype)) for v in self.layout.views}
        return {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in shapes.items()}

    def copy_in(self, rows: dict[str, np.ndarray], length: int) -> list[int]:
        pages = []
        try:
            for first in range(0, length, self.layout.grid):
                pages.append(self.take())
                self.fill[pages[-1]] = min(self.layout.grid, length - first)
        except BaseException:
            self.release(pages)
            raise
        return pages


class CountingSlot(Slot):
    """A slot that takes pages as any other, and computes nothing. ids: the sequence's tokens and all that will follow."""

    def __init__(self, pool: PagePool, sequence: Sequence, ids: np.ndarray):
        pool.check(sequence)
        self._pool, self._grid, self.ids = pool, pool.layout.grid, ids
        self._forward = SimpleNamespace(copy_page=lambda views, old, new: views)
        self.tokens, self.pages, self._ahead = range(int(sequence.length)), sequence.pages.tolist(), 0
        self._from = self._S = self._opened = None
        pool.hold(self.pages)

    @cached_property
    def _specs(self) -> tuple[tuple[Section, ...], tuple[Section, ...]]:
        return self._pool.layout.sections, self._pool.layout.open

    def forward(self, rows: int) -> None:
        """Takes the next rows, which lie in one page."""
        self._own_last_page()
        self.tokens = range(self.length + rows)
        self._mark(self.length)

    def at(self, length: int) -> Sequence:
        """The state after so many tokens, one of the last page's lengths. Its pages are held by this slot only."""
        sections, opened = ({s.name: s.zeros() for s in specs} for specs in self._specs)
        pages = np.array(self.pages[: -(-length // self._grid)], np.int32)
        return Sequence(self.ids[:length], pages, np.int32(length), sections, opened, self._pool.stamps[pages])
