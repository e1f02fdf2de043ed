"""Reach: where a prompt can start on a kept state, at each exactness level."""

from __future__ import annotations

from typing import NamedTuple

from qjax.config import GRID
from qjax.state import BLOCK


class Reach(NamedTuple):
    """start: tokens that need no forward. whole: nothing is left to forward. exact: what follows has a cold run's bits.

    The later start is the better one, then the whole prompt, then the exact one.
    """

    start: int
    whole: bool
    exact: bool


def reach(length: int, agrees: int, prompt: int, *, logits: bool, tainted: bool, level: str, grid: int) -> Reach | None:
    """Where a prompt of `prompt` tokens can start on a state after `length` tokens, of which the first `agrees` are the prompt's.

    logits: the state has its last token's, without which a whole prompt cannot be served. tainted: at level grid, that a row below
    was not written by a prefill on the grid.

    At level token a state serves every length in its open block. At level grid its own alone, because a forward that starts off a
    grid line computes other bits than the cold one over that chunk: off a line the end of a prompt serves that whole prompt only,
    and a tainted state a session resume, which is held to the greedy gate.
    """
    if length == prompt == agrees and logits:
        return Reach(length, True, not tainted)
    most = min(length, agrees, prompt - 1)
    if level == GRID:
        return Reach(length, False, not tainted) if most == length and (tainted or length % grid == 0) else None
    return Reach(most, False, True) if most >= length // BLOCK * BLOCK else None
