"""An entry: named arrays under a content key. Its `meta`, written last, makes it one: 8 bytes of xxh3 and the JSON that they are the sum of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from storage.arrays import Leaf

META = "meta"
SUM = 8
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(eq=False)
class Entry:
    """leaves: what each array is. fields: the caller's, as JSON gives them back. written, used: Unix seconds; `used` changes."""

    key: str
    leaves: Mapping[str, Leaf]
    fields: Mapping
    written: float
    used: float

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def empty(self) -> dict[str, np.ndarray]:
        """Memory that the whole entry can be read into, by the arrays' names."""
        return {name: leaf.empty() for name, leaf in self.leaves.items()}

    def misfit(self, arrays: Mapping[str, np.ndarray]) -> str | None:
        """Why it cannot be read into these arrays, which may be some of its own."""
        for name, array in arrays.items():
            leaf = self.leaves.get(name)
            if leaf is None or not leaf.fits(array):
                return f"{name}: expected {array.dtype.name}{list(array.shape)}, found {leaf or 'nothing'}"
        return None


def check_names(key: str, names: Iterable[str]) -> None:
    """ValueError for a key or a name of an array that cannot be a directory's."""
    if not KEY.fullmatch(key):
        raise ValueError(f"expected a key of 1 to 128 letters, digits, - and _, found {key!r}")
    for name in names:
        if not NAME.fullmatch(name) or name == META:
            raise ValueError(f"expected an array's name of 1 to 128 letters, digits, _, - and . that is not {META!r}, found {name!r}")


def seal(entry: Entry) -> bytes:
    """What `meta` holds."""
    leaves = {name: [leaf.dtype, leaf.shape, leaf.sum] for name, leaf in entry.leaves.items()}
    text = json.dumps({"key": entry.key, "leaves": leaves, "fields": entry.fields, "written": entry.written}).encode()
    return xxhash.xxh3_64_digest(text) + text


def unseal(key: str, sealed: bytes) -> Entry:
    """The entry that a `meta` found under this key describes, last used when it was written. ValueError where it is damaged or another's."""
    total, text = sealed[:SUM], sealed[SUM:]
    if total != xxhash.xxh3_64_digest(text):
        raise ValueError(f"{META}: sum differs")
    try:
        said = json.loads(text)
        leaves = {name: Leaf(dtype, tuple(shape), sum_) for name, (dtype, shape, sum_) in said["leaves"].items()}
        entry = Entry(said["key"], leaves, dict(said["fields"]), float(said["written"]), float(said["written"]))
        if entry.nbytes < 0:  # a dtype that numpy does not know is a TypeError
            raise ValueError(f"{entry.nbytes} bytes")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{META}: expected what this version writes, found {error!r}") from error
    if entry.key != key:
        raise ValueError(f"{META}: expected that of {key}, found that of {entry.key}")
    return entry
