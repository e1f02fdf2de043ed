"""Named arrays under content keys: an entry is all there, or it is not there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from storage.arrays import Leaf, storable, timed_checksum
from storage.bucket import Bucket
from storage.directory import Directory
from storage.entry import META, Entry, check_names, seal, unseal
from storage.errors import StorageError, damage, failure
from storage.fingerprint import Fingerprint
from storage.turns import Turns

log = logging.getLogger(__name__)


class Storage(contextlib.AbstractContextManager):
    """A key stands for its content: who chooses keys sees to it that equal keys mean equal arrays.

    Every method may be called by any thread; one key is written or removed by one thread at a time. What is read has passed its sums,
    whatever else happens meanwhile. After os.fork() the child must not use it: TensorStore's threads are not there (it raises).
    """

    def __init__(self, place: Directory | Bucket, fingerprint: Fingerprint, read_only: bool):
        """Use `open`."""
        self.fingerprint, self.read_only = fingerprint, read_only
        self._place, self._process = place, os.getpid()
        self._index: dict[str, Entry] = {}
        self._lock, self._clock = threading.Lock(), 0.0  # the lock is over the index, the clock and the counts
        self._counts, self._damaged = Counter(), Counter()
        self._refused: set[str] = set()  # damaged ones that stay, because this is read-only
        self.damaged: dict[str, str] = {}  # what was wrong with entries that were found damaged, by key
        self._turns = Turns()
        self._list()

    @classmethod
    def open(cls, root: str | Path, fingerprint: Mapping[str, str] | Fingerprint, read_only: bool = False, options: Mapping | None = None) -> Storage:
        """A directory, which is made where it is not there, or `s3://bucket/path` or `gs://bucket/path`.

        A directory has one writer; what it holds under another fingerprint is removed. Opened read-only, nothing in it is changed and
        another process may write. An object store has any number of writers. options: of an object store, members of TensorStore's
        specification of it: {"endpoint": "http://127.0.0.1:9000", "aws_region": "us-east-1"}.

        Raises Locked where another process writes to the directory, Full, and otherwise StorageError where it cannot be opened.
        """
        fingerprint = fingerprint if isinstance(fingerprint, Fingerprint) else Fingerprint(fingerprint)
        if str(root).startswith(("s3://", "gs://")):
            place = Bucket(str(root), fingerprint, read_only, options or {})
        elif options or "://" in str(root):
            raise ValueError(f"expected a directory, or s3:// or gs:// where there are options, found {root}")
        else:
            place = Directory(root, fingerprint, read_only)
        try:
            return cls(place, fingerprint, read_only)
        except (OSError, ValueError) as error:
            place.close()
            raise failure(error, f"{root} cannot be listed") from error

    def _list(self) -> None:
        """Fills the index, least recently used first. A time of use that is still to come, after the clock was set back, becomes now."""
        now, used = time.time(), {}
        for key, sealed, last in self._place.metas():
            if entry := self._unseal(key, sealed):
                entry.used = used[key] = last or entry.used
                self._index[key] = entry
        for key in sorted(used, key=used.get):
            entry = self._index[key] = self._index.pop(key)
            if entry.used > now:
                entry.used = self._now()
                self._mark(entry)
        self._now()

    def _unseal(self, key: str, sealed: bytes | OSError) -> Entry | None:
        """What a `meta` says; where that cannot be read, the entry is removed, unless this is read-only."""
        try:
            if isinstance(sealed, OSError):
                raise ValueError(f"meta: {sealed}")
            return unseal(key, sealed)
        except ValueError as error:
            self._damage(key, "meta", str(error))
        return None

    def put(self, key: str, arrays: Mapping[str, np.ndarray], /, **fields) -> Entry:
        """Writes an entry; it is durable when this returns. Until then the arrays, which are not copied, must not change.

        fields: anything JSON can hold. An entry that is there already stays as it is and is returned. Raises Full or StorageError where
        it cannot be written, and leaves nothing of it; ValueError for a key, a name or an array that cannot be stored.
        """
        self._check(writing=True)
        check_names(key, arrays)
        arrays = {name: storable(name, array) for name, array in arrays.items()}
        fields = json.loads(json.dumps(fields))
        if known := self.find(key):
            return known
        with self._turns.of(key):
            self._check()
            if known := self._known(key):
                return known
            entry = self._write(key, arrays, fields)
            with self._lock:
                self._index[key] = entry
                self._counts.update(put=1, put_nbytes=entry.nbytes)
        return entry

    def _write(self, key: str, arrays: dict[str, np.ndarray], fields: dict) -> Entry:
        writes = []
        try:
            self._place.begin(key, arrays)
            writes = self._place.write(key, arrays)
            leaves = {name: Leaf.of(array) for name, array in arrays.items()}  # while other threads write
            for write in writes:
                write.result()
            self._place.written(key, arrays)
            now = self._now()
            entry = Entry(key, leaves, fields, time.time(), now)
            self._place.kv.write(f"{key}/{META}", seal(entry)).result()
            self._place.committed(key)
            self._place.touch(key, now)
        except BaseException as error:
            _settle(writes)
            self._remove(key, logging.INFO)  # what has no `meta` is no entry
            if isinstance(error, OSError | ValueError):
                raise failure(error, f"{key} cannot be written") from error
            raise
        return entry

    def get(self, chain: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> int:
        """Reads entries, or some arrays of each, into memory of the caller, slices of larger arrays too: [(key, {name: array})].

        All reads are issued together. Returns how many entries, from the first, are there and hold what was written; the arrays of the
        others hold anything. One that does not is removed, logged with the reason and counted; one that only could not be reached stays.
        """
        self._check()
        for key, arrays in chain:
            if found := [name for name, array in arrays.items() if not array.flags.writeable]:
                raise ValueError(f"{key}: expected arrays to read into, found {', '.join(found)} to be read-only")
        entries = [self._expected(key, arrays) for key, arrays in chain]
        reads: list[Mapping[str, Future]] = []
        try:
            for (key, arrays), entry in zip(chain, entries, strict=True):
                reads.append(self._place.read(key, arrays) if entry else {})
            good = [bool(entry) and self._arrived(entry, tree, read) for entry, (_, tree), read in zip(entries, chain, reads, strict=True)]
        except BaseException:
            _settle([future for read in reads for future in read.values()])
            raise
        nbytes = sum(a.nbytes for ok, (_, tree) in zip(good, chain, strict=True) if ok for a in tree.values())
        with self._lock:
            self._counts.update(got=sum(good), got_nbytes=nbytes)
        return good.index(False) if False in good else len(good)

    def _expected(self, key: str, arrays: Mapping[str, np.ndarray]) -> Entry | None:
        entry = self.find(key)
        if not entry or not (reason := entry.misfit(arrays)):
            return entry
        self._damage(key, "layout", reason, entry)
        return None

    def _arrived(self, entry: Entry, arrays: Mapping[str, np.ndarray], reads: Mapping[str, Future]) -> bool:
        """Waits for every read, since all write to the caller's memory, and compares the sums."""
        if failed := [(name, error) for name, read in reads.items() if (error := read.exception())]:
            (name, error), (kind, passing) = failed[0], damage(failed[0][1])
            self._damage(entry.key, kind, f"{name}: {error}", entry, keep=passing)
            return False
        sums = {name: (name in reads and reads[name].result()) or timed_checksum(array) for name, array in arrays.items()}
        with self._lock:
            self._counts["verify_s"] += sum(seconds for _, seconds in sums.values())
        if wrong := [name for name, (sum_, _) in sums.items() if sum_ != entry.leaves[name].sum]:
            self._damage(entry.key, "sum", f"{wrong[0]}: sum differs", entry)
        return not wrong

    def _damage(self, key: str, kind: str, reason: str, entry: Entry | None = None, keep: bool = False) -> None:
        """Counts and logs what is wrong with an entry, and removes it; not one that was dropped or found damaged while it was read."""
        with self._lock:
            if self._index.get(key) is not entry:
                return
            self._damaged[kind] += 1
            self.damaged[key] = reason
            if not keep:
                self._index.pop(key, None)
                if self.read_only:
                    self._refused.add(key)
        stays = keep or self.read_only
        log.log(logging.INFO if keep else logging.WARNING, "entry %s cannot be used%s: %s", key, "" if stays else " and is removed", reason)
        if not stays:
            with self._turns.of(key):
                if not self._known(key) and self._process is not None:
                    self._remove(key)

    def find(self, key: str) -> Entry | None:
        """The entry, if it is there. Asks the index alone, unless others may write: then also what they have written, at a read of `meta`."""
        self._check()
        if (entry := self._known(key)) or not self._place.shared or key in self._refused:
            return entry
        try:
            sealed = self._place.meta(key)
        except (OSError, ValueError) as error:
            self._damage(key, "unreadable", f"meta: {error}", keep=True)
            return None
        if sealed is None or not (entry := self._unseal(key, sealed)):
            return None
        with self._lock:
            return self._index.setdefault(key, entry)

    def _known(self, key: str) -> Entry | None:
        with self._lock:  # for a moment a touch takes the entry out
            return self._index.get(key)

    def entries(self) -> dict[str, Entry]:
        """What the index holds now, by key, least recently used first. Others' later entries are in it when they were found once."""
        with self._lock:
            return dict(self._index)

    def touch(self, key: str, used: float | None = None) -> None:
        """Notes that an entry was used now, or what it is a copy of at an earlier time. Times of use only grow, also when the clock is set back."""
        self._check()
        now = self._now()
        with self._lock:
            if not (entry := self._index.pop(key, None)):
                return
            entry.used = now if used is None else min(used, now)
            self._index[key] = entry
            if used is not None:
                self._index = dict(sorted(self._index.items(), key=lambda item: item[1].used))
        self._mark(entry)

    def _mark(self, entry: Entry) -> None:
        if not self.read_only:
            with contextlib.suppress(OSError):  # it was removed meanwhile, or looks older at the next start
                self._place.touch(entry.key, entry.used)

    def drop(self, key: str, unless: Callable[[], bool] = lambda: False) -> bool:
        """Removes an entry: durably gone, and its space free, when this returns. Whether it was. What reads it now may still arrive.

        unless: asked, without a lock of its own, when the entry is about to go. A `put` that has returned it before that keeps it, where
        `unless` knows of the put from before; a later one writes it anew.
        Where the files cannot be removed that is logged: until the next start the entry is not there all the same.
        """
        self._check(writing=True)
        if not self.find(key):
            return False
        with self._turns.of(key):
            self._check()
            with self._lock:
                if unless() or self._index.pop(key, None) is None:
                    return False
                self._counts["dropped"] += 1
            self._remove(key)
        return True

    def _remove(self, key: str, level: int = logging.WARNING) -> None:
        try:
            self._place.remove(key)
        except (OSError, ValueError) as error:  # at the next start it is there again, or is removed
            log.log(level, "entry %s cannot be removed: %s", key, error)

    def stats(self) -> dict:
        """entries, nbytes: what the index holds. free: bytes the file system has left (None: unknown). put, got, dropped, put_nbytes,
        got_nbytes: entries and bytes since the start. verify_s: CPU seconds that sums of what was read took. damaged: kind of
        damage -> entries. unfinished: removed at the start, or found there where this is read-only. swept: per directory removed at the
        start, the fields of its fingerprint that differed, (theirs, ours).
        """
        with self._lock:
            counts = {name: self._counts[name] for name in ("put", "put_nbytes", "got", "got_nbytes", "dropped", "verify_s")}
            held = {"entries": len(self._index), "nbytes": sum(entry.nbytes for entry in self._index.values()), "damaged": dict(self._damaged)}
        return held | counts | {"free": self._place.free(), "unfinished": len(self._place.unfinished), "swept": list(self._place.swept)}

    @property
    def unfinished(self) -> list[str]:
        """Keys of what a process left unfinished, see stats; none where another one writes."""
        return list(self._place.unfinished)

    @property
    def shared(self) -> bool:
        """Whether others may write to it too."""
        return self._place.shared

    def free(self) -> int | None:
        """Bytes that the file system has left; None where that is not known."""
        return self._place.free()

    def close(self) -> None:
        """Waits for what is being written and lets the next writer in. Nothing can be done with it afterwards."""
        self._process = None
        self._turns.wait()
        self._place.close()

    def __exit__(self, *_) -> None:
        self.close()

    def _check(self, writing: bool = False) -> None:
        if self._process != os.getpid():
            told = "it was closed" if self._process is None else f"process {self._process} opened it: a child by os.fork() must not use it"
            raise StorageError(f"the storage cannot be used: {told}")
        if writing and self.read_only:
            raise StorageError("the storage was opened read-only")

    def _now(self) -> float:
        with self._lock:
            self._clock = max(time.time(), self._clock + 1e-6)
            return self._clock


def _settle(futures: Sequence[Future]) -> None:
    """Waits for reads and writes that went wrong in part: the others still use the caller's memory."""
    for future in futures:
        future.exception()
