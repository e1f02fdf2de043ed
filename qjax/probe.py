"""The probe: what a forward's bits depend on here, found at the start in a few forwards. `qjax certify` looks longer and further."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qjax.bits import differing_bits, digest
from qjax.config import GRID, TOKEN
from qjax.forward import Forward
from qjax.pages import PagePool
from qjax.slot import Slot
from qjax.state import BLOCK, Sequence

ROWS = BLOCK + 18
"""Rows of the prompt that is cut up: past a block line, where steps read what a chunk and what steps themselves left."""
CUTS = (BLOCK - 5, 1, 4, 2, 16)
"""A prefill, then steps: to the block line in two of them, and past it in all widths but the 8."""


class Impure(ValueError):
    """The same forward gives other bits the second time: no cache can be exact."""


class Probed(NamedTuple):
    """The exactness level, and 32 hex digits of all bits of the whole prompt and of the one that is cut up."""

    level: str
    golden: str


def probe(forward: Forward, pool: PagePool) -> Probed:
    """Needs the pages of ROWS tokens and leaves them free. Raises Impure where not even the same call has the same bits."""
    tokens = _prompt(forward)
    whole = _run(forward, pool, tokens, ())
    if not _same(whole, _run(forward, pool, tokens, ())):
        raise Impure("the same prefill twice has different bits on this backend: expected none, so that a cache could be exact; nothing was started")
    cut = _run(forward, pool, tokens, CUTS)
    return Probed(TOKEN if _same(whole, cut) else GRID, _digest(whole, cut))


def golden(forward: Forward, pool: PagePool) -> str:
    """What `probe` gives as golden, where nobody asks for the level."""
    tokens = _prompt(forward)
    return _digest(*(_run(forward, pool, tokens, cuts) for cuts in ((), CUTS)))


def _prompt(forward: Forward) -> np.ndarray:
    shapes = forward.shapes
    return np.random.default_rng(0).integers(0, shapes.config.vocab, min(ROWS, shapes.longest), dtype=np.int32)


def _digest(whole: dict[str, np.ndarray], cut: dict[str, np.ndarray]) -> str:
    return digest({f"{kind} {name}": a for kind, run in (("whole", whole), ("cut", cut)) for name, a in run.items()})


def _run(forward: Forward, pool: PagePool, tokens: np.ndarray, cuts: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Logits of the last row, and all that a sequence keeps. cuts: rows of a prefill and of the steps after it; () for one prefill."""
    slot = Slot(forward, pool, Sequence.empty(forward.shapes.layout))
    try:
        first = min(cuts[0], tokens.size) if cuts else tokens.size
        while slot.length < first:
            n, shape = slot.plan(first - slot.length)
            hidden, _ = slot.prefill(tokens[slot.length : slot.length + n], shape)
        logits = slot.logits(hidden, n - 1)
        for n in cuts[1:]:
            rows = tokens[slot.length : slot.length + n]
            if rows.size:
                logits = slot.step(rows)[-1]
                slot.accept(rows)
        end = slot.freeze()
        rows = {name: pool.rows(name, end.pages, slot.length) for name in pool.views}
        return {"logits": logits, **rows, **{name: np.asarray(a) for name, a in (end.sections | end.open).items()}}
    finally:
        slot.close()


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return not any(differing_bits(a[name], b[name]) for name in a)
