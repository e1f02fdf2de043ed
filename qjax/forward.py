"""The forward: the compiled programs called layer by layer with each layer's own weights.

Not one program a model with a scan over stacked weights: there XLA copies every layer's weights out of the stack before it
reads them, and on a CPU that copy is a third to a half of a decode step.
"""

from __future__ import annotations

import jax
import numpy as np

from qjax.model import weights
from qjax.programs import Programs


class Forward:
    """One model's forwards. Pool, scratch and rows are donated; S, an array for each GDN layer, is read only."""

    def __init__(self, programs: Programs, params):
        self.programs, self.shapes = programs, programs.shapes
        self._params = params
        self.top = {name: leaf for name, leaf in params.items() if name not in ("gdn", "attention")}
        self.layers = [(kind, jax.device_put(at), w) for kind, at, w in weights.layers(params, programs.shapes.config)]

    def chunk(self, pool, S, opened, table, tokens, start, n):
        """n rows of a prefill from `start`, whole blocks. tokens: int32 [T], T a chunk's shape. Never crosses a page.

        Returns (hidden [T, D] after the final norm, pool, S, opened).
        """
        rows = len(tokens)
        table, tokens, start, n = jax.device_put((table, tokens, start, n))  # once, not for every layer
        x, *angles = self.programs["embed", rows](self.top, tokens, start)
        states = []
        for kind, at, w in self.layers:
            if kind == "gdn":
                x, state, opened = self.programs["gdn chunk", rows](w, x, S[len(states)], opened, at, start, n)
                states.append(state)
            else:
                x, pool = self.programs["attention", rows](w, x, pool, table, at, start, n, *angles)
        return self.programs["norm", rows](self.top, x), pool, tuple(states), opened

    def step(self, pool, S, opened, table, tokens, start, n):
        """n rows from `start`, all in one block: decode and verify. tokens: int32 [T], T a step's shape.

        Returns (logits float32 [T, V], pool, opened).
        """
        rows = len(tokens)
        table, tokens, start, n = jax.device_put((table, tokens, start, n))
        x, *angles = self.programs["embed", rows](self.top, tokens, start)
        states = iter(S)
        for kind, at, w in self.layers:
            if kind == "gdn":
                x, opened = self.programs["gdn step", rows](w, x, next(states), opened, at, start, n)
            else:
                x, pool = self.programs["attention", rows](w, x, pool, table, at, start, n, *angles)
        return self.programs["logits", rows](self.top, x), pool, opened

    def logits(self, hidden, row: int) -> np.ndarray:
        """Logits of one hidden row of a chunk: float32 [V]."""
        return np.asarray(self.programs["head", len(hidden)](self.top, hidden, np.full(2, row, np.int32)))[0]

    def close(self, S, opened) -> tuple[tuple, dict]:
        """Each layer's S at the line that a full open block ends at, and the empty block past it."""
        return self.programs["close"](self._params, S, opened)

    def reopen(self, sections, inputs) -> tuple[tuple, dict]:
        """Each layer's S and the open block's scratch, from a sequence's sections and open inputs."""
        names = ("gdn.S", "gdn.conv", "gdn.u", "gdn.b", "gdn.a")
        kept = sections | inputs
        return self.programs["unstack"](kept["gdn.S"]), self.programs["reopen"](self._params, *(kept[name] for name in names))

    def freeze(self, S, opened, rows: int) -> tuple[dict, dict]:
        """A sequence's sections and open inputs, copied out of a running one whose open block has this many rows."""
        kept = self.programs["freeze"](opened, np.int32(rows))
        return {"gdn.S": self.programs["stack"](*S), "gdn.conv": kept.pop("gdn.conv")}, kept

    def copy_page(self, views, source: int, target: int) -> dict:
        """Copies one page's rows in every view of the pool."""
        return self.programs["copy_page"](views, np.int32(source), np.int32(target))
