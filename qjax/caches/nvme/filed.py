"""What the fields of an entry say: an anchor, or a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from storage import Entry

DISK, SPILL = "disk", "spill"
"""Uses of an anchor: a head that prompts begin with, or a part of one conversation."""
PAGE, ANCHOR, SESSION = "p-", "a-", "s-"
"""What keys begin with."""
IDS, TOKENS, LOGITS, SECTIONS, OPEN = "ids", "tokens", "logits", "section.", "open."
"""Names of arrays: of a page its int64 key ids and int32 tokens, beside its views; of an anchor what its sections' names begin with."""
WIDEST = 2**24
"""Logits that an anchor has at the most: above any vocabulary."""


@dataclass(eq=False)
class FiledAnchor:
    """line: the chain's hash at the last grid line at or below it. tail: int64 key ids from there to its length. pages: keys of those below it.

    kind, tainted: as of an anchor. logits, open: whether it has them. used: Unix seconds. hits: prompts that it served. summed: its key is
    the sum of its content; else the chain's hash at its length, and its whole pages have the chain's too.
    """

    key: str
    kind: str
    length: int
    line: str
    tail: np.ndarray
    pages: tuple[str, ...]
    tainted: bool
    use: str
    logits: bool
    open: bool
    nbytes: int
    used: float
    hits: int = 0
    summed: bool = False

    @staticmethod
    def fields(kind: str, length: int, line: str, tail: np.ndarray, pages: list[str], tainted: bool, use: str) -> dict:
        return {"kind": kind, "length": length, "line": line, "tail": tail.tolist(), "pages": pages, "tainted": tainted, "use": use}

    @classmethod
    def of(cls, entry: Entry, grid: int) -> FiledAnchor:
        """ValueError where the fields are not what this version writes."""
        f, names = entry.fields, entry.leaves
        try:
            of = {"kind": _is(f, "kind", str), "line": _is(f, "line", str), "tainted": _is(f, "tainted", bool), "use": _is(f, "use", str)}
            length, tail, pages = _is(f, "length", int), np.array(f["tail"], np.int64), _keys(f, "pages", PAGE)
            if length < 1 or len(pages) != -(-length // grid) or tail.shape != (length % grid,):
                raise ValueError(f"{length} tokens, {len(pages)} pages and {tail.shape} ids past the last line")
            if of["use"] not in (DISK, SPILL):
                raise ValueError(f"use {of['use']!r}")
            if LOGITS in names and (names[LOGITS].dtype != "float32" or len(names[LOGITS].shape) != 1 or not 0 < names[LOGITS].shape[0] <= WIDEST):
                raise ValueError(f"logits {names[LOGITS]}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{entry.key}: expected an anchor's fields, found {error!r}") from error
        has = {"logits": LOGITS in names, "open": any(name.startswith(OPEN) for name in names)}
        return cls(entry.key, length=length, tail=tail, pages=pages, nbytes=entry.nbytes, used=entry.used, **of, **has)


@dataclass(eq=False)
class FiledSession:
    """A conversation. pages: keys of all its pages. anchors: keys. tail: as of an anchor at its length. history, turns: as of a Session.

    resident: it was the resident one. written, used: Unix seconds.
    """

    key: str
    tenant: str
    length: int
    history: int
    turns: int
    resident: bool
    tail: np.ndarray
    pages: tuple[str, ...]
    anchors: tuple[str, ...]
    written: float
    used: float

    @classmethod
    def of(cls, entry: Entry, grid: int) -> FiledSession:
        """ValueError where the fields are not what this version writes."""
        f = entry.fields
        try:
            length, tail = _is(f, "length", int), np.array(f["tail"], np.int64)
            pages, anchors = _keys(f, "pages", PAGE), _keys(f, "anchors", ANCHOR)
            if length < 1 or not anchors or len(pages) != -(-length // grid) or tail.shape != (length % grid,):
                raise ValueError(f"{length} tokens, {len(pages)} pages, {len(anchors)} anchors and {tail.shape} ids past the last line")
            of = {"tenant": _is(f, "tenant", str), "resident": _is(f, "resident", bool)}
            of |= {"history": _is(f, "history", int), "turns": _is(f, "turns", int)}
            if not 0 <= of["history"] <= length or of["turns"] < 1:
                raise ValueError(f"{of['history']} tokens of history in {length}, {of['turns']} turns")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{entry.key}: expected a session's fields, found {error!r}") from error
        return cls(entry.key, length=length, tail=tail, pages=pages, anchors=anchors, written=entry.written, used=entry.used, **of)

    def is_begun_by(self, keys: np.ndarray, pages: tuple[str, ...], grid: int) -> bool:
        """Whether a longer session, of these key ids and pages, goes on with this one: it has what any later turn has, its history."""
        line = self.length - self.length % grid
        if self.history < line or self.length > keys.size:
            return (
                self.pages[: line // grid] == pages[: line // grid]
                and self.length <= keys.size
                and np.array_equal(self.tail, keys[line : self.length])
            )
        return self.pages[: line // grid] == pages[: line // grid] and np.array_equal(self.tail[: self.history - line], keys[line : self.history])


def content_sum(arrays: Mapping[str, np.ndarray], more: str = "") -> str:
    """32 hex digits of some arrays' names and bytes, and of a text."""
    sum_ = xxhash.xxh3_128(more.encode())
    for name in sorted(arrays):
        sum_.update(name.encode())
        sum_.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8))
    return sum_.hexdigest()


def anchor_sum(arrays: Mapping[str, np.ndarray], line: str, pages: Iterable[str], length: int, tainted: bool) -> str:
    """Of all that an anchor is. line: of its tenant's chain, so that tenants who said the same have anchors of their own."""
    return content_sum(arrays, f"{line} {list(pages)} {length} {tainted}")


def _is(fields: Mapping, name: str, kind: type):
    """A field of exactly this type: True is no number. TypeError, KeyError."""
    if type(fields[name]) is not kind:
        raise TypeError(f"{name} {fields[name]!r}")
    return fields[name]


def _keys(fields: Mapping, name: str, prefix: str) -> tuple[str, ...]:
    """A field that lists different keys of one kind."""
    keys = tuple(map(str, _is(fields, name, list)))
    if len(set(keys)) < len(keys) or not all(key.startswith(prefix) for key in keys):
        raise ValueError(f"{name} {list(keys)}")
    return keys
