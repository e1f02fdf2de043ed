"""Row purity, measured: the bits of a row may depend on the tokens before it and on nothing else.

One prompt is run under many cuts, and logits of every row, sections, open block and rows are compared with one run's, bit by
bit. Controls resume with one leaf zeroed and must differ. What holds sets the level:

  token   a resume is bit-exact at every token
  grid    only on the grid lines of a prefill, by the same programs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qjax.bits import differing_bits
from qjax.config import GRID, TOKEN
from qjax.engine import Engine
from qjax.model.qwen3_5 import head_rows
from qjax.programs import STEPS
from qjax.slot import Slot
from qjax.state import BLOCK, Sequence

HEAD_ROWS = 16
NONE = "none"
"""The level where not even the grid's promise holds."""


@dataclass(frozen=True)
class Check:
    """One comparison. rows: rows whose logits were compared. level: the weakest level that promises 0 differing bits.

    hit: for a tier's check, that the state came from it. near_ties: for one that is held to the greedy gate, how many differences it
    allowed.
    """

    name: str
    rows: int
    differing_bits: int
    level: str
    hit: bool | None = None
    near_ties: int | None = None


@dataclass(frozen=True)
class Certificate:
    """checks: what was compared. controls: name -> differing bits, each of which must be above 0."""

    checks: tuple[Check, ...]
    controls: dict[str, int]

    @property
    def control_failed(self) -> bool:
        """True when every control differs, as it must: the comparison can see a wrong state."""
        return all(self.controls.values())

    @property
    def level(self) -> str:
        broken = {c.level for c in self.checks if c.differing_bits}
        return NONE if GRID in broken or not self.control_failed else GRID if broken else TOKEN


Outcome = dict[str, np.ndarray]
"""logits [rows, V] from row `first` on, and the end state's leaves by name."""


def prompt(engine: Engine, rows: int) -> np.ndarray:
    """Seeded token ids: int32 [rows]."""
    return np.random.default_rng(0).integers(0, engine.model.tokenizer.size, rows, dtype=np.int32)


def run(engine: Engine, tokens: np.ndarray, cut: list[int], sequence: Sequence | None = None, draft: Callable | None = None) -> Outcome:
    """Forwards `tokens` in pieces of `cut` rows, from a sequence's end or from nothing; pieces of up to 16 rows as steps.

    draft: (position, right rows) -> rows to forward as one verify block, of which those that equal the right ones are taken.
    """
    slot = engine.open(sequence)
    try:
        logits = list(_forward(engine, slot, tokens, cut, draft))
        end = slot.freeze()
        return {"logits": np.concatenate(logits), **leaves(engine, end)}
    finally:
        slot.close()


def leaves(engine: Engine, sequence: Sequence) -> Outcome:
    """A sequence's sections, open block and rows on the host, by name."""
    kept = {name: np.asarray(a) for name, a in (sequence.sections | sequence.open).items()}
    return kept | {name: engine.pool.rows(name, sequence.pages, int(sequence.length)) for name in engine.pool.views}


def _forward(engine: Engine, slot: Slot, tokens, cut, draft) -> Iterator[np.ndarray]:
    head = partial(jax.jit(head_rows), engine.model.params)
    for piece in cut:
        while piece:
            rest = tokens[slot.length : slot.length + piece]
            if piece <= STEPS[-1]:
                rows = rest[: slot.verify_room()]
                tried = rows if draft is None else draft(slot.length, rows)
                right = int(np.argmin(np.append(tried == rows, False)))
                logits = slot.step(tried)
                slot.accept(rows[:right])
                yield logits[:right]
                piece -= right
            else:
                n, shape = slot.plan(piece)
                hidden, _ = slot.prefill(rest[:n], shape)
                for first in range(0, n, HEAD_ROWS):
                    at = np.minimum(first + np.arange(HEAD_ROWS, dtype=np.int32), n - 1)
                    yield np.asarray(head(hidden, at))[: n - first]
                piece -= n


def compare(a: Outcome, b: Outcome) -> int:
    """Differing bits of two outcomes over their common last rows of logits, and all leaves."""
    rows = min(len(a["logits"]), len(b["logits"]))
    return sum(differing_bits(a[n][-rows:], b[n][-rows:]) if n == "logits" else differing_bits(a[n], b[n]) for n in a)


def cuts(rows: int, grid: int) -> dict[str, list[int]]:
    """Ways to cut `rows` tokens (more than a grid and a half block) into forwards, by name."""
    rest = rows - grid
    ones = min(100, rest)
    odd = min(777, grid - 10)
    tail = rows - odd - 5
    return {
        "chunks of 256": [256] * (rows // 256) + [rows % 256],
        "chunks of 64": [64] * (rows // 64) + [rows % 64],
        "odd chunks across pages": [100, grid - 24, rows - 76 - grid],
        "single tokens": [grid, rest - ones] + [1] * ones,
        "blocks of 5": [grid] + [5] * (rest // 5) + [rest % 5],
        "blocks of 2 to 16": [grid - 7, *_widths(rest + 7)],
        "odd, single, pairs": [odd, 1, 1, 3, *([tail // 2] if tail // 2 > 16 else []), *[2] * ((tail - tail // 2) // 2)],
    }


def _widths(rows: int) -> Iterator[int]:
    width = 2
    while rows:
        yield min(width, rows)
        rows -= min(width, rows)
        width = 2 + (width - 1) % 15


def certify(engine: Engine, rows: int | None = None, progress: Callable[[str], None] = lambda name: None) -> Certificate:
    """Runs every check and control in this process. rows: of the prompt, a grid and 300 unless told."""
    grid = engine.layout.grid
    tokens = prompt(engine, rows or grid + 300)
    rows = tokens.size
    natural = [grid, rows - grid]
    want = run(engine, tokens, natural)
    checks, controls = [], {}

    def check(name: str, level: str, got: Outcome):
        checks.append(Check(name, len(got["logits"]), compare(want, got), level))

    progress("the same call twice")
    check("the same call twice", GRID, run(engine, tokens, natural))
    line, _ = engine.prefill(tokens[:grid])
    off, _ = engine.prefill(tokens[: grid + 100])
    try:
        progress("resumed")
        check("resumed at a grid line", GRID, run(engine, tokens, [rows - grid], line))
        check("resumed off every line", TOKEN, run(engine, tokens, [rows - grid - 100], off))
        for name, cut in cuts(rows, grid).items():
            progress(name)
            cut = [*cut, rows - sum(cut)] if sum(cut) < rows else cut
            check(name, TOKEN, run(engine, tokens, cut))
        progress("drafts")
        for name, draft in DRAFTS.items():
            check(f"drafts {name}", TOKEN, run(engine, tokens, [STEPS[-1]] * ((rows - grid) // STEPS[-1]) + [(rows - grid) % STEPS[-1]], line, draft))
        for name in (*off.sections, *off.open):
            progress(f"control: {name}")
            zeroed = {kind: {n: jnp.zeros_like(a) if n == name else a for n, a in getattr(off, kind).items()} for kind in ("sections", "open")}
            controls[f"{name} zeroed"] = compare(want, run(engine, tokens, [rows - grid - 100], replace(off, **zeroed)))
        for view in engine.pool.views:
            progress(f"control: {view}")
            controls[f"{view} zeroed"] = _control_rows(engine, want, tokens, grid, view)
    finally:
        engine.release(line)
        engine.release(off)
    return Certificate(tuple(checks), controls)


def _control_rows(engine: Engine, want: Outcome, tokens, grid: int, view: str) -> int:
    """Differing bits where one view's first page is zeroed under a sequence that goes on from it."""
    line, _ = engine.prefill(tokens[:grid])
    try:
        pool = engine.pool
        pool.views = pool.views | {view: pool.views[view].at[int(line.pages[0])].set(0)}
        got = run(engine, tokens, [tokens.size - grid], line)
        return differing_bits(want["logits"][-len(got["logits"]) :], got["logits"])
    finally:
        engine.release(line)


def _wrong_from(first: int, rows: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(rows)) < first, rows, np.maximum(rows, 1) - 1 + (rows == 0)).astype(np.int32)


DRAFTS: dict[str, Callable] = {
    "right": lambda position, rows: rows,
    "half right": lambda position, rows: _wrong_from(len(rows) // 2 + 1, rows),
    "wrong": lambda position, rows: _wrong_from(1, rows),
}
"""The first row of a verify block is the token just sampled, so it is always right."""

PROCESS_ROWS = 5 * BLOCK + 10
"""Rows of the prompt that other processes run: their logits travel in a file."""


def process_outcome(engine: Engine) -> Outcome:
    """What every process must compute: some rows as chunks, the last ones as steps."""
    return run(engine, prompt(engine, PROCESS_ROWS), [PROCESS_ROWS - 30, 16, *[1] * 14])
