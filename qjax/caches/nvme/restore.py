"""Restore: from the files of an anchor and of the pages below it to a sequence in the pool.

Pages are read by threads while the one before them is copied into the pool. Before a byte of a page reaches it, the page's sums have been
checked (by the storage) and its key ids compared with the prompt's, one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from qjax.caches.nvme.filed import ANCHOR, IDS, LOGITS, OPEN, SECTIONS, TOKENS, FiledAnchor, anchor_sum
from qjax.caches.nvme.head import NONE, Head
from qjax.caches.nvme.writer import Writer
from qjax.caches.tier import Gone, Restored, Unusable
from qjax.pages import PagePool, PoolFull
from qjax.state import Layout, Section, Sequence, held
from storage import Storage, host

AHEAD = 2
"""Pages that are read at once, each into memory that is used again and again: memory that is new can come slower than what the disk gives."""


class Damaged(Gone):
    """An entry is not what it was. key: the entry's. told: the storage has said so in the log."""

    def __init__(self, key: str, reason: str, told: bool = False):
        super().__init__(f"{key} {reason}")
        self.key, self.told = key, told


class Reader:
    """Reads entries of one layout from a storage, or from what is on its way there."""

    def __init__(self, storage: Storage, writer: Writer, layout: Layout):
        self._storage, self._writer, self._layout = storage, writer, layout
        self._memory = [self._page() for _ in range(AHEAD)]  # none of it is there before it is read into

    def read(self, wanted: dict[str, dict[str, np.ndarray]]) -> list[Mapping[str, np.ndarray]]:
        """The arrays of some entries: key -> memory that each is read into. Raises Damaged, or Unusable where one cannot be reached."""
        waiting = {key: arrays for key in wanted if (arrays := self._writer.pending(key)) is not None}
        chain = [(key, arrays) for key, arrays in wanted.items() if key not in waiting]
        good = self._storage.get(chain)
        if good < len(chain):
            key = chain[good][0]
            if self._storage.find(key) is not None:
                raise Unusable(f"{key} cannot be read now")
            raise Damaged(key, "is damaged or gone", told=True)
        found = {key: {name: np.asarray(a) for name, a in arrays.items()} for key, arrays in waiting.items()} | dict(chain)
        return [found[key] for key in wanted]

    def anchor(self, filed: FiledAnchor, logits: bool) -> Mapping[str, np.ndarray]:
        """Its sections, open inputs where it has any, and logits where they are asked for. One that is summed is read whole, and summed."""
        if (arrays := self._writer.pending(filed.key)) is not None:
            return {name: np.asarray(a) for name, a in arrays.items()}
        parts = [(SECTIONS, self._layout.sections), (OPEN, self._layout.open if filed.open else ())]
        wanted = {prefix + s.name: host(s.shape, held(s.dtype)) for prefix, some in parts for s in some}
        if (logits or (filed.summed and filed.logits)) and (entry := self._storage.find(filed.key)):
            wanted[LOGITS] = entry.leaves[LOGITS].empty()
        arrays = self.read({filed.key: wanted})[0]
        if filed.summed and filed.key != ANCHOR + anchor_sum(arrays, filed.line, filed.pages, filed.length, filed.tainted):
            raise Damaged(filed.key, "is not what its key says")
        return arrays

    def _page(self) -> dict[str, np.ndarray]:
        """Memory for one page."""
        grid = self._layout.grid
        views = {v.name: host(v.page_shape(grid), held(v.dtype)) for v in self._layout.views}
        return views | {IDS: host((grid,), np.int64), TOKENS: host((grid,), np.int32)}

    def page(self, key: str, number: int) -> Mapping[str, np.ndarray]:
        """The page of this number, in memory that the one AHEAD numbers later is read into."""
        return self.read({key: self._memory[number % AHEAD]})[0]


def placed(specs: tuple[Section, ...], arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, jax.Array]:
    """Sections on the device; zeros where there are none."""
    return {s.name: jax.device_put(arrays[prefix + s.name] if prefix + s.name in arrays else s.zeros()) for s in specs}


def restore(
    pool: PagePool, reader: Reader, filed: FiledAnchor, keys: np.ndarray | None, start: int, logits: bool = False, head: Head = NONE
) -> tuple[Restored, np.ndarray]:
    """The sequence of the first `start` tokens, which the anchor serves, its pages held for the caller; and its key ids.

    keys: int64, the prompt's, None to believe the files. head: of the prompt, held by somebody; its pages are not read. Raises Unusable,
    Damaged or PoolFull, and holds nothing then.
    """
    grid = pool.layout.grid
    names = filed.pages[: -(-start // grid)]
    shared = head.pages.size
    if pool.free < len(names) - shared:
        raise PoolFull(f"expected {len(names) - shared} free pages, found {pool.free}")
    pages, ids, tokens = [], [keys[: shared * grid]] if shared else [], [head.tokens]
    with ThreadPoolExecutor(AHEAD, "qjax-reader") as threads:
        coming = deque(threads.submit(reader.page, names[number], number) for number in range(shared, min(shared + AHEAD, len(names))))
        try:
            pool.hold(head.pages)
            pages += head.pages.tolist()
            arrays = reader.anchor(filed, logits)
            for number, name in enumerate(names[shared:], shared):
                rows, first = coming.popleft().result(), number * grid
                n = min(grid, start - first)
                if keys is not None and not np.array_equal(rows[IDS][:n], keys[first : first + n]):
                    raise Damaged(name, "has other key ids than the prompt")
                pages.append(pool.take())
                pool.write_page(pages[-1], {v.name: rows[v.name] for v in pool.layout.views}, n)
                ids.append(rows[IDS][:n].copy())
                tokens.append(rows[TOKENS][:n].copy())
                jax.block_until_ready(pool.views)  # by then the rows were read, and the next page may lie there
                if number + AHEAD < len(names):
                    coming.append(threads.submit(reader.page, names[number + AHEAD], number + AHEAD))
        except BaseException:
            pool.release(pages)
            raise
    numbers = np.array(pages, np.int32)
    sequence = Sequence(
        tokens=np.concatenate(tokens),
        pages=numbers,
        stamps=pool.stamps[numbers],
        length=np.int32(start),
        sections=placed(pool.layout.sections, arrays, SECTIONS),
        open=placed(pool.layout.open, arrays, OPEN),
    )
    return Restored(sequence, np.array(arrays[LOGITS]) if logits else None, uncut=start == filed.length), np.concatenate(ids)
