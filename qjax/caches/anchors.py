"""Anchors: the state at one length, and which of them to keep when there is no room for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qjax.state import BLOCK, Sequence

NEWEST = 4
"""Anchors at the end of a session that are never thinned out: the next turn resumes near the end."""


@dataclass(frozen=True, eq=False)
class Anchor:
    """kind: "grid", "end", "prompt", "branch", "user" or "history". The pages of its sequence are held by its session.

    logits: float32 [V] of the last token, where they are known. tainted: at level grid, that a row or the state was not made by a
    prefill on the grid, but by a step, or after one.
    """

    kind: str
    sequence: Sequence
    logits: np.ndarray | None = None
    tainted: bool = False

    @property
    def length(self) -> int:
        return int(self.sequence.length)

    @property
    def line(self) -> int:
        """The block line below: at level token the anchor serves every length from there to its own."""
        return self.length // BLOCK * BLOCK

    @property
    def state(self) -> int:
        """Equal for anchors of several sessions that keep the same arrays."""
        return id(self.sequence.sections)

    def arrays(self) -> list:
        """What it keeps alive. At a block line the open inputs are zeros that all anchors share."""
        open_ = self.sequence.open.values() if self.length > self.line else ()
        return [*self.sequence.sections.values(), *open_, *([] if self.logits is None else [self.logits])]

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of its arrays, by their ids: asked for at every step of a request, where a jax array takes 2 microseconds to tell them."""
        return {id(a): a.nbytes for a in self.arrays()}


def live_bytes(anchors: Iterable[Anchor]) -> int:
    """Bytes that anchors keep alive, arrays that several of them share counted once."""
    sizes = {}
    for anchor in anchors:
        sizes |= anchor.sizes
    return sum(sizes.values())


def superseded(anchors: list[Anchor]) -> list[Anchor]:
    """Ends of prompts and generations, and history boundaries, that a later one of their kind among these has passed."""
    later = {a.kind: a for a in anchors}
    return [a for a in anchors if a.kind in ("prompt", "end", "history") and later[a.kind] is not a]


def newest(anchors: list[Anchor]) -> list[Anchor]:
    """The NEWEST of a session's anchors, ascending, which do not count the superseded ones."""
    passed = superseded(anchors)
    return [a for a in anchors if a not in passed][-NEWEST:]


def last_clean(anchors: Iterable[Anchor]) -> Anchor | None:
    """The longest of a sequence's anchors below which all rows have a cold run's bits."""
    return max((a for a in anchors if not a.tainted), key=lambda a: a.length, default=None)


class Depths:
    """How far before a session's end requests parted from it, in powers of two: what the thinning learns from."""

    def __init__(self):
        self.counts: Counter[int] = Counter()

    def add(self, depth: int) -> None:
        self.counts[int(depth).bit_length()] += 1

    def share(self, nearest: int, farthest: int) -> float:
        """The share of requests expected to part at nearest <= depth < farthest; before any came, alike in every power of two."""
        total = sum(self.counts.values()) + 32

        def below(depth: int) -> float:
            power = int(depth).bit_length()
            first, width = (1 << power - 1, 1 << power - 1) if power else (0, 1)
            full = sum(n for p, n in self.counts.items() if p < power) + power
            return (full + (self.counts[power] + 1) * (depth - first) / width) / total

        return below(farthest) - below(nearest)


def thin(anchors: list[Anchor], budget: int, depths: Depths, end: int | None = None, few: bool = False) -> list[Anchor]:
    """Anchors of one session, ascending, without those that must go for the rest to fit a budget in bytes.

    Superseded ones go first. Then always the one whose loss costs least: the share of requests that resume there times the tokens
    they would read again. The newest ones stay; with few, one of all is enough. end: the session's length, if it goes on past the last.
    """
    kept, stay = list(anchors), [] if few else newest(anchors)
    end = (kept[-1].length if kept else 0) if end is None else end
    while live_bytes(kept) > budget and len(kept) > max(1, len(stay)):
        lengths = [0, *(a.length for a in kept), end + 1]
        costs = {  # lengths[i + 1] is kept[i]'s: it serves those that part there or later, and before the next
            i: depths.share(end - lengths[i + 2] + 1, end - lengths[i + 1] + 1) * (lengths[i + 1] - lengths[i])
            for i, a in enumerate(kept)
            if a not in stay
        }
        passed = superseded(kept)
        del kept[next(i for i in costs if kept[i] in passed) if passed else min(costs, key=costs.get)]
    return kept


def spread(anchors: list[Anchor], most: int) -> list[Anchor]:
    """At most so many of some anchors, the last one and others evenly over the length."""
    if len(anchors) <= most:
        return list(anchors)
    wanted = np.linspace(0, anchors[-1].length, most + 1)[1:]
    lengths = np.array([a.length for a in anchors])
    chosen = sorted({int(np.abs(lengths - w).argmin()) for w in wanted})
    return [anchors[i] for i in chosen]
