"""The fingerprint: all that must be equal for stored bits to be the ones that would be computed now, as named fields."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Self

FIELDS = "fingerprint.json"
LAYOUT = "1"
"""Of the files themselves; raised when what older ones hold can no longer be read."""
DIGEST = re.compile(r"[0-9a-f]{32}")


def digest(text: bytes) -> str:
    """Of what FIELDS hold: where it is not the name of their directory they are damaged."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class Fingerprint:
    """Its digest, 32 hex digits, names the directory of the entries; the fields lie there in a file, to say later which of them differed."""

    def __init__(self, fields: Mapping[str, str]):
        for name, value in fields.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"fingerprint: expected names and values to be strings, found {name!r}: {value!r}")
        self.fields = {**fields, "storage": LAYOUT}
        self.digest = digest(self.text())

    @classmethod
    def named(cls, digest: str) -> Self:
        """One of which only the digest is known, because its FIELDS are damaged: it has no fields, and none are written for it."""
        made = cls({})
        made.fields, made.digest = {}, digest
        return made

    def text(self) -> bytes:
        """The contents of FIELDS."""
        return json.dumps(self.fields, indent=1, sort_keys=True).encode()

    def differences(self, text: bytes | None) -> dict[str, tuple[str | None, str | None]]:
        """Name of each field that differs -> (what it is in another's FIELDS, what it is here). Empty where the other's cannot be read."""
        try:
            other = dict(json.loads(text))
        except (TypeError, ValueError):
            return {}
        if not self.fields:
            return {}
        return {name: (other.get(name), self.fields.get(name)) for name in sorted(other | self.fields) if other.get(name) != self.fields.get(name)}
