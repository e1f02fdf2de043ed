"""The state store: whole snapshots on the host, outside the page pool.

Two uses of it. The session cache keeps a conversation's state after its turn, and the next turn forwards only what is new. The prefix
cache keeps the state at one line of a prefill, so that a head that many prompts begin with costs nothing from the second one on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from qjax.caches.keys import common
from qjax.caches.reach import Reach, reach
from qjax.caches.tier import Hit, NoRoom, Restored
from qjax.config import TOKEN
from qjax.pages import PagePool, PoolFull
from qjax.state import BLOCK, Layout, Sequence

USES = ("session", "prefix")
EVENTS = ("hits", "offers", "evicted", "refused_too_large", "skipped_no_state")
ID_BYTES = 8 + 4
"""A token's key id and its own id."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A sequence on the host, read only, in memory of its own.

    keys: int64 [n]. tokens: int32 [n]. sections, open: name -> array in pinned host memory; open is empty at a block line. rows: view ->
    `[layers, heads, n, dim]`. logits: float32 [V] of the last token, where they are known. use: "session" or "prefix". tainted: as of
    an anchor.
    """

    keys: np.ndarray
    tenant: str
    use: str
    tokens: np.ndarray
    sections: dict[str, jax.Array]
    open: dict[str, jax.Array]
    rows: dict[str, np.ndarray]
    logits: np.ndarray | None
    tainted: bool = False

    @property
    def length(self) -> int:
        return self.keys.size

    @cached_property
    def nbytes(self) -> int:
        arrays = [self.keys, self.tokens, *self.sections.values(), *self.open.values(), *self.rows.values()]
        return sum(a.nbytes for a in arrays) + (0 if self.logits is None else self.logits.nbytes)

    def reach(self, keys: np.ndarray, level: str, grid: int) -> Reach | None:
        """Where a prompt with these keys can start, if at all."""
        agrees, logits = common(self.keys, keys), self.logits is not None
        found = reach(self.length, agrees, keys.size, logits=logits, tainted=self.tainted, level=level, grid=grid)
        return found if found is not None and found.start else None


def snapshot_bytes(layout: Layout, length: int, logits: np.ndarray | None = None) -> int:
    """Bytes that a snapshot of so many tokens will hold."""
    opened = layout.open_bytes if length % BLOCK else 0
    return layout.section_bytes + opened + length * (layout.row_bytes + ID_BYTES) + (0 if logits is None else 4 * np.size(logits))


def _own(array, dtype) -> np.ndarray:
    # a copy: a view would keep the whole array alive that it looks into
    copy = np.array(array, dtype)
    copy.flags.writeable = False
    return copy


def _moved(arrays: dict[str, jax.Array], memory: str) -> dict[str, jax.Array]:
    # not by numpy: an array on a GPU keeps what numpy once read of it, uncounted, as long as it lives
    return {name: jax.device_put(a, a.sharding.with_memory_kind(memory)) for name, a in arrays.items()}


class StateStore:
    """A tier. One thread owns it, as the pool."""

    name = "store"

    def __init__(self, pool: PagePool, budget_bytes: int, entry_bytes: int, prefix_chunk: int | None = None, level: str = TOKEN):
        """budget_bytes: of all snapshots, 0 for none. entry_bytes: of one at the most. prefix_chunk: tokens from one line for prefix
        snapshots to the next, whole pages because a prefill ends a forward there; None for one page, 0 for no prefix snapshots.

        Compiles the copies between pages and host. ValueError names what is out of range.
        """
        prefix_chunk = pool.layout.grid if prefix_chunk is None else prefix_chunk
        if min(budget_bytes, entry_bytes) < 0:
            raise ValueError(f"the state store's bytes must be 0 or more, not {budget_bytes:,} with {entry_bytes:,} an entry")
        if prefix_chunk < 0 or prefix_chunk % pool.layout.grid:
            raise ValueError(f"prefix_chunk must be a multiple of the grid, {pool.layout.grid}, or 0, not {prefix_chunk}")
        self._pool, self._layout, self._chunk, self._level = pool, pool.layout, prefix_chunk, level
        self.budget_bytes, self.entry_bytes = budget_bytes, min(entry_bytes, budget_bytes)
        self._entries: dict[Snapshot, None] = {}  # in the order of their last use, the least recent first
        self._passed: set[Snapshot] = set()  # sessions that a later turn went on from
        self._counts: Counter[tuple[str, str]] = Counter()
        if self.entry_bytes:
            pool.compile_copies()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def may_be_head(self, length: int) -> bool:
        """Whether a prefix snapshot of this length is on its lines and fits an entry."""
        return bool(self._chunk) and length % self._chunk == 0 and snapshot_bytes(self._layout, length) <= self.entry_bytes

    def find(self, keys: np.ndarray, tenant: str) -> Hit | None:
        best, furthest = None, None
        for entry in self._entries:
            found = entry.reach(keys, self._level, self._layout.grid) if entry.tenant == tenant else None
            if found is not None and (furthest is None or found >= furthest):
                best, furthest = Hit(found.start, self.name, self, entry, found.whole, found.exact), found
        return best

    def take(self, hit: Hit) -> Restored:
        entry, start = hit.entry, hit.start
        sections = _moved(entry.sections, "device")
        opened = _moved(entry.open, "device") or {s.name: jax.device_put(s.zeros()) for s in self._layout.open}
        try:
            pages = self._pool.copy_in(entry.rows, start)
        except PoolFull as full:
            raise NoRoom(str(full)) from full
        if entry in self._entries:  # a snapshot is whole as long as the hit has it, also where room for its pages cost its place here
            self._entries[entry] = self._entries.pop(entry)
        self._passed.discard(entry)
        self._counts["hits", entry.use] += 1
        sequence = Sequence(
            tokens=entry.tokens[:start].copy(),
            pages=np.array(pages, np.int32),
            length=np.int32(start),
            sections=sections,
            open=opened,
            stamps=self._pool.stamps[pages],
        )
        return Restored(sequence, entry.logits if hit.whole else None, uncut=start == entry.length)

    def offer(
        self,
        keys: np.ndarray,
        tenant: str,
        sequence: Sequence | None,
        logits: np.ndarray | None = None,
        use: str = "session",
        tainted: bool = False,
    ) -> bool:
        """Copies a sequence to the host, in the place of what is worth least; True where the store has it now.

        keys: int64 [n], the sequence's own length. sequence: in the store's pool, held by somebody; None where no state was taken.
        logits: float32 [V] of its last token. tainted: as of an anchor. Nothing is copied, and nothing else given up, for a snapshot that
        is refused.
        """
        if use not in USES:
            raise ValueError(f"use must be one of {', '.join(USES)}, not {use!r}")
        self._counts["offers", use] += 1
        if not self._is_state_of(keys, sequence):
            self._counts["skipped_no_state", use] += 1
            return False
        same = next((e for e in self._entries if (e.tenant, e.tainted) == (tenant, tainted) and np.array_equal(e.keys, keys)), None)
        if same is not None:
            self._refresh(same, logits, use)
            return True
        size = snapshot_bytes(self._layout, keys.size, logits)
        if size > self.entry_bytes:
            self._counts["refused_too_large", use] += 1
            return False
        if use == "session":
            self._passed |= {e for e in self._entries if e.tenant == tenant and e.use == use and common(e.keys, keys) == e.length}
        self._make_room(size)
        rows = self._pool.copy_out(sequence.pages, keys.size)
        for one in rows.values():
            one.flags.writeable = False
        entry = Snapshot(
            keys=_own(keys, np.int64),
            tenant=tenant,
            use=use,
            tokens=_own(sequence.tokens, np.int32),
            sections=_moved(sequence.sections, "pinned_host"),
            open=_moved(sequence.open, "pinned_host") if keys.size % BLOCK else {},
            rows=rows,
            logits=None if logits is None else _own(logits, np.float32),
            tainted=tainted,
        )
        self._entries[entry] = None
        return True

    def _is_state_of(self, keys: np.ndarray, sequence: Sequence | None) -> bool:
        if sequence is None or not keys.size == int(sequence.length) == sequence.tokens.size > 0:
            return False
        pages = -(-keys.size // self._layout.grid)
        return sequence.pages.size == pages and bool((self._pool.holders[sequence.pages] > 0).all())  # a free page may be another's by now

    def _refresh(self, entry: Snapshot, logits: np.ndarray | None, use: str) -> None:
        """Makes an entry the most recent one, with what an equal offer knows more: its logits, or that prompts share it as a prefix."""
        self._drop(entry)
        if entry.logits is None and logits is not None and entry.nbytes + 4 * np.size(logits) <= self.entry_bytes:
            self._make_room(entry.nbytes + 4 * np.size(logits))
            entry = dataclasses.replace(entry, logits=_own(logits, np.float32))
        if use == "prefix" != entry.use:
            entry = dataclasses.replace(entry, use=use)
        self._entries[entry] = None

    def _make_room(self, size: int) -> None:
        """Evicts until so many bytes more fit."""
        self.shrink(self.budget_bytes - size)

    def shrink(self, limit: int) -> None:
        """Evicts until no more than so many bytes are held: sessions that a later turn went on from first, then the least recently used."""
        while self._entries and self.nbytes > limit:
            entry = next((e for e in self._entries if e in self._passed), None) or next(iter(self._entries))
            self._counts["evicted", entry.use] += 1
            self._drop(entry)

    def _drop(self, entry: Snapshot) -> None:
        del self._entries[entry]
        self._passed.discard(entry)

    def stats(self) -> dict[str, int]:
        """Entries and bytes that are held now, then counters; each whole, and for "session" and "prefix" apart."""
        kept = {use: [e for e in self._entries if e.use == use] for use in USES}
        stats = {
            "entries": len(self._entries),
            "bytes": self.nbytes,
            **{event: sum(self._counts[event, use] for use in USES) for event in EVENTS},
        }
        for use, entries in kept.items():
            stats |= {f"{use}_entries": len(entries), f"{use}_bytes": sum(e.nbytes for e in entries)}
            stats |= {f"{use}_{event}": self._counts[event, use] for event in EVENTS}
        return stats

    def clear(self) -> None:
        """Gives all snapshots back; the counters go on."""
        self._entries.clear()
        self._passed.clear()
