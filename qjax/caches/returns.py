"""Returns: when requests go on with a session again, and so which session is worth its memory least."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

KINDS = 3
"""Sessions of one turn, of two or three, and of more: what has gone on before goes on again."""
POWERS = 24
SOON = (0.0, *(8 * 0.5 ** (power + 1) for power in range(1, POWERS)))
"""What is taken for known before any has come back: of sixteen sessions four, most of them at once and ever fewer later."""
GONE = 512
"""Sessions that are gone, of which it is still seen that they would have been gone on with: 100 bytes each."""


class Returns:
    """Ages are in requests since a session's last turn, in powers of two."""

    def __init__(self, grid: int, first: Sequence[float] = SOON):
        """first: returns by power of age, of sixteen sessions of each kind, before any has come."""
        self._grid = grid
        self._turns, self._back = [16.0] * KINDS, [list(first) for _ in range(KINDS)]
        self._gone: dict[bytes, tuple[int, int]] = {}  # (turns, time of the last)

    def turn(self, turns: int) -> None:
        """A session has had so many turns now."""
        self._turns[self._kind(turns)] += 1

    def back(self, turns: int, age: int) -> None:
        """A request went on with a session of so many turns."""
        self._back[self._kind(turns)][min(age.bit_length(), POWERS - 1)] += 1

    def gone(self, keys: np.ndarray, tenant: str, turns: int, at: int) -> None:
        """keys: the session's prompt."""
        line = keys.size // self._grid * self._grid
        if line:
            self._gone.pop(name := self._name(keys, tenant, line), None)
            self._gone[name] = turns, at
            if len(self._gone) > GONE:
                del self._gone[next(iter(self._gone))]

    def find_gone(self, keys: np.ndarray, tenant: str, after: int) -> tuple[int, int] | None:
        """(turns, time of the last) of the longest gone session that a prompt goes on with, longer than so many tokens."""
        if not self._gone:
            return None
        lines = range(keys.size // self._grid * self._grid, after, -self._grid)
        found = next((name for name in (self._name(keys, tenant, line) for line in lines if line) if name in self._gone), None)
        return None if found is None else self._gone.pop(found)

    def _name(self, keys: np.ndarray, tenant: str, line: int) -> bytes:
        """Of a session whose last whole page ends at a line. By that page alone: 1 MiB of keys would take a millisecond at every lookup."""
        page = tenant.encode("utf-8", "surrogatepass") + b"\0" + keys[line - self._grid : line].tobytes()
        return line.to_bytes(8, "little") + hashlib.blake2b(page, digest_size=16).digest()

    def worth(self, turns: int, age: int) -> float:
        """Returns of such a session per request that it is kept for, for as long as keeps this highest."""
        kind = self._kind(turns)
        back, power = self._back[kind], min(age.bit_length(), POWERS - 1)
        first = 1 << power - 1 if power else 0
        part = (age - first) / ((1 << power) - first)
        left = self._turns[kind] - sum(back[:power]) - part * back[power]
        coming, at, best, gain, kept = (1 - part) * back[power], age, 0.0, 0.0, 0.0
        for later in range(power, POWERS):
            kept += ((1 << later) - at) * max(left - coming / 2, 1e-9)
            gain, left, at = gain + coming, left - coming, 1 << later
            best = max(best, gain / kept)
            coming = back[later + 1] if later + 1 < POWERS else 0.0
        return best

    @staticmethod
    def _kind(turns: int) -> int:
        return min(turns.bit_length(), KINDS) - 1
