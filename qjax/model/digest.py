"""The digest of a checkpoint's weight files: computed once, and kept beside them for as long as they stay as they are."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

log = logging.getLogger(__name__)

KEPT = "qjax-digest.json"
"""Beside config.json: {"files": what Files.seen holds, "digest": 32 hex digits, "check": a sum of the two}."""
FRESH = 2.0
"""Seconds from a file's last change in which another one may leave its times as they are; file systems count in ticks of up to two."""
PATIENCE = 5.0
"""Seconds between two lines that say how far the reading is."""
PART = 2**23


@dataclass(frozen=True)
class Files:
    """Weight files as they were just before they were loaded. seen: name below the directory -> size, mtime_ns, ctime_ns, inode.

    A change that puts size and mtime back leaves another ctime. keep: whether the digest is kept beside the files.
    """

    directory: Path
    seen: dict[str, tuple[int, ...]]
    keep: bool

    @classmethod
    def of(cls, directory: Path, files: Iterable[Path], keep: bool) -> Files:
        """files: below the directory. OSError where one is not there."""
        return cls(directory.absolute(), _stats(directory, (file.relative_to(directory).as_posix() for file in files)), keep)

    def digest(self) -> str | None:
        """32 hex digits of names and contents, None where the files are no longer what was loaded. 9 GB/s where the system has them in memory."""
        if not self._unchanged():
            return None
        if self.keep and (kept := self._kept()):
            return kept
        digest = self._read()
        if digest is None or not self._unchanged():
            return None
        if self.keep:
            self._keep(digest)
        return digest

    def _unchanged(self) -> bool:
        with contextlib.suppress(OSError):
            return _stats(self.directory, self.seen) == self.seen
        return False

    def _read(self) -> str | None:
        found, buffer = xxhash.xxh3_128(), memoryview(bytearray(PART))
        done, total, said = 0, sum(size for size, *_ in self.seen.values()), time.monotonic()
        try:
            for name, (size, *_) in sorted(self.seen.items()):
                found.update(f"{name} {size}\n".encode())
                with open(self.directory / name, "rb", buffering=0) as file:
                    while n := file.readinto(buffer):
                        found.update(buffer[:n])
                        done += n
                        if time.monotonic() - said > PATIENCE:
                            said = time.monotonic()
                            log.warning("%s: %.1f of %.1f GB of weights read for their digest", self.directory, done / 1e9, total / 1e9)
        except OSError:
            return None
        return found.hexdigest()

    def _kept(self) -> str | None:
        """What is kept, where it is whole and these files' own."""
        try:
            kept = json.loads((self.directory / KEPT).read_bytes())
            digest = kept["digest"]
            whole = re.fullmatch("[0-9a-f]{32}", digest) and kept == self._record(digest)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return digest if whole else None

    def _record(self, digest: str) -> dict:
        record = {"files": {name: list(stats) for name, stats in self.seen.items()}, "digest": digest}
        return record | {"check": xxhash.xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())}

    def _keep(self, digest: str) -> None:
        if max(ctime for _, _, ctime, _ in self.seen.values()) > time.time_ns() - FRESH * 1e9:
            return  # the next start computes and keeps it
        partial = None
        try:
            number, partial = tempfile.mkstemp(prefix=f".{KEPT}.", dir=self.directory)  # of mode 0600
            with open(number, "w", encoding="utf-8") as file:
                json.dump(self._record(digest), file)
            os.replace(partial, self.directory / KEPT)
        except OSError as error:
            if partial:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
            log.warning("%s: the digest of its weights cannot be kept and is computed at every start: %s", self.directory, error.strerror or error)


def _stats(directory: Path, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    found = {name: os.stat(directory / name) for name in names}
    return {name: (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in found.items()}
