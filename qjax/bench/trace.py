"""Traces: the requests that an engine was asked, without their words. Equal keys stand for equal tokens.

Files are JSON lines, a request a line. Mooncake's format: `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, an id for
each 512 tokens of the prompt that stands for them and all before them. Qwen-Bailian's is told by its `chat_id`: `timestamp` is in
seconds, and the blocks have 16 tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

BLOCK_TOKENS, BAILIAN_TOKENS = 512, 16
LONGEST = 2**24
"""Tokens of a prompt or an answer at the most: above any model's context."""


@dataclass(frozen=True, eq=False)
class Call:
    """One request. Its tokens are told by spans: the keys of one are base, base + 1, ...

    at: seconds since the trace began. bases, counts: int64 [m] of the prompt's spans. answer, answer_base: tokens of the answer, and
    the key of the first, below 0. history, user: as of Engine.generate, None where the trace does not say. known: how far into the
    prompt and the answer the trace can tell that a later prompt goes on with it.
    """

    at: float
    bases: np.ndarray
    counts: np.ndarray
    answer: int
    answer_base: int
    known: int
    history: int | None = None
    user: int | None = None

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return int(self.counts.sum())

    def keys(self) -> np.ndarray:
        """The prompt's key ids, int64 [prompt]."""
        starts = np.cumsum(self.counts) - self.counts
        return np.repeat(self.bases - starts, self.counts) + np.arange(self.prompt)

    def answer_keys(self) -> np.ndarray:
        """int64 [answer], below 0."""
        return np.arange(self.answer_base, self.answer_base + self.answer)

    def spans(self) -> list[tuple[int, int]]:
        """(base, count) of the prompt's spans, then of the answer."""
        return [*zip(self.bases.tolist(), self.counts.tolist(), strict=True), (self.answer_base, self.answer)]


def read(path: Path | str) -> list[Call]:
    """The requests of a file, by time. OSError; ValueError with the number of the line and its field for one that is no request."""
    calls, ids, answered = [], {}, 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    calls.append(_call(line, ids, answered))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
                answered += calls[-1].answer
    if not calls:
        raise ValueError(f"{path}: expected a request a line, found none")
    return sorted(calls, key=lambda call: call.at)


def _call(line: str, ids: dict[int, int], answered: int) -> Call:
    """ids: a number for each block id so far, which is added to. answered: tokens of all answers so far."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, found {_short(line.strip())} ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {_short(line.strip())}")
    bailian = "chat_id" in found
    size = BAILIAN_TOKENS if bailian else BLOCK_TOKENS
    at = _field(found, "timestamp", "a number, 0 or more", lambda v: type(v) in (int, float) and 0 <= v < 2**63)
    prompt = _field(found, "input_length", f"a whole number, 1 to {LONGEST:,}", lambda v: type(v) is int and 1 <= v <= LONGEST)
    answer = _field(found, "output_length", f"a whole number, 0 to {LONGEST:,}", lambda v: type(v) is int and 0 <= v <= LONGEST)
    blocks = _field(found, "hash_ids", "a list of whole numbers", lambda v: isinstance(v, list) and all(type(i) is int for i in v))
    full = prompt // size
    if len(blocks) not in (full, -(-prompt // size)):
        raise ValueError(f"hash_ids: expected {-(-prompt // size)} for input_length {prompt:,}, one for each {size} tokens, found {len(blocks)}")
    if len(blocks) == full and prompt % size:
        blocks = [*blocks, (len(ids), answered)]  # the tokens past the last full block are nobody else's
    bases = size * np.array([ids.setdefault(block, len(ids)) for block in blocks], np.int64)
    counts = np.full(len(blocks), size, np.int64)
    counts[-1] = prompt - size * (len(blocks) - 1)
    # all that the trace tells of a prompt are its full blocks: the next turn agrees so far, which a template's history boundary does too
    known = full * size
    return Call(at if bailian else at / 1000, bases, counts, answer, -answered - answer, known, known or None)


def _field(found: dict, name: str, wanted: str, holds: Callable[[object], bool]):
    if name not in found:
        raise ValueError(f"{name}: expected {wanted}, found no such field")
    if not holds(found[name]):
        raise ValueError(f"{name}: expected {wanted}, found {_short(json.dumps(found[name]))}")
    return found[name]


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


def write(calls: Iterable[Call], path: Path | str) -> None:
    """A file in Mooncake's format; what it cannot tell, agreement past a prompt's last full block, is lost. OSError."""
    ids: dict[bytes, int] = {}
    with open(path, "w", encoding="utf-8") as file:
        for call in calls:
            keys = call.keys()
            chain, blocks = b"", []
            for start, end in pairwise([*range(0, keys.size, BLOCK_TOKENS), keys.size]):
                chain = hashlib.blake2b(chain + keys[start:end].tobytes(), digest_size=16).digest()
                blocks.append(ids.setdefault(chain, len(ids)))
            fields = {"timestamp": round(1000 * call.at), "input_length": call.prompt, "output_length": call.answer, "hash_ids": blocks}
            file.write(json.dumps(fields) + "\n")
