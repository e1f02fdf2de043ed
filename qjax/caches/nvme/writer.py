"""The writer: entries on their way to the storage. What waits is bounded in bytes, found by whoever looks for it, and holds nobody up."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from storage import Entry, Storage, StorageError

log = logging.getLogger(__name__)

THREADS = 2
"""Entries written at once: one thread alone leaves the disk idle while it takes sums and syncs."""


class Skipped(Exception):
    """An entry was not written because one that it stands on was not."""


@dataclass(eq=False)
class Lot:
    """Entries that are of use together only: a head, an anchor and the pages below it, or a conversation. left: bytes of them that no room
    was made for yet. failed: one of them was not written: none of the others is from then on. on: another one that it stands on.
    """

    what: str
    left: int
    on: Lot | None = None
    failed: bool = False

    @property
    def lost(self) -> bool:
        return self.failed or (self.on is not None and self.on.lost)


class Writer:
    """Its owner hands entries over; any thread may ask what is pending."""

    def __init__(self, storage: Storage, limit: int, make_room: Callable[..., bool]):
        """limit: bytes that may wait. make_room: asked in a writing thread before so many bytes are written, with those that are left of their
        lot, where they have one; False leaves them out.
        """
        self._storage, self.limit, self._make_room = storage, limit, make_room
        self._threads = ThreadPoolExecutor(THREADS, "qjax-writer")
        self._changed = threading.Condition()
        self._pending: dict[str, tuple[Mapping, dict, int, Future]] = {}
        self._failing = False
        self._lot, self._newest = None, None  # the lot whose entries came last, and the last one's future
        self.counts: Counter[str] = Counter()
        self._room, self._granted = threading.Lock(), 0

    @property
    def staged(self) -> int:
        """Bytes that wait or are being written."""
        with self._changed:
            return sum(nbytes for *_, nbytes, _ in self._pending.values())

    @property
    def granted(self) -> int:
        """Bytes that are being written. Without the lock, in which others may be making room for long."""
        return self._granted

    def has_room(self, nbytes: int, seconds: float = 0.0) -> bool:
        """Whether so many bytes more may be staged, at the latest after so long. More than the limit may where nothing waits."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._pending and sum(one[2] for one in self._pending.values()) + nbytes > self.limit:
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left)
        return True

    def put(
        self,
        key: str,
        arrays: Mapping,
        fields: dict,
        after: Iterable[str] = (),
        done: Callable[[Entry | None], None] = lambda _: None,
        lot: Lot | None = None,
    ):
        """Takes an entry over, whose arrays nobody changes any more; jax arrays are fetched by the thread that writes them.

        after: keys without which it is not written; those of them that are pending are written before. done: called in that thread at the
        end, with the entry where it is there. lot: that it belongs to, whose entries come one after the other.
        """
        after = list(after)
        with self._changed:
            before = [self._pending[one][3] for one in after if one in self._pending]
            if lot is not None and self._lot not in (lot, lot.on) and self._newest is not None:
                before.append(self._newest)  # by its end what the lot before this one is made of is held no more, and may make way
            nbytes = sum(a.nbytes for a in arrays.values())
            # threads take entries in this order, so that whatever one waits for was begun before it
            future = self._threads.submit(self._write, key, arrays, fields, before, after, nbytes, done, lot)
            self._pending[key] = arrays, fields, nbytes, future
            self._lot, self._newest = lot, future

    def _write(self, key, arrays: Mapping, fields: dict, before: list[Future], after: list[str], nbytes: int, done, lot: Lot | None) -> None:
        entry, granted = None, 0
        try:
            for one in before:
                one.result()
            if lot is not None and lot.lost:
                raise Skipped(f"{key} was not written: something that it belongs to was not")
            if missing := next((one for one in after if self._storage.find(one) is None), None):
                raise Skipped(f"{key} was not written: {missing}, on which it stands, is not there")
            with self._room:  # one thread at a time, and what the other has room for and is not in the index yet counts too
                if not self._make_room(nbytes + self._granted, *([] if lot is None else [lot.left + self._granted, lot.what])):
                    raise Skipped(f"{key} was not written: no room for {nbytes:,} bytes")
                self._granted += (granted := nbytes)
                if lot is not None:
                    lot.left -= nbytes
            failing = self._failing
            entry = self._storage.put(key, {name: np.asarray(a) for name, a in arrays.items()}, **fields)
            self.counts.update(written=1, written_bytes=nbytes)
            # what began before another one failed does not end that, nor does what another one of its lot may still end
            self._failing &= not failing or (lot is not None and not after)
        except (Skipped, CancelledError) as reason:
            self.counts["skipped"] += 1
            log.info("%s", str(reason) or f"{key} was not written: one that it stands on was given up")
        except (StorageError, ValueError) as error:
            self.counts["failed"] += 1
            if not self._failing:  # a full disk would be told of with every page
                log.warning("%s (what else fails is not told until something is written again)", error)
            self._failing = True
        except Exception:  # nobody asks for the future of what nothing stands on
            self.counts["failed"] += 1
            log.exception("%s was not written", key)
        finally:
            if entry is None and lot is not None:
                lot.failed = True
            if entry is None:
                self._settle(key, fields, found=False)  # before its owner is told: from then on nobody takes it for one that is coming
            try:
                with self._room:  # by its end the index has it: counted twice for a moment, it would cost another one its place
                    self._granted -= granted
                    done(entry)
            except ValueError as error:
                log.warning("%s was written and is not used: %s", key, error)
            finally:
                self._settle(key, fields)

    def _settle(self, key: str, fields: dict, found: bool = True) -> None:
        """An entry is no longer pending; not found: it counts as that, and is not found. Another one of this key may have come since."""
        with self._changed:
            if (one := self._pending.get(key)) is None or one[1] is not fields:
                return
            if found:
                del self._pending[key]
                self._changed.notify_all()
            else:
                self._pending[key] = None, *one[1:]

    def pending(self, key: str) -> Mapping | None:
        """The arrays of an entry that is not written yet, and will be as far as is known."""
        with self._changed:
            found = self._pending.get(key)
        return None if found is None else found[0]

    def drain(self) -> None:
        """Waits until nothing is pending."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def close(self) -> None:
        """Writes what is pending, and ends the threads."""
        self._threads.shutdown(wait=True)

    def abandon(self) -> None:
        """Waits for what the threads have begun; what they have not is not written, and is not there."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        return {"staged_bytes": self.staged, **{name: self.counts[name] for name in ("written", "written_bytes", "skipped", "failed")}}
