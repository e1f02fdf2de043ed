"""Driving a slot by hand: every row's logits, and all that a sequence keeps, on the host."""

import jax
import numpy as np

from qjax.engine import Engine
from qjax.pages import PagePool
from qjax.slot import Slot
from qjax.state import BLOCK, Sequence


def new_pool(engine: Engine) -> PagePool:
    return PagePool(engine.layout, engine.pool.pages)


def new_slot(engine: Engine, pool: PagePool, sequence: Sequence | None = None) -> Slot:
    """A slot that runs the engine's programs on a pool of the test's own."""
    return Slot(engine.forward, pool, engine.empty() if sequence is None else sequence)


def kept(pool: PagePool, sequence: Sequence) -> dict:
    """Tokens, sections, open block and the rows of every view, in the order of the tokens: what must not depend on the way there."""
    length = int(sequence.length)
    pool.layout.check(sequence)
    arrays = jax.tree.map(np.array, {"sections": sequence.sections, "open": sequence.open})
    rows = {v.name: pool.rows(v.name, sequence.pages, length) for v in pool.layout.views}
    return arrays | {"tokens": np.array(sequence.tokens), "rows": rows}


def prefill(slot: Slot, tokens) -> np.ndarray:
    """Prefill forwards as the slot plans them; the last row's logits."""
    done = 0
    while done < len(tokens):
        n, shape = slot.plan(len(tokens) - done)
        hidden, _ = slot.prefill(tokens[done : done + n], shape)
        done += n
    return slot.logits(hidden, n - 1)


def decode(slot: Slot, tokens) -> np.ndarray:
    """One row a forward: logits [len(tokens), V]."""
    logits = []
    for token in tokens:
        logits.append(slot.step([token])[0])
        slot.accept([token])
    return np.stack(logits)


def cold(engine: Engine, tokens) -> dict:
    """What a sequence of these tokens keeps, computed from nothing in a pool of its own."""
    pool = new_pool(engine)
    slot = new_slot(engine, pool)
    if len(tokens):
        prefill(slot, tokens)
    return kept(pool, slot.freeze())


def row_logits(slot: Slot, hidden, n: int) -> np.ndarray:
    """Logits of the first n rows of a prefill forward: float32 [n, V]."""
    return np.stack([slot.logits(hidden, row) for row in range(n)])


def chunk_shapes(slot: Slot) -> tuple[int, ...]:
    """Rows of the prefill forwards that may begin where the slot is."""
    shapes = slot._forward.shapes
    return tuple(s for s in shapes.chunks if slot.length % shapes.layout.grid == 0 or not shapes.aligned(s))


def block_room(slot: Slot) -> int:
    return BLOCK - slot.length % BLOCK


def run(engine: Engine, tokens, sequence=None, **more) -> tuple[dict, np.ndarray]:
    """engine.prefill, its sequence released again: (what it kept, logits)."""
    end, logits = engine.prefill(tokens, sequence, **more)
    engine.release(end)
    return kept(engine.pool, end), logits
