"""A slot: the one place where a sequence runs. It owns the open block's scratch, and writes rows into pages of the pool."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import pairwise
from typing import Any

import numpy as np

from qjax.forward import Forward
from qjax.interrupts import deferred
from qjax.pages import PagePool
from qjax.programs import MARKS, STEPS
from qjax.state import BLOCK, Sequence


class Slot:
    """Runs one sequence forward; `freeze` gives its present state as a value. Holds its pages until `close`."""

    def __init__(self, forward: Forward, pool: PagePool, sequence: Sequence):
        layout = forward.shapes.layout
        layout.check(sequence)
        pool.check(sequence)
        self._forward, self._pool, self._grid = forward, pool, layout.grid
        self.tokens, self.pages = sequence.tokens.tolist(), sequence.pages.tolist()
        self._ahead = 0  # rows of the last step, until they are taken or not
        # the running state is made at the first forward: a step reads more of it than a prefill, and an answer of one token nothing
        self._from, self._S, self._opened = sequence, None, None
        pool.hold(self.pages)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def close(self) -> None:
        """Releases the pages and the state; the slot is done. A second time is nothing."""
        self._pool.release(self.pages)
        self.pages, self._ahead = [], 0
        self._from = self._S = self._opened = None

    def freeze(self) -> Sequence:
        """The state after `length` tokens as a value. Its pages are held by this slot only: hold them to keep it."""
        self._check_open()
        S, opened = (self._S, self._opened) if self._from is None else self._forward.place(self._from)
        return self._value(self.length, *self._forward.freeze(S, opened, self.length % BLOCK))

    def _start(self, reopen) -> None:
        """Makes the running state of the sequence that the slot began with, if no forward has yet."""
        if self._from is not None:
            (self._S, self._opened), self._from = reopen(self._from), None

    def _value(self, length: int, sections: dict, opened: dict) -> Sequence:
        pages = np.array(self.pages[: -(-length // self._grid)], np.int32)  # a page for rows that were not accepted stays out
        return Sequence(
            tokens=np.array(self.tokens[:length], np.int32),
            pages=pages,
            stamps=self._pool.stamps[pages],
            length=np.int32(length),
            sections=sections,
            open=opened,
        )

    def room(self) -> int:
        """Rows up to the end of the page, which no forward crosses."""
        return self._grid - self.length % self._grid

    def plan(self, rows: int) -> tuple[int, int]:
        """The next prefill forward when `rows` are left: (its real rows, its shape).

        The largest shape that is three quarters full: a forward of few rows costs its weights, one with padding its padding.
        """
        rows, shapes = min(rows, self.room()), self._forward.shapes
        allowed = [s for s in shapes.chunks if self.length % self._grid == 0 or not shapes.aligned(s)]
        shape = max((s for s in allowed if 4 * rows >= 3 * s), default=allowed[0])
        return min(rows, shape), shape

    @deferred()
    def prefill(self, tokens: Tokens[int], shape: int, marks: Tokens[int] = ()) -> tuple[Any, list[Sequence]]:
        """One prefill forward of `tokens`, as `plan` cut them: (hidden rows [shape, D], the sequence at each mark).

        marks: up to MARKS lengths, ascending, block lines inside these tokens: after their first row and before their end. The
        sequences are values as of `freeze`, whose pages are held by this slot only. ValueError, and no change, for what does not fit.
        """
        self._check_prefill(tokens, shape, marks)
        blocks = np.full(MARKS, -1, np.int32)
        blocks[: len(marks)] = [mark // BLOCK - self.length // BLOCK for mark in marks]
        rows = self._rows(tokens, shape)  # may copy a page, which gives the pool new handles
        self._start(self._forward.place)
        hidden, self._pool.views, self._S, self._opened, caught = self._forward.chunk(self._pool.views, self._S, self._opened, *rows, blocks)
        self._advance(tokens)
        return hidden, [self._value(mark, *self._forward.caught(caught, which)) for which, mark in enumerate(marks)]

    def _check_open(self) -> None:
        if self._from is None and self._S is None:
            raise RuntimeError(f"the slot of {self.length:,} tokens is closed: its pages may be another's by now")

    def _check_prefill(self, tokens, shape: int, marks) -> None:
        start, n, shapes = self.length, len(tokens), self._forward.shapes
        if shape not in shapes.chunks or (shapes.aligned(shape) and start % self._grid):
            raise ValueError(f"a prefill at {start} has the shape of one of {shapes.chunks}, the last one at a page's first row only: found {shape}")
        if not 1 <= n <= min(shape, self.room()):
            raise ValueError(f"a prefill at {start} of shape {shape} takes 1 to {min(shape, self.room())} rows, found {n}")
        inside = all(mark % BLOCK == 0 and start < mark < start + n for mark in marks)
        if len(marks) > MARKS or not inside or any(a >= b for a, b in pairwise(marks)):
            wanted = f"at most {MARKS} marks, ascending multiples of {BLOCK} between the two"
            raise ValueError(f"a prefill from {start} to {start + n} has {wanted}, found {[int(mark) for mark in marks]}")

    def logits(self, hidden, row: int) -> np.ndarray:
        """Logits of one hidden row of a prefill forward: float32 [V]."""
        return self._forward.logits(hidden, row)

    def prompt_step(self, rows: int) -> int:
        """Rows of the step that a prompt goes on with when `rows` are left, 0 where a prefill forward is due.

        A prefill forward has 64 rows at least: at a depth of 32,768 and 8 layers of the 0.8B widths it takes 255 ms, two steps 175.
        """
        return min(rows, self.verify_room()) if rows <= 2 * STEPS[-1] else 0

    def verify_room(self) -> int:
        """Rows that a step may take: it stays in its block, and a block never crosses a page."""
        return min(BLOCK - self.length % BLOCK, STEPS[-1])

    @deferred()
    def step(self, tokens: Tokens[int], logits: bool = True) -> np.ndarray | None:
        """Forwards 1 to `verify_room()` rows without taking them: logits float32 [rows, V]. `accept` moves the cursor over them.

        logits: False for rows of a prompt that more rows follow, whose logits (21 ms at the 0.8B vocabulary) nobody reads.
        """
        n = len(tokens)
        if not 1 <= n <= self.verify_room():
            raise ValueError(f"a step at {self.length} takes 1 to {self.verify_room()} rows, found {n}")
        shape = next(s for s in STEPS if s >= n)
        rows = self._rows(tokens, shape)
        self._start(self._forward.reopen if self.length % BLOCK else self._forward.place)
        x, self._pool.views, self._opened = self._forward.step(self._pool.views, self._S, self._opened, *rows)
        self._ahead = n
        self._mark(self.length + n)
        return self._forward.all_logits(x)[:n] if logits else None

    @deferred()
    def accept(self, tokens: Tokens[int]) -> None:
        """Takes the first rows of the last step: `tokens` are theirs. The rest is as if never forwarded: only the cursor moves."""
        if len(tokens) > self._ahead:
            raise ValueError(f"the last step forwarded {self._ahead} rows that are not taken, found {len(tokens)} tokens")
        if not self._ahead:
            return  # the page's mark may be another's by now, who has written on
        self._advance(tokens)
        if len(tokens) and self.length % BLOCK == 0:
            self._S, self._opened = self._forward.close(self._S, self._opened)

    def _advance(self, tokens) -> None:
        self.tokens.extend(int(t) for t in tokens)
        self._ahead = 0
        self._mark(self.length)

    def _mark(self, end: int) -> None:
        """Rows of the last page up to position `end` are this slot's: nobody else may write them in place."""
        self._pool.fill[self.pages[-1]] = end - (len(self.pages) - 1) * self._grid

    def _rows(self, tokens, shape: int):
        """The arguments of a forward of `tokens`, with a page of this slot's own to write in."""
        self._check_open()
        longest = self._forward.shapes.longest
        if self.length + len(tokens) > longest:
            raise ValueError(f"expected at most {longest:,} tokens in a sequence, found {self.length:,} and {len(tokens):,} more")
        self._own_last_page()
        table = np.zeros(self._forward.shapes.sequence_pages, np.int32)
        table[: len(self.pages)] = self.pages
        padded = np.zeros(shape, np.int32)
        padded[: len(tokens)] = tokens
        return table, padded, np.int32(self.length), np.int32(len(tokens))

    def needs_page(self) -> bool:
        """Whether the next forward takes a page from the pool: at a grid line, and where somebody else has the last page or wrote on in it."""
        row = self.length % self._grid
        if row == 0:
            return len(self.pages) * self._grid == self.length
        last = self.pages[-1]
        return self._pool.fill[last] != row and self._pool.holders[last] != 1

    def _own_last_page(self) -> None:
        """A new page at a grid line; a copy where somebody else holds the last page and has written past this length."""
        if not self.needs_page():
            return
        page, row = self._pool.take(), self.length % self._grid
        if row == 0:
            self.pages.append(page)
            return
        last = self.pages[-1]
        self._pool.views = self._forward.copy_page(self._pool.views, last, page)
        self._pool.release([last])
        self.pages[-1] = page
        self._pool.fill[page] = row
