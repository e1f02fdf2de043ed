"""The layout of a model's state and the sequence, the one value that a forward maps to the next.

A layout is a spec: names, shapes, dtypes, token axis. Zeros, byte counts, checks and files are derived from it, so whoever
stores a sequence needs the layout and no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

BLOCK = 64
"""Rows of one block: the unit of the chunked recurrence, aligned to absolute positions."""
TILE = 256
"""Keys of one attention tile, or a page's where it has fewer."""
GRIDS = f"a multiple of {BLOCK} up to {TILE}, or of {TILE}"


def is_grid(rows: int) -> bool:
    """Whether a page may have so many rows: no block and no tile crosses its end."""
    return rows > 0 and rows % (BLOCK if rows < TILE else TILE) == 0


def held(dtype: Any) -> np.dtype:
    """The dtype in which an array that a loop slices or updates is held: two-byte floats as their bits.

    XLA's CPU backend widens the whole array to float32 at every step otherwise (432 ms against 2 ms for a 384 MiB pool).
    """
    dtype = jnp.dtype(dtype)
    return np.dtype(np.uint16) if dtype.itemsize == 2 else dtype


@dataclass(frozen=True)
class Section:
    """A fixed-size array, copied whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def zeros(self) -> np.ndarray:
        return np.zeros(self.shape, held(self.dtype))


@dataclass(frozen=True)
class View:
    """A token-axis array: per token `[layers, heads, dim]`; in a page `[layers, heads, grid, dim]`, heads before tokens."""

    name: str
    layers: int
    heads: int
    dim: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one token's row."""
        return self.layers * self.heads * self.dim * jnp.dtype(self.dtype).itemsize

    def page_shape(self, grid: int) -> tuple[int, int, int, int]:
        return (self.layers, self.heads, grid, self.dim)


@dataclass(frozen=True)
class Layout:
    """What one model keeps of a sequence.

    sections: as of the last block line. open: the open block's inputs, kept only where a sequence ends off a block line.
    views: rows of every token. grid: tokens of a page and of a prefill chunk.
    """

    sections: tuple[Section, ...]
    open: tuple[Section, ...]
    views: tuple[View, ...]
    grid: int

    @property
    def section_bytes(self) -> int:
        """Bytes of an anchor's sections at a block line."""
        return sum(s.nbytes for s in self.sections)

    @property
    def open_bytes(self) -> int:
        """Bytes that an anchor off a block line adds."""
        return sum(s.nbytes for s in self.open)

    @property
    def row_bytes(self) -> int:
        """Bytes of all views a token."""
        return sum(v.nbytes for v in self.views)

    @property
    def page_bytes(self) -> int:
        return self.row_bytes * self.grid

    def check(self, sequence: Sequence) -> None:
        """Raises ValueError naming the first leaf whose name, shape or dtype is not the layout's."""
        for kind, specs, arrays in (("section", self.sections, sequence.sections), ("open block", self.open, sequence.open)):
            if {s.name for s in specs} != set(arrays):
                raise ValueError(f"{kind}: expected {sorted(s.name for s in specs)}, found {sorted(arrays)}")
            for s in specs:
                a = arrays[s.name]
                if a.shape != s.shape or a.dtype != held(s.dtype):
                    raise ValueError(f"{kind} {s.name}: expected {held(s.dtype)} {s.shape}, found {a.dtype} {a.shape}")
        pages = -(-sequence.tokens.size // self.grid)
        if sequence.pages.size != pages or int(sequence.length) != sequence.tokens.size:
            raise ValueError(
                f"a sequence of {sequence.tokens.size} tokens has {pages} pages: found length {int(sequence.length)}, {sequence.pages.size} pages"
            )


@struct.dataclass
class Sequence:
    """Tokens, their pages and the state after them: an immutable value.

    tokens: int32 [length]. pages: int32 [ceil(length / grid)], numbers in the engine's pool: they own nothing, so a kept
    sequence is held and released through the engine. sections: name -> array as of the last block line. open: name -> array,
    the inputs of the rows past that line; past the length they may be anything. length: int32 scalar. stamps: int64 [pages], the pool's
    for these pages (PagePool.stamps): by them a sequence that was released is told from one that was not.
    """

    tokens: np.ndarray
    pages: np.ndarray
    length: np.ndarray
    sections: dict[str, Any]
    open: dict[str, Any]
    stamps: np.ndarray | None = None

    @classmethod
    def empty(cls, layout: Layout) -> Sequence:
        return cls(
            tokens=np.zeros(0, np.int32),
            pages=np.zeros(0, np.int32),
            length=np.int32(0),
            sections={s.name: jax.device_put(s.zeros()) for s in layout.sections},
            open={s.name: jax.device_put(s.zeros()) for s in layout.open},
            stamps=np.zeros(0, np.int64),
        )

    def cut(self, length: int, grid: int) -> Sequence:
        """The sequence of the first `length` tokens, which nothing needs to be computed for: it ends in the same open block.

        ValueError for any other length (a state cannot be rewound). The pages are the same ones, not held anew.
        """
        longest = int(self.length)
        line = longest // BLOCK * BLOCK
        if not line <= length <= longest:
            raise ValueError(f"a sequence of {longest} tokens can be cut to {line} to {longest}, not to {length}")
        pages = -(-length // grid)
        stamps = None if self.stamps is None else self.stamps[:pages]
        return self.replace(tokens=self.tokens[:length], pages=self.pages[:pages], length=np.int32(length), stamps=stamps)
