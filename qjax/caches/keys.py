"""Key ids: what a cache compares. A token's own id, or in the rows of an image an id of its pixels."""

from __future__ import annotations

import numpy as np

STEP = 4096
"""Keys compared at a time: two long sequences that part early are not read to their end."""


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements of two id arrays agree, compared element by element."""
    shared = min(a.size, b.size)
    for start in range(0, shared, STEP):
        differs = a[start : min(start + STEP, shared)] != b[start : min(start + STEP, shared)]
        if differs.any():
            return start + int(differs.argmax())
    return shared
