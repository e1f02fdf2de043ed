"""What each request did, and why: a record a request, in memory and in a file of JSON lines. Knows no model and no jax."""

import contextlib
import errno
import json
import math
import os
import stat
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Self

SOURCES = {
    "cold": "nothing was reused",
    "resident": "the rows in place, at an anchor",
    "end": "the rows in place, where the last generation ended",
    "prompt": "the rows in place, where the last prompt ended",
    "pinned": "the kept head of an earlier prompt",
    "parked": "the kept sequence of another session",
    "guest": "the kept sequence of a short request",
    "running": "the rows of a request that was running beside",
    "store": "a snapshot of the state store",
    "response": "the answer of an identical greedy request",
    "disk": "a head that prompts begin with, on NVMe",
    "spill": "a conversation that was written to NVMe",
}


class Reason(StrEnum):
    """A closed list of reasons, each with a `meaning` that says it in words."""

    def __new__(cls, value: str, meaning: str) -> Self:
        reason = str.__new__(cls, value)
        reason._value_, reason.meaning = value, meaning
        return reason


class Why(Reason):
    """Why tokens were read that a cache might have held."""

    EMPTY = "empty", "nothing was kept"
    DIFFERS = "differs", "the nearest kept sequence differs at a token"
    NO_ANCHOR = "no_anchor", "the rows agree further than the last anchor"
    BELOW_GRID = "below_grid", "the prompt is shorter than a grid line, and nothing shorter was kept"
    EVICTED = "evicted", "it was kept, and made room for something else"
    CLEARED = "cleared", "it was kept until the caches were emptied"
    NO_ROOM = "no_room", "it is kept, and the pool had no room for it beside what ran"
    DAMAGED = "damaged", "it was kept, and is damaged or could not be taken"
    NONE = "none", "only new tokens were read"


@dataclass(kw_only=True, slots=True)  # filled in as the request goes on; slots make a misspelled field an error
class Record:
    """One request. Lengths are in tokens of the prompt, times in seconds.

    number                of the request, from 1; a ledger sets it
    at                    when the request came, in seconds since 1970
    source                one of SOURCES: what gave the first `start` tokens, which needed no forward
    exact                 what follows has a cold run's bits; where not it is a session resume at level grid, held to the greedy gate
    agrees                longest prefix that anything kept agrees with; read_again: tokens below it that were forwarded again
    differs_at            the first token at which the nearest kept sequence and the prompt differ, if they do
    kept_text, found_text a few tokens around it, decoded
    session               the client's name of the conversation
    parted                where and why a conversation was not served with the rows of its last answer, as a server tells it
    failed                "tier: reason" of each hit that could not be taken
    anchors_taken         how many by kind; anchors_dropped: how many by reason
    """

    number: int = 0
    at: float = field(default_factory=time.time)
    tenant: str = ""
    session: str | None = None
    parted: str | None = None
    prompt_tokens: int
    source: str = "cold"
    start: int = 0
    exact: bool = True
    read_again: int = 0
    agrees: int = 0
    why: Why = Why.NONE
    differs_at: int | None = None
    kept_text: str | None = None
    found_text: str | None = None
    failed: list[str] = field(default_factory=list)
    lookup_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    generated: int = 0
    finish: str = "cancelled"
    anchors_taken: dict[str, int] = field(default_factory=dict)
    anchors_dropped: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict:
        """The fields by name, as plain Python values (a numpy number becomes one)."""
        return {f.name: _KINDS[f.type].plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, values: object) -> Self:
        """What `to_json` gave. ValueError names the field that is wrong."""
        if not isinstance(values, dict):
            raise ValueError(f"expected a record, found {_short(values)}")
        names = {f.name for f in fields(cls)}
        for name in sorted(names ^ values.keys()):
            raise ValueError(f"{name}: {'missing' if name in names else 'no such field'}")
        for f in fields(cls):
            kind = _KINDS[f.type]
            if not kind.holds(values[f.name]):
                raise ValueError(f"{f.name}: expected {kind.name}, found {_short(values[f.name])}")
        return cls(**values | {"why": Why(values["why"])})


@dataclass(frozen=True)
class _Kind:
    """A type of field: its name in errors, how a value is made plain, and what a value out of a file must be."""

    name: str
    plain: Callable
    holds: Callable[[object], bool]

    def optional(self) -> "_Kind":
        return _Kind(f"{self.name} or null", lambda v: v if v is None else self.plain(v), lambda v: v is None or self.holds(v))


def _is_count(v) -> bool:
    return type(v) is int and 0 <= v < 2**63


def _is_seconds(v) -> bool:
    return type(v) in (int, float) and math.isfinite(v) and 0 <= v < 2.5e11  # the year 9892: a date can be made of it


def _is_text(v) -> bool:
    return isinstance(v, str)


def _is_counts(v) -> bool:
    return isinstance(v, dict) and all(map(_is_count, v.values()))


_COUNT, _TEXT = _Kind("a count", int, _is_count), _Kind("text", str, _is_text)
_KINDS = {
    int: _COUNT,
    int | None: _COUNT.optional(),
    float: _Kind("seconds", float, _is_seconds),
    bool: _Kind("true or false", bool, lambda v: isinstance(v, bool)),
    str: _TEXT,
    str | None: _TEXT.optional(),
    Why: _Kind(f"one of {', '.join(Why)}", str, lambda v: _is_text(v) and v in list(Why)),
    list[str]: _Kind("a list of texts", lambda v: list(map(str, v)), lambda v: isinstance(v, list) and all(map(_is_text, v))),
    dict[str, int]: _Kind("counts by name", lambda v: {str(name): int(n) for name, n in v.items()}, _is_counts),
}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"


class Totals:
    """Sums and counts over records.

    requests, prompt_tokens, read_again; reused: tokens that needed no forward
    by_source, by_why: requests, of every source and reason, also where none was
    resume_depths: requests by how far before the prompt's end a cache let them start: 0 is the very end, n stands for n to 2n - 1 tokens
    """

    def __init__(self):
        self.requests = self.prompt_tokens = self.reused = self.read_again = 0
        self.by_source: Counter[str] = Counter(dict.fromkeys(SOURCES, 0))
        self.by_why: Counter[str] = Counter({why.value: 0 for why in Why})
        self.resume_depths: Counter[int] = Counter()

    def add(self, record: Record) -> None:
        self.requests += 1
        self.prompt_tokens += int(record.prompt_tokens)
        self.reused += int(record.start)
        self.read_again += int(record.read_again)
        self.by_source[str(record.source)] += 1
        self.by_why[str(record.why)] += 1
        if record.start:
            depth = int(record.prompt_tokens - record.start)
            self.resume_depths[1 << depth.bit_length() - 1 if depth else 0] += 1

    def to_json(self) -> dict:
        """All but the depths, by name."""
        sums = {name: getattr(self, name) for name in ("requests", "prompt_tokens", "reused", "read_again")}
        return sums | {"by_source": dict(self.by_source), "by_why": dict(self.by_why)}


class Ledger:
    """Keeps the newest `limit` records in memory and the totals of all; with a path it also adds each to a file, a line of JSON a record.

    The file is made with mode 0600: a record holds a few tokens of its prompt. It is opened anew for each record, so it may be moved away
    at any time. A record that cannot be written is counted in `lost`, and the first is told on standard error; no request fails of it.
    Raises OSError where the file cannot be opened at the start. Any thread may call any method.
    """

    def __init__(self, limit: int = 1000, path: Path | str | None = None):
        self.path, self.lost = path, 0
        self._records: deque[Record] = deque(maxlen=limit)
        self._totals, self._lock = Totals(), threading.Lock()
        if path is not None:
            os.close(_open(path))

    def add(self, record: Record) -> Record:
        """Numbers a finished record and keeps it; nobody changes it after that. Returns it."""
        with self._lock:
            record.number = self._totals.requests + 1
            self._totals.add(record)
            self._records.append(record)
            if self.path is not None:
                self._write(json.dumps(record.to_json()).encode() + b"\n")
        return record

    def _write(self, line: bytes) -> None:
        try:
            _append(self.path, line)
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                with contextlib.suppress(OSError, ValueError):  # standard error can be closed too
                    print(f"qjax: the ledger loses records: {error}", file=sys.stderr)

    @property
    def records(self) -> list[Record]:
        """The newest records, oldest first."""
        with self._lock:
            return list(self._records)

    def totals(self) -> dict:
        """Totals.to_json of all records since the start, and `lost`."""
        with self._lock:
            return self._totals.to_json() | {"lost": self.lost}

    def resume_depths(self) -> dict[int, int]:
        """Totals.resume_depths of all records since the start, in order."""
        with self._lock:
            return dict(sorted(self._totals.resume_depths.items()))


def _open(path: Path | str) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)


def _append(path: Path | str, line: bytes) -> None:
    """Adds a line to the file in one write; begins a new line where an earlier write was cut off. Raises OSError."""
    file = _open(path)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode) and os.lseek(file, 0, os.SEEK_END):
            os.lseek(file, -1, os.SEEK_END)
            if os.read(file, 1) != b"\n":
                line = b"\n" + line
        written = os.write(file, line)
    finally:
        os.close(file)
    if written < len(line):
        raise OSError(errno.ENOSPC, f"wrote {written} of {len(line)} bytes", str(path))


LONGEST = 2**20  # bytes: no record comes near, and a file without line ends is not read whole
HOPELESS = 100  # lines without a record: the file is something else


def read(path: Path | str, damaged: Callable[[int, str], None] = lambda line, reason: None) -> Iterator[Record]:
    """The records of a ledger's file, in order. Calls `damaged` with the number of a line that holds none, and the reason, and goes on.

    Raises OSError, and ValueError where not one of the lines, or of the first HOPELESS, holds a record; an empty file is a ledger.
    """
    found, number, first = False, 0, ""
    with open(path, "rb") as file:
        while line := file.readline(LONGEST):
            number += 1
            try:
                record = Record.from_json(json.loads(line.decode()))
            except (ValueError, RecursionError) as error:
                damaged(number, str(error))
                first = first or f"line {number}: {error}"
                if not found and number == HOPELESS:
                    break
                continue
            found = True
            yield record
    if number and not found:
        raise ValueError(f"{path}: not a ledger: {first}")
