"""The protocol that all tiers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from qjax.state import Sequence


class Unusable(Exception):
    """A hit that cannot be taken; the message is the reason. The lookup goes on with the next best."""


class Gone(Unusable):
    """It cannot be taken, and the tier has dropped it: what the tier finds now may be taken."""


class NoRoom(Unusable):
    """The pool has no pages for it, beside what runs; it stays where it is."""


@dataclass(frozen=True)
class Hit:
    """What a tier offers for some key ids.

    start: tokens that need no forward. source: the name in the ledger. entry: the tier's own. whole: the entry ends at the
    keys' last one and has that token's logits, so that nothing needs a forward. exact: what follows has a cold run's bits; where not,
    it is a session resume at level grid, held to the greedy gate.
    """

    start: int
    source: str
    tier: Tier
    entry: Any
    whole: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Restored:
    """A sequence whose pages are held for the caller. logits: float32 [V] of its last token, where a hit was whole.

    uncut: it has come from outside the pool and ends where the entry does, so that it may serve as an anchor there.
    """

    sequence: Sequence
    logits: np.ndarray | None = None
    uncut: bool = False


class Tier(Protocol):
    name: str

    def find(self, keys: np.ndarray, tenant: str) -> Hit | None:
        """The hit that starts latest, or None. Reads only: takes no page, moves nothing. keys: int64 [n]."""

    def take(self, hit: Hit) -> Restored:
        """Raises Unusable, and leaves nothing held, where the hit cannot be taken."""

    def stats(self) -> dict[str, int]:
        """Counters, and the bytes that are kept."""

    def clear(self) -> None:
        """Gives everything back."""
