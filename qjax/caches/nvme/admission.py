"""Admission: which lines of a prompt get an anchor on NVMe. Decided before the prefill runs, from what earlier prefills forwarded."""

from __future__ import annotations

import numpy as np

from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.writer import Writer
from storage import Entry, Storage

FIRST = 4
"""Lines below the user message of a session's first long request: the next session with this head parts there."""
LINES = 2**17
"""Lines whose counts are kept, the last ones: 128 million tokens' on a grid of 1,024, 3 MB."""
BOOK = "b-"


class Admission:
    """Counts every line that a prefill forwards cold; a line counted `admit_after` times is worth an anchor."""

    def __init__(self, grid: int, admit_after: int, least: int):
        """least: tokens of a prompt that has anything written."""
        self._grid, self._after, self._least = grid, admit_after, least
        self._counts: dict[str, int] = {}  # in the order of the last use
        self._book = self._counted = 0
        self._said: tuple[int, dict[str, int]] = 0, {}  # what the last book says

    def lines(self, chain: Chain, start: int, *, first: bool, user: int | None, branch: int | None) -> set[int]:
        """Lengths, above `start`, at which a prompt that is about to be forwarded from there gets an anchor. Counts its lines.

        first: it is its session's first request. user: where its last user message starts, None for its end. branch: how far an earlier
        prompt agrees with it and goes on differently.
        """
        size, grid = chain.keys.size, self._grid
        if size < self._least:
            return set()
        forwarded = range(start // grid + 1, size // grid + 1)
        admitted = [number for number in forwarded if self._count(chain.line(number)) >= self._after]
        chosen = set(admitted[-1:])
        if first:
            last = (size if user is None else user) // grid
            chosen |= set(range(max(1, last - FIRST + 1), last + 1))
        if branch is not None:
            chosen.add(branch // grid)
        return {number * grid for number in chosen if number in forwarded}

    def _count(self, line: str) -> int:
        count = self._counts[line] = self._counts.pop(line, 0) + 1
        self._counted += 1
        if len(self._counts) > LINES:
            del self._counts[next(iter(self._counts))]
        return count

    def counted(self, line: str) -> int:
        """Prompts that forwarded a line cold."""
        return self._counts.get(line, 0)

    def load(self, storage: Storage) -> dict[str, int]:
        """Takes over the counts of the newest book in the storage; the hits of anchors, by key, that it has beside them."""
        books = sorted((key for key in storage.entries() if key.startswith(BOOK)), key=_number)
        for key in reversed(books):
            entry = storage.find(key)
            size = min(entry.nbytes // (16 + 8), LINES)
            arrays = {"lines": np.zeros((size, 16), np.uint8), "counts": np.zeros(size, np.int64)}
            if storage.get([(key, arrays)]):
                self._counts = {bytes(line).hex(): int(n) for line, n in zip(arrays["lines"], arrays["counts"], strict=True)}
                self._book = _number(key)
                hits = entry.fields.get("hits", {})
                return {k: n for k, n in hits.items() if isinstance(n, int) and n > 0} if isinstance(hits, dict) else {}
        return {}

    def save(self, storage: Storage, writer: Writer, hits: dict[str, int]) -> None:
        """Has a new book written, where it differs from the last one and the staging has room, and the older ones removed once it is there."""
        said, last = (self._counted, hits), f"{BOOK}{self._book}"
        if said == self._said or writer.pending(last) is not None or not writer.has_room(24 * len(self._counts)):
            return
        self._said = said
        lines = np.frombuffer(bytes.fromhex("".join(self._counts)), np.uint8).reshape(-1, 16)
        counts = np.array(list(self._counts.values()), np.int64)
        self._book += 1

        def done(entry: Entry | None) -> None:
            for key in [key for key in storage.entries() if key.startswith(BOOK) and entry and _number(key) < _number(entry.key)]:
                storage.drop(key)

        writer.put(f"{BOOK}{self._book}", {"lines": lines, "counts": counts}, {"hits": hits}, done=done)


def _number(key: str) -> int:
    digits = key.removeprefix(BOOK)
    return int(digits) if digits.isdigit() else 0
