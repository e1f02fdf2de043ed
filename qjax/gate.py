"""The greedy gate: what a session resume at level grid is held to, where bits are not promised."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Gate(NamedTuple):
    """tokens: that were compared. near_tie: where the texts part, and the cold run's logits of the two tokens are within one bfloat16 ulp.

    failed: where they part although they are not. Both are positions in the answer, None where there is none. What comes after the
    texts parted is two answers and is not compared.
    """

    tokens: int
    near_tie: int | None = None
    failed: int | None = None


def ulp(value: float) -> float:
    """The distance from a float to the next one of bfloat16 above its magnitude; below the normal numbers, theirs."""
    return 2.0 ** (max(math.frexp(value)[1] - 1, -126) - 7)


def greedy_gate(cold: list[int], logits: np.ndarray, warm: list[int]) -> Gate:
    """Compares two greedy answers. logits: float32 [len(cold), V], from which the cold run drew its tokens.

    An answer that is a beginning of the other passes: one was given fewer tokens. A stop token belongs in both.
    """
    compared = min(len(cold), len(warm))
    at = next((i for i in range(compared) if cold[i] != warm[i]), None)
    if at is None:
        return Gate(compared)
    best = float(logits[at, cold[at]])
    near = best - float(logits[at, warm[at]]) <= ulp(best)
    return Gate(at + 1, near_tie=at) if near else Gate(at + 1, failed=at)
