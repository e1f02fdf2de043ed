"""What the server generated: a record for each answer, found by the messages that it stands after.

Records are lost with the process; what a client then sends is served as sent.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from qjax.serving.parse import Span
from qjax.thinking import CLOSE, OPEN

LOOKED = 8
"""Records of one key that are looked at, newest first: a prompt that is asked again and again does not make its own next turn slow."""
EACH = 256
"""Tokens that a record counts for beside its own: its objects take about 1 KB."""


def canonical(value) -> str:
    """JSON in one form only: keys sorted, nothing between the tokens, 1.0 as 1. Raises ValueError for what is no JSON."""
    return ENCODE(_plain(value))


ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # json.dumps makes one each time, half of what a message takes


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def called(message: dict) -> list[tuple[str, str]]:
    """Name and canonical arguments of each call of a message, whether the arguments are an object or its text."""
    calls = []
    for entry in message.get("tool_calls", ()):
        arguments = entry["function"]["arguments"]
        try:
            said = canonical(json.loads(arguments) if isinstance(arguments, str) else arguments)
        except (ValueError, RecursionError):  # a model can write a number of 5,000 digits, or brackets 900 deep: that stands for itself
            said = canonical([str(arguments)])
        calls.append((entry["function"]["name"], said))
    return calls


def ids(message: dict) -> list[str | None]:
    """The ids of a message's calls."""
    return [entry.get("id") for entry in message.get("tool_calls", ())]


class Chain:
    """Makes keys of conversations: each is a hash, 32 bytes, of all that the template writes of some messages, the reasoning left out.

    So conversations of one key are taken for the same one. loose: the template writes neither a text's outer white space nor the ids of calls,
    and the keys leave them out too: a client may give ids of its own.
    """

    def __init__(self, loose: bool):
        self.loose = loose

    def start(self, tenant: str, tools: list[dict] | None, variables: dict) -> bytes:
        """The key of a conversation's beginning: who talks, with which tools, in the order sent, and with which variables of the template."""
        return _hash(b"", [tenant, canonical(tools or []), canonical(variables)])

    def extend(self, key: bytes, message: dict) -> bytes:
        """The key of the messages of `key` and one more."""
        content = message["content"]
        texts = [message["role"], content.strip() if self.loose else content]
        for call in called(message):
            texts += call
        more = {name: v for name, v in message.items() if v and name not in OWN}
        if not self.loose:
            more["ids"] = [message.get("tool_call_id"), *ids(message)]
        return _hash(key, [*texts, canonical(more)] if more else texts)

    def keys(self, key: bytes, messages: list[dict]) -> list[bytes]:
        """The keys before each of the messages, and the one after them all."""
        keys = [key]
        for message in messages:
            keys.append(self.extend(keys[-1], message))
        return keys


OWN = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id"}


def _hash(key: bytes, texts: list[str]) -> bytes:
    """Lengths tell the texts apart. Of 400 messages these are 1 ms, and 2 ms if each is made JSON."""
    return blake2b(key + "".join(f"{len(text)}:{text}" for text in texts).encode("utf-8", "surrogatepass"), digest_size=32).digest()


@dataclass(frozen=True)
class Layout:
    """Where the parts of an answer stand in its text, in characters.

    reasoning: [start, end) without its tags; thought: where the content's side begins, after the tag that closes the reasoning.
    closed: False where the answer broke off inside the reasoning. content: [start, end). calls: the end of each. end: of them all.
    """

    reasoning: tuple[int, int]
    thought: int
    closed: bool
    content: tuple[int, int]
    calls: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Layout:
        """The layout that a parser's spans tell, up to what a template does not write so: text after a call, a call without its last tag."""
        reasoning, content, closed, thought, calls, at = (0, 0), None, True, 0, [], 0
        for part, raw in spans:
            begin, at = at, at + len(raw)
            if part == "reasoning":
                bare, tag, _ = raw.partition(CLOSE)
                opened = bare[: len(bare) - len(bare.lstrip())] + OPEN
                reasoning = (begin + (len(opened) if bare.startswith(opened) else 0), begin + len(bare))
                closed, thought = bool(tag), at
            elif part == "content" and not calls:
                content = (begin, at)
            elif part == "call" and raw.endswith("</tool_call>"):
                calls.append(at)
                content = content or (begin, begin)
            elif part == "call" or raw.strip():
                at = begin
                break
        return cls(reasoning, thought, closed, content or (at, at), tuple(calls), at)


@dataclass(frozen=True, eq=False, kw_only=True)
class Record:
    """One answer, and the prompt that it was generated after.

    before, after     the keys of the prompt's messages, and of those with the answer (None where no copy can be all of it: a call broke off)
    base, taken, tail the prompt: the rows of the record that it went on from, its first `taken` tokens, and these, int32 [n]
    user              tokens of the prompt before its last user message; None: not told
    tokens, hidden    the answer without its stop token, int32 [n]; [start, end) of those that the client never got
    layout            of the answer's text
    reasoning, content, calls, ids  what the client got of it: texts, what `called` makes of the calls, and their ids
    said              the reasoning that the rows have for each assistant message, this one included, without outer white space
    whole             what of it a copy of all of it says: how many tokens, and text after them (a stop string can begin inside a token)
    faithful          whether the template writes this answer with the white space that the tokens have; None: not asked
    """

    tenant: str
    before: bytes
    after: bytes | None
    base: Record | None
    taken: int
    tail: np.ndarray
    user: int | None
    tokens: np.ndarray
    hidden: tuple[tuple[int, int], ...]
    layout: Layout
    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    ids: tuple[str, ...]
    said: tuple[str, ...]
    whole: tuple[int, str]
    faithful: bool | None

    @property
    def prompt(self) -> np.ndarray:
        """The tokens that the answer was generated after, int32 [n]."""
        parts, record = [self.tail], self
        while record.base is not None:
            parts += [record.base.tokens[: record.taken], record.base.tail]
            record = record.base
        return np.concatenate(parts[::-1])

    @property
    def size(self) -> int:
        """Tokens that it counts for: the rows of its base are that one's."""
        return self.tail.size + self.tokens.size + EACH

    def line(self) -> Iterator[Record]:
        """This record, its base, that one's base, and so on."""
        record = self
        while record is not None:
            yield record
            record = record.base

    def same(self, other: Record) -> bool:
        """Whether both have the same rows and say the same to the client."""
        mine, others = ((r.base, r.taken, r.hidden, r.layout, r.ids, r.said) for r in (self, other))
        return mine == others and np.array_equal(self.tail, other.tail) and np.array_equal(self.tokens, other.tokens)


class Records:
    """Records, in any thread. limit: tokens in all, at 4 bytes and about as much text each.

    Over it, the tenant that has most loses its least recently used ones: nobody's traffic can drive another's few out. A record outlives those
    that went on from it, so what it counts for is freed when it goes.
    """

    def __init__(self, limit: int):
        self.limit, self.tokens = limit, 0
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._used: dict[str, OrderedDict[Record, None]] = {}  # a record always comes before its base
        self._keyed: dict[tuple[bool, bytes], list[Record]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._used.values()))

    def add(self, record: Record) -> Record:
        """Keeps a record as the newest of its keys, and uses all that it goes on from; returns it, or the same one if it is here already."""
        with self._lock:
            known = self._keyed.get((False, record.before), [])[-LOOKED:]
            record = next((old for old in known if old.same(record)), record)
            used = self._used.setdefault(record.tenant, OrderedDict())
            for old in record.line():
                new = old not in used  # a base can have gone while its answer was generated
                if new:
                    self._count(old, old.size)
                    used[old] = None
                used.move_to_end(old)
                for key in _keys(old) if new or old is record else ():
                    listed = self._keyed.setdefault(key, [])
                    if not new:
                        listed.remove(old)
                    listed.append(old)
            while self.tokens > self.limit:
                self._drop(max(self._held, key=self._held.__getitem__))
            return record

    def all(self) -> list[Record]:
        """Every record, of each tenant the least recently used first."""
        with self._lock:
            return [record for used in self._used.values() for record in used]

    def after(self, key: bytes) -> list[Record]:
        """The newest records whose answers end the messages of a key, newest first."""
        return self._newest((True, key))

    def before(self, key: bytes) -> list[Record]:
        """The newest records whose answers follow the messages of a key, newest first."""
        return self._newest((False, key))

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self.tokens = 0
            for kept in (self._held, self._used, self._keyed):
                kept.clear()

    def _newest(self, key: tuple[bool, bytes]) -> list[Record]:
        with self._lock:
            return self._keyed.get(key, [])[: -LOOKED - 1 : -1]

    def _count(self, record: Record, size: int) -> None:
        self.tokens += size
        self._held[record.tenant] = self._held.get(record.tenant, 0) + size

    def _drop(self, tenant: str) -> None:
        used = self._used[tenant]
        record, _ = used.popitem(last=False)
        self._count(record, -record.size)
        for key in _keys(record):
            if listed := self._keyed.get(key):
                listed.remove(record)
                if not listed:
                    del self._keyed[key]
        if not used:
            del self._used[tenant], self._held[tenant]


def _keys(record: Record) -> list[tuple[bool, bytes]]:
    """(whether the answer counts, key) of each list that a record stands in."""
    return [(False, record.before)] + ([] if record.after is None else [(True, record.after)])
