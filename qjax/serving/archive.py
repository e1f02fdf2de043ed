"""The answers on record, from one start of a server to the next: a conversation that was written goes on with its own rows."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import os
from pathlib import Path

import numpy as np
import xxhash

from qjax.serving.records import Layout, Record, Records

log = logging.getLogger(__name__)

NAME, FORM = "answers", 1
"""The file's name, in the directory of the model's caches; the form of what is in it."""
ARRAYS, KEYS = ("tail", "tokens"), ("before", "after")


class Archive:
    """One file, of mode 0600: a line that says of what it is, with a sum, then the records. It has texts of answers, as the caches have tokens."""

    def __init__(self, directory: Path, model: str):
        """model: what the records are good for, a tokenizer and a template."""
        self._path, self._model = directory / NAME, model

    def save(self, records: Records) -> None:
        """Puts the records in the place of what is there; one line in the log where that fails."""
        body = json.dumps(_plain(records.all()), ensure_ascii=True).encode()
        head = json.dumps({"form": FORM, "model": self._model, "sum": xxhash.xxh3_128_hexdigest(body)}).encode()
        scratch = self._path.with_name(f"{NAME}.new")
        try:
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(head + b"\n" + body)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._path)
        except OSError as e:
            with contextlib.suppress(OSError):
                scratch.unlink()
            log.warning("%s was not written (%s): after a restart conversations go on as their clients send them", self._path, e.strerror or e)

    def remove(self) -> None:
        """What is there goes, with the caches that it lies beside; one line in the log where it cannot."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as e:
            log.warning("%s was not removed: %s", self._path, e.strerror or e)

    def load(self, records: Records) -> int:
        """Adds what is there, and says how many there are; none, and one line in the log, where it is damaged or of another model."""
        try:
            head, _, body = self._path.read_bytes().partition(b"\n")
            head = json.loads(head)
            if (head["form"], head["model"]) != (FORM, self._model):
                log.info("%s is of another model or version, and is not used", self._path)
                return 0
            if head["sum"] != xxhash.xxh3_128_hexdigest(body):
                raise ValueError("its sum is another one")
            found = _records(json.loads(body))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, TypeError, LookupError) as e:
            log.warning("%s is damaged, and is not used: %s", self._path, e)
            return 0
        for record in found:
            records.add(record)
        return len(found)


def _plain(records: list[Record]) -> dict:
    """The records and all that they go on from, each after its base, as JSON; which of them are the records."""
    numbers: dict[Record, int] = {}
    for record in records:
        for one in reversed(list(record.line())):
            numbers.setdefault(one, len(numbers))
    return {"all": [_fields(one, numbers) for one in numbers], "kept": [numbers[record] for record in records]}


def _fields(record: Record, numbers: dict[Record, int]) -> dict:
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    values |= {name: base64.b85encode(np.ascontiguousarray(values[name], "<i4").tobytes()).decode() for name in ARRAYS}
    values |= {name: values[name] and values[name].hex() for name in KEYS}
    return values | {"base": None if record.base is None else numbers[record.base], "layout": dataclasses.astuple(record.layout)}


def _records(plain: dict) -> list[Record]:
    made: list[Record] = []
    for values in plain["all"]:
        values = {name: _tuples(value) for name, value in values.items()}
        values |= {name: np.frombuffer(base64.b85decode(values[name]), "<i4").astype(np.int32) for name in ARRAYS}
        values |= {name: values[name] and bytes.fromhex(values[name]) for name in KEYS}
        base = None if values["base"] is None else made[values["base"]]
        made.append(Record(**values | {"base": base, "layout": Layout(*values["layout"])}))
    return [made[number] for number in plain["kept"]]


def _tuples(value):
    """JSON has lists where the records have tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
