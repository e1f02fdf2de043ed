"""The forward: the compiled programs called layer by layer with each layer's own weights.

Not one program a model with a scan over stacked weights: there XLA copies every layer's weights out of the stack before it
reads them, and on a CPU that copy is a third to a half of a decode step.
"""

from __future__ import annotations

import jax
import numpy as np

from qjax.model import weights
from qjax.programs import Programs
from qjax.state import Sequence


class Forward:
    """One model's forwards. Pool, scratch and rows are donated; S is read only. S and scratch: one for each GDN layer."""

    def __init__(self, programs: Programs, params):
        self.programs, self.shapes = programs, programs.shapes
        self._params = params
        self.top = {name: leaf for name, leaf in params.items() if name not in ("gdn", "attention")}
        # of every sequence that ends on a block line: one set of zeros for all of them
        self._no_inputs = {s.name: jax.device_put(s.zeros()) for s in programs.shapes.layout.open}
        self.layers = [(kind, jax.device_put(at), w) for kind, at, w in weights.layers(params, programs.shapes.config)]

    def chunk(self, pool, S, opened, table, tokens, start, n, marks):
        """n rows of a prefill from `start`, whole blocks. tokens: int32 [T], T a chunk's shape. Never crosses a page.

        marks: int32 [MARKS], block lines inside these rows at which the state is caught, counted in blocks from the line at or
        before `start`; -1 for none. Returns (hidden [T, D] after the final norm, pool, S, opened, caught), the last to be given
        to `caught`, or None where there is no mark.
        """
        rows, marked = len(tokens), marks.max() >= 0
        table, tokens, start, n, marks = jax.device_put((table, tokens, start, n, marks))  # once, not for every layer
        x, *angles = self.programs["embed", rows](self.top, tokens, start)
        states, scratch, caught = [], [], []
        for kind, at, w in self.layers:
            if kind == "gdn":
                i = len(states)
                x, state, after, there = self.programs["gdn chunk", rows](w, x, S[i], opened[i], start, n, marks)
                states.append(state)
                scratch.append(after)
                if marked:
                    caught.append(there)
                del there  # or the next layer's would be made while this one's still lie there
            else:
                x, pool = self.programs["attention", rows](w, x, pool, table, at, start, n, *angles)
        return self.programs["norm", rows](self.top, x), pool, tuple(states), tuple(scratch), tuple(caught) if marked else None

    def step(self, pool, S, opened, table, tokens, start, n):
        """n rows from `start`, all in one block: decode and verify. tokens: int32 [T], T a step's shape.

        Returns (x [T, D] before the final norm, pool, opened); `all_logits` makes its logits.
        """
        rows = len(tokens)
        table, tokens, start, n = jax.device_put((table, tokens, start, n))
        x, *angles = self.programs["embed", rows](self.top, tokens, start)
        scratch = []
        for kind, at, w in self.layers:
            if kind == "gdn":
                x, after = self.programs["gdn step", rows](w, x, S[len(scratch)], opened[len(scratch)], start, n)
                scratch.append(after)
            else:
                x, pool = self.programs["attention", rows](w, x, pool, table, at, start, n, *angles)
        return x, pool, tuple(scratch)

    def all_logits(self, x) -> np.ndarray:
        """Logits of a step's rows: float32 [T, V]."""
        return np.asarray(self.programs["logits", len(x)](self.top, x))

    def logits(self, hidden, row: int) -> np.ndarray:
        """Logits of one hidden row of a chunk: float32 [V]."""
        return np.asarray(self.programs["head", len(hidden)](self.top, hidden, np.full(2, row, np.int32)))[0]

    def close(self, S, opened) -> tuple[tuple, tuple]:
        """Each layer's S at the line that a full open block ends at, and the empty block past it."""
        gdn = (w for kind, _, w in self.layers if kind == "gdn")
        return tuple(zip(*(self.programs["close"](*one) for one in zip(gdn, S, opened, strict=True)), strict=True))

    def place(self, sequence: Sequence) -> tuple[tuple, tuple]:
        """Each layer's S and the open block's scratch with its inputs alone: what a prefill forward goes on from."""
        return self.programs["place"](sequence.sections, sequence.open)

    def reopen(self, sequence: Sequence) -> tuple[tuple, tuple]:
        """Each layer's S and the open block's scratch, what a step goes on from: its rows are computed again from their inputs."""
        return self.programs["reopen"](self._params, sequence.sections, sequence.open)

    def freeze(self, S, opened, rows: int) -> tuple[dict, dict]:
        """A sequence's sections and open inputs, copied out of a running one whose open block has this many rows."""
        inputs = self.programs["inputs"](opened, np.int32(rows)) if rows else dict(self._no_inputs)
        return self.programs["sections"](S, opened), inputs

    def caught(self, caught, which: int) -> tuple[dict, dict]:
        """A sequence's sections and open inputs at one of the marks of a chunk."""
        return self.programs["caught"](caught, np.int32(which)), dict(self._no_inputs)

    def copy_page(self, views, source: int, target: int) -> dict:
        """Copies one page's rows in every view of the pool."""
        return self.programs["copy_page"](views, np.int32(source), np.int32(target))
