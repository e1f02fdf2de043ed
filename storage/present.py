"""Under which fingerprints something lies in a place, for whoever is none of those that wrote it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from storage.bucket import connected
from storage.errors import failure
from storage.fingerprint import DIGEST, FIELDS


def fingerprints(root: str | Path, options: Mapping | None = None) -> dict[str, bytes]:
    """Digest -> what its FIELDS hold; root and options as of Storage.open, which takes the fields without "storage". Changes nothing.

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
        paths = [Path(f) / FIELDS for f in found if DIGEST.fullmatch(f.name) and f.is_dir(follow_symlinks=False)]
    return {path.parent.name: path.read_bytes() for path in sorted(paths) if path.exists()}
