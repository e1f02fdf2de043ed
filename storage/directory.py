"""Entries in a directory of a local file system.

    <root>/lock                                       one writer
    <root>/<fingerprint>/fingerprint.json             the fields
    <root>/<fingerprint>/<key>/<name>/0.0.0.0         an array
    <root>/<fingerprint>/<key>/meta                   written last: the entry is there

Files are of mode 0600 in directories of mode 0700, whatever the umask. Arrays are written and read past the page cache (direct.py), and all
of them are synced before TensorStore writes `meta`: under a temporary name that it syncs, renames and syncs the directory of.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorstore as ts

from storage import direct
from storage.arrays import as_bits, file_name
from storage.entry import KEY, META
from storage.errors import StorageError, failure
from storage.fingerprint import DIGEST, FIELDS, Fingerprint
from storage.lock import Lock, is_held

log = logging.getLogger(__name__)

THREADS = 4
"""Files read at once, and as many written."""
LOCK = "lock"
FILE = re.compile(r"0(\.0)*(\.__lock.*)?")
"""An array's file, or what TensorStore makes of it while it writes."""


class Directory:
    """shared: that others write to it. swept: per removed directory of another fingerprint, the fields that differed (theirs, ours).

    unfinished: keys of entries without a `meta`, left by a process that ended while it wrote or removed them. They are removed at the start,
    unless this is read-only.
    """

    def __init__(self, root: str | Path, fingerprint: Fingerprint, read_only: bool):
        """Locked where another process writes to it, StorageError where it cannot be read or made. Read-only, nothing has to be there."""
        self.root = Path(os.path.realpath(root))  # a link that is set to another place later does not matter
        self.path, self.shared = self.root / fingerprint.digest, read_only
        self.swept: list[dict[str, tuple[str | None, str | None]]] = []
        self.unfinished, self._lock = [], None
        if not (there := next(p for p in (self.root, *self.root.parents) if os.path.lexists(p))).is_dir():
            raise StorageError(f"{self.root}: expected a directory, found a file{'' if there == self.root else f', {there}'}")
        # they end with this object: one that is closed may still be reading
        self._readers, self._writers = (ThreadPoolExecutor(THREADS, f"storage-{what}") for what in ("reader", "writer"))
        self.kv = ts.KvStore.open({"driver": "file", "path": f"{self.path}/"}, context=ts.Context({"file_io_mode": {"mode": "direct"}})).result()
        try:
            if not read_only:
                self._start(fingerprint)
            elif not is_held(self.root / LOCK):  # else they are being written or removed
                self.unfinished = list(self._unfinished())
        except (OSError, ValueError) as error:
            self.close()
            raise failure(error, f"{self.root} cannot be {'listed' if read_only else 'written to'}") from error

    def _start(self, fingerprint: Fingerprint) -> None:
        self.root.mkdir(0o700, parents=True, exist_ok=True)
        self._lock = Lock(self.root / LOCK)
        with os.scandir(self.root) as found:
            others = [Path(f) for f in found if DIGEST.fullmatch(f.name) and f.is_dir(follow_symlinks=False) and f.name != fingerprint.digest]
        for other in others:
            self._sweep(other, fingerprint)
        if not self.path.exists():
            self.path.mkdir(0o700)
            direct.sync(self.root)
        if fingerprint.fields and (found := self._fields()) != fingerprint.text():
            if found is not None or any(self._entries()):
                log.warning("%s was %s, and is written anew", self.path / FIELDS, "missing" if found is None else "damaged")
            if found is not None and not (self.path / FIELDS).is_file():
                _remove(self.path / FIELDS)
            self.kv.write(FIELDS, fingerprint.text()).result()
            os.chmod(self.path / FIELDS, 0o600)
        self.unfinished = list(self._unfinished())
        for key in self.unfinished:
            self.remove(key)

    def _fields(self) -> bytes | None:
        """What FIELDS hold: nothing where they cannot be read, None where they are missing."""
        try:
            return (self.path / FIELDS).read_bytes()
        except FileNotFoundError:
            return None
        except OSError:
            return b""

    def _unfinished(self) -> Iterator[str]:
        return (key for key, path in self._entries() if not os.path.lexists(path / META) and _is_entry(path))

    def _sweep(self, other: Path, fingerprint: Fingerprint) -> None:
        """Removes the directory of another fingerprint, FIELDS last; what is neither that nor an entry stays, and is ours at no later start."""
        try:
            names = os.listdir(other)
            ours = [name for name in names if name.startswith(FIELDS) or (KEY.fullmatch(name) and _is_entry(other / name))]
            if FIELDS not in names and len(ours) < len(names):
                return
            differs = fingerprint.differences((other / FIELDS).read_bytes() if (other / FIELDS).is_file() else None)
            for name in sorted(ours, key=lambda name: name == FIELDS):
                _remove(other / name)
            if len(ours) == len(names):
                _remove(other)
        except OSError as error:
            log.warning("%s, of another fingerprint, cannot be removed: %s", other, error)
            return
        self.swept.append(differs)
        reasons = "; ".join(f"{name} was {old}, is {new}" for name, (old, new) in differs.items())
        log.warning("removed %s, written under another fingerprint: %s", other, reasons or "its fields could not be read")

    def _entries(self) -> Iterator[tuple[str, Path]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            yield from ((f.name, Path(f)) for f in found if KEY.fullmatch(f.name) and f.is_dir(follow_symlinks=False))

    def metas(self) -> Iterator[tuple[str, bytes | OSError, float]]:
        """(key, what its `meta` holds or why it cannot be read, Unix seconds of the last use) of every entry."""
        for key, path in self._entries():
            try:
                with open(path / META, "rb") as file:
                    yield key, file.read(), os.fstat(file.fileno()).st_mtime
            except FileNotFoundError:  # another process is about to write or to remove it
                continue
            except OSError as error:
                yield key, error, 0.0

    def meta(self, key: str) -> bytes | None:
        """What its `meta` holds, None where there is no entry. OSError."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self.path / key / META).read_bytes()
        return None

    def begin(self, key: str, names: Iterable[str]) -> None:
        """Makes the directories of an entry. OSError."""
        self._hold()
        path = self.path / key
        if os.path.lexists(path):  # a removal that did not work
            _remove(path)
        for made in (path, *(path / name for name in names)):
            made.mkdir(0o700)

    def write(self, key: str, arrays: Mapping[str, np.ndarray]) -> list[Future]:
        """Futures that are done when the files of the arrays are written; their exceptions are OSErrors."""
        return [self._writers.submit(direct.write, self._file(key, name, bits), bits) for name, bits in as_bits(arrays)]

    def read(self, key: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Future]:
        """Futures, by name, that are done when the arrays are filled: what direct.read returns or raises."""
        return {name: self._readers.submit(direct.read, self._file(key, name, bits), bits) for name, bits in as_bits(arrays)}

    def _file(self, key: str, name: str, bits: np.ndarray) -> Path:
        return self.path / key / name / file_name(bits)

    def written(self, key: str, names: Iterable[str]) -> None:
        """Told when the arrays are written, before `meta` is: makes them durable, all at once, so that the journal is written once. OSError."""
        places = [self.path / key / name for name in names]
        list(self._writers.map(direct.sync, [*(file for place in places for file in place.iterdir()), *places, self.path]))

    def committed(self, key: str) -> None:
        """Told when `meta` is durable. OSError."""
        os.chmod(self.path / key / META, 0o600)

    def touch(self, key: str, used: float) -> None:
        """OSError."""
        os.utime(self.path / key / META, (used, used))

    def remove(self, key: str) -> None:
        """The entry is durably gone before its bytes are; what a crash leaves of it has no `meta`. OSError."""
        path = self.path / key
        if not os.path.lexists(path):
            return
        self._hold()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            (path / META).unlink()
            direct.sync(path)
        _remove(path)

    def _hold(self) -> None:
        """OSError where the directory, or its lock file, was removed while it was open: another process may have it now."""
        if self._lock.lost():
            raise OSError(errno.ESTALE, "the directory or its lock file was removed while it was open", str(self.root))

    def free(self) -> int | None:
        """Bytes that the file system has left; None where it cannot be asked."""
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.path).free
        return None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _remove(path: Path) -> None:
    """A file, a link or a whole directory, where it is there."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_entry(path: Path) -> bool:
    """Whether a directory has nothing in it that no entry has, finished or not; a link or a file is none."""
    if path.is_symlink() or not path.is_dir():
        return False
    for place, _, names in os.walk(path):
        depth = len(Path(place).relative_to(path).parts)
        if not all((name.split(".")[0] == META, bool(FILE.fullmatch(name)), False)[min(depth, 2)] for name in names):
            return False
    return True
