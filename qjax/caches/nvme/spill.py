"""The spill: a whole session to files, by content, and the resident one back at the next start."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from qjax.caches.anchors import Anchor, newest
from qjax.caches.nvme.chain import Chain
from qjax.caches.nvme.filed import LOGITS, OPEN, SECTIONS, SPILL, FiledAnchor, FiledSession
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.restore import Damaged, Reader, placed, restore
from qjax.caches.nvme.room import Room
from qjax.caches.nvme.staging import Staging
from qjax.caches.nvme.writer import Lot
from qjax.caches.session import Session
from qjax.caches.tier import Unusable
from qjax.pages import PagePool, PoolFull

log = logging.getLogger(__name__)

EVERY = 32_768
"""Tokens from one of a session's older anchors to the next that is written: a branch far back reads no more than these again."""


def chosen(anchors: list[Anchor]) -> list[Anchor]:
    """Of a session's anchors, ascending, the newest and one for every EVERY tokens."""
    lines = range(EVERY, anchors[-1].length, EVERY)
    below = [max((a for a in anchors if a.length <= line), key=lambda a: a.length, default=None) for line in lines]
    keep = {id(a) for a in (*newest(anchors), *below) if a is not None}
    return [a for a in anchors if id(a) in keep]


def spill(staging: Staging, room: Room, grid: int, session: Session, seconds: float) -> bool:
    """Stages a session: pages that are not there yet, anchors over them, the record; whether there was room, after so many seconds for each.

    One that has no room as a whole is not begun.
    """
    length = session.anchors[-1].length  # past the last anchor no rows are of use
    chain = Chain(session.keys[:length], session.tenant, grid)
    lot = staging.lot(room, f"a conversation of {length:,} tokens", chain, length, chosen(session.anchors), SPILL)
    if lot is None:
        return False
    held, done = [], False
    try:
        done = _spill(staging, chain, session, seconds, held, lot)
    finally:
        lot.failed |= not done
        staging.let_go(held)
    return done


def _spill(staging: Staging, chain: Chain, session: Session, seconds: float, held: list[str], lot: Lot) -> bool:
    """held: filled with the keys of what was staged."""
    length, grid, tokens, pages, anchors = chain.keys.size, chain.grid, session.anchors[-1].sequence.tokens, [], []
    for number, page in enumerate(session.pages[: -(-length // grid)]):
        key = staging.page(chain, tokens, length, number, page, SPILL, seconds, lot)
        if key is None:
            return False
        held.append(key)
        pages.append(key)
    for anchor in chosen(session.anchors):
        key = staging.anchor(chain, anchor, pages[: -(-anchor.length // grid)], SPILL, seconds, lot)
        if key is None:
            return False
        held.append(key)
        anchors.append(key)
    staging.session(chain, session, pages, anchors, lot)
    return True


def read_back(pool: PagePool, reader: Reader, index: Index, counts: Counter) -> Session | None:
    """The session that was resident last, in the pool; None where there is none, or it cannot be read."""
    residents = [s for s in index.sessions.values() if s.resident]
    if not residents:
        return None
    filed = max(residents, key=lambda s: s.used)
    anchors = sorted((index.anchors[key] for key in filed.anchors if key in index.anchors), key=lambda a: a.length)
    try:
        return _read(pool, reader, filed, anchors, index.now())
    except PoolFull as full:
        log.warning("the last session is not read back: %s", full)
    except Damaged as damaged:
        counts["damaged"] += 1
        log.log(logging.INFO if damaged.told else logging.WARNING, "the last session is not read back: %s", damaged)
        index.discard(damaged.key)
    except Unusable as unusable:
        log.warning("the last session is not read back: %s", unusable)
    return None


def _read(pool: PagePool, reader: Reader, filed: FiledSession, anchors: list[FiledAnchor], now: float) -> Session:
    last = anchors[-1]
    restored, ids = restore(pool, reader, last, None, last.length, last.logits)
    sequence = restored.sequence
    try:
        chain = Chain(ids, filed.tenant, pool.layout.grid)
        number = last.length // pool.layout.grid
        if chain.line(number) != last.line or not (last.summed or chain.has(last.pages[:number])):
            raise Damaged(filed.key, "has other key ids or pages than its anchors")
        if chain.agrees(number, last.tail) < last.length:
            raise Damaged(last.pages[-1], "has other key ids than the anchor")
        found = [_anchor(last, sequence, restored.logits)]
        for one in anchors[:-1]:
            if one.pages == last.pages[: len(one.pages)]:
                arrays = reader.anchor(one, one.logits)
                parts = {"sections": placed(pool.layout.sections, arrays, SECTIONS), "open": placed(pool.layout.open, arrays, OPEN)}
                logits = np.array(arrays[LOGITS]) if one.logits else None
                found.append(_anchor(one, sequence.replace(length=np.int32(one.length), **parts), logits))
        session = Session(pool, ids, filed.tenant, sequence, found, filed.history, "resident")
        session.turns, session.source, session.filed = filed.turns, SPILL, filed.key
        session.touched -= max(0.0, now - filed.used)
        return session
    finally:
        pool.release(sequence.pages)


def _anchor(filed: FiledAnchor, sequence, logits: np.ndarray | None) -> Anchor:
    return Anchor(filed.kind, sequence, logits, filed.tainted)
