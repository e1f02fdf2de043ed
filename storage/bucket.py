"""Entries in an object store, under the keys that are a directory's paths (directory.py).

Any number of processes share it: nobody locks it or sweeps it, and the bucket's own rules let entries age out. What one of them writes
over, or what has lost a part, another finds by the sums.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import tensorstore as ts

from storage import arrays as files
from storage.entry import META
from storage.errors import failure
from storage.fingerprint import FIELDS, Fingerprint

RETRIES = {"max_retries": 3, "initial_delay": "100ms", "max_delay": "1s"}
"""TensorStore's own 32 of up to 32 s would hold a request for many minutes that a prefill serves in one."""
SILENCE = {"CONNECT_TIMEOUT_SECONDS": "5", "LOW_SPEED_TIME_SECONDS": "5", "LOW_SPEED_LIMIT_BYTES": "1"}
"""When a server that says nothing is given up; TensorStore would wait for it without end, and takes this from the environment alone."""


def connected(url: str, options: Mapping, below: str = "") -> ts.KvStore:
    """What lies below a path of an object store. ValueError."""
    for name, value in SILENCE.items():
        os.environ.setdefault(f"TENSORSTORE_CURL_{name}", value)
    spec = ts.KvStore.Spec(f"{url.rstrip('/')}/").to_json()
    spec |= {"path": f"{spec.get('path', '')}{below}", **options}
    return ts.KvStore.open(spec, context=ts.Context({"s3_request_retries": RETRIES, "gcs_request_retries": RETRIES})).result()


class Bucket:
    """The methods are a Directory's; each raises ValueError where the object store does not do what it is asked."""

    shared, swept, unfinished = True, (), ()

    def __init__(self, url: str, fingerprint: Fingerprint, read_only: bool, options: Mapping):
        """options: members of TensorStore's spec that the URL does not have, such as endpoint. StorageError where it cannot be opened."""
        try:
            self.kv = connected(url, options, f"{fingerprint.digest}/")
            if not read_only:
                self.kv.write(FIELDS, fingerprint.text()).result()
        except ValueError as error:
            raise failure(error, f"{url} cannot be opened") from error

    def metas(self) -> Iterator[tuple[str, bytes, None]]:
        found = [key.decode() for key in self.kv.list().result() if key.endswith(f"/{META}".encode())]
        reads = [(key, self.kv.read(key)) for key in found if key.count("/") == 1]
        for key, read in reads:
            if (result := read.result()).state == "value":
                yield key.removesuffix(f"/{META}"), result.value, None

    def meta(self, key: str) -> bytes | None:
        result = self.kv.read(f"{key}/{META}").result()
        return result.value if result.state == "value" else None

    def begin(self, key: str, names: Iterable[str]) -> None:
        pass

    def write(self, key: str, arrays: Mapping[str, np.ndarray]) -> list[ts.Future]:
        return files.write(self.kv, key, arrays)

    def read(self, key: str, arrays: Mapping[str, np.ndarray]) -> dict[str, ts.Future]:
        """The futures' results are None: no sum has been taken."""
        return files.read(self.kv, key, arrays)

    def written(self, key: str, names: Iterable[str]) -> None:
        pass

    def committed(self, key: str) -> None:
        pass

    def touch(self, key: str, used: float) -> None:
        pass

    def remove(self, key: str) -> None:
        self.kv.write(f"{key}/{META}", None).result()
        self.kv.delete_range(ts.KvStore.KeyRange(f"{key}/", f"{key}0")).result()  # "0" comes after "/"

    def free(self) -> None:
        return None

    def close(self) -> None:
        pass
