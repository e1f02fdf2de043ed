"""A modelled drive and the clock of its machine: what is written takes time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

READ, WRITE = 7.35e9, 4.3e9
"""Bytes a second that are read and written directly, as the chapter measured them (13.7)."""
SUSTAINED, BURST = 0.8e9, 20e9
"""Bytes a second that are written once the drive's own write cache is full (the chapter's 0.3 to 1.3e9), and its bytes (16 to 24e9)."""


class Drive:
    """now: seconds. What was handed over to be written is written one after another, as time passes."""

    def __init__(self):
        self.now = 0.0
        self._coming: deque[tuple[float, Callable[[], None]]] = deque()
        self._free = self._filled = 0.0  # when all of it is written, and the bytes that are in the drive's own cache then

    def until(self, now: float) -> None:
        """Lets time pass; what was written meanwhile is told."""
        while self._coming and self._coming[0][0] <= now:
            self.step()
        self.now = max(self.now, now)

    def advance(self, seconds: float) -> None:
        self.until(self.now + seconds)

    def step(self) -> None:
        """Lets the next thing be written."""
        ends, told = self._coming.popleft()
        self.now = max(self.now, ends)
        told()

    @property
    def writes(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._coming)

    @property
    def next(self) -> float:
        """When the next thing will have been written."""
        return self._coming[0][0]

    def write(self, nbytes: int, told: Callable[[], None]) -> None:
        """Has so many bytes written, after all before them. told: called when they are."""
        begin = max(self.now, self._free)
        self._filled = max(0.0, self._filled - SUSTAINED * (begin - self._free))
        fast = min(float(nbytes), (BURST - self._filled) * WRITE / (WRITE - SUSTAINED))  # it empties while it fills
        self._filled += fast * (1 - SUSTAINED / WRITE)
        self._free = begin + fast / WRITE + (nbytes - fast) / SUSTAINED
        self._coming.append((self._free, told))
