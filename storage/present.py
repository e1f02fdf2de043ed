"""Under which fingerprints something lies in a place, for whoever is none of those that wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from storage.bucket import connected
from storage.entry import META
from storage.errors import failure
from storage.fingerprint import DIGEST, FIELDS


def fingerprints(root: str | Path, options: Mapping | None = None) -> dict[str, bytes]:
    """Digest -> what its FIELDS hold, nothing where they cannot be read; root and options as of Storage.open, which takes the fields without
    "storage". Changes nothing.

    Of an object store every key is listed. OSError where a directory cannot be read, StorageError where a bucket cannot.
    """
    if str(root).startswith(("s3://", "gs://")):
        try:
            kv = connected(str(root), options or {})
            found = [key.decode().partition("/") for key in kv.list().result() if key.endswith(f"/{FIELDS}".encode())]
            return {digest: kv.read(f"{digest}/{FIELDS}").result().value for digest, _, rest in found if rest == FIELDS and DIGEST.fullmatch(digest)}
        except ValueError as error:
            raise failure(error, f"{root} cannot be listed") from error
    with os.scandir(root) as found:
        paths = [Path(f) for f in found if DIGEST.fullmatch(f.name) and f.is_dir(follow_symlinks=False)]
    return {path.name: text for path in sorted(paths) if (text := _fields(path)) is not None}


def _fields(path: Path) -> bytes | None:
    """None where they are missing and no entry lies beside them. PermissionError."""
    try:
        return (path / FIELDS).read_bytes()
    except FileNotFoundError:
        return b"" if any(path.glob(f"*/{META}")) else None
    except PermissionError:
        raise
    except OSError:  # something else in the file's place, or a disk that fails
        return b""
