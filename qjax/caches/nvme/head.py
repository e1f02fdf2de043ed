"""The head of a restore: the pages that the pool has already, which are held instead of read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from qjax.caches.keys import common
from qjax.state import Sequence


class Head(NamedTuple):
    """Whole pages in the pool with which a prompt begins, in a cold run's bits. pages: int32 [n]. tokens: int32 [n * grid]."""

    pages: np.ndarray
    tokens: np.ndarray


NONE = Head(np.zeros(0, np.int32), np.zeros(0, np.int32))


def longest(there: Iterable[tuple[np.ndarray, Sequence]], keys: np.ndarray, grid: int) -> Head:
    """The longest head of a prompt that is there. there: key ids and rows in a cold run's bits. keys: int64, the prompt's up to where it starts."""
    agrees = ((min(common(of, keys), int(sequence.length)) // grid, sequence) for of, sequence in there)
    number, sequence = max(agrees, key=lambda found: found[0], default=(0, None))
    return Head(sequence.pages[:number], sequence.tokens[: number * grid]) if number else NONE
