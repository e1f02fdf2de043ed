"""The response cache: the tokens of an identical greedy request. Nothing is forwarded, and no state is left behind."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from qjax.sampling import Sampling

FINISHED = ("stop", "length")
"""How an answer ends that another request may get: a cancelled one is not what its request asked for."""
EVENTS = ("hits", "misses", "offers", "evicted", "refused_sampling", "refused_unfinished", "refused_too_large")


@dataclass(frozen=True, eq=False, slots=True)
class Response:
    """tokens: int32 [n], generated, read only, as a Generation has them. finish: "stop" or "length"."""

    tokens: np.ndarray
    finish: str


class ResponseCache:
    """Answers by the whole request: tenant, key ids, max_tokens, stop strings, penalties. Requests that sample are refused.

    Entries lie in the order of their last use, the least recent one first, which goes first.
    """

    def __init__(self, limit_bytes: int):
        """limit_bytes: of the requests and answers that are kept, 0 for none."""
        if limit_bytes < 0:
            raise ValueError(f"the response cache's bytes must be 0 or more, not {limit_bytes:,}")
        self.limit_bytes, self.nbytes = limit_bytes, 0
        self._entries: dict[tuple, tuple[Response, int]] = {}  # with the bytes of both
        self._counts: Counter[str] = Counter()

    def get(self, keys: np.ndarray, tenant: str, sampling: Sampling, max_tokens: int, stop: Tokens[str] = ()) -> Response | None:
        """The answer to an identical request, or None. keys: int64 [n]."""
        if sampling.temperature > 0:
            self._counts["refused_sampling"] += 1
            return None
        key = _key(keys, tenant, sampling, max_tokens, stop)
        if key not in self._entries:
            self._counts["misses"] += 1
            return None
        self._counts["hits"] += 1
        self._entries[key] = self._entries.pop(key)
        return self._entries[key][0]

    def put(
        self,
        keys: np.ndarray,
        tenant: str,
        sampling: Sampling,
        max_tokens: int,
        stop: Tokens[str],
        tokens: Tokens[int],
        finish: str,
        room: int = sys.maxsize,
    ) -> bool:
        """Keeps an answer, True where it is kept now. tokens, finish: as the Generation has them. room: bytes for all answers now."""
        self._counts["offers"] += 1
        if sampling.temperature > 0:
            self._counts["refused_sampling"] += 1
            return False
        if finish not in FINISHED:
            self._counts["refused_unfinished"] += 1
            return False
        tokens = np.array(tokens, np.int32)
        tokens.flags.writeable = False
        key, response = _key(keys, tenant, sampling, max_tokens, stop), Response(tokens, finish)
        size = _bytes(key, response)
        limit = min(self.limit_bytes, room)
        if size > limit:
            self._counts["refused_too_large"] += 1
            return False
        if key in self._entries:
            self._drop(key)
        self.shrink(limit - size)
        self._entries[key] = response, size
        self.nbytes += size
        return True

    def shrink(self, limit: int) -> None:
        """Gives answers back until no more than so many bytes are held."""
        while self._entries and self.nbytes > limit:
            self._counts["evicted"] += 1
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple) -> None:
        self.nbytes -= self._entries.pop(key)[1]

    def stats(self) -> dict[str, int]:
        return {"entries": len(self._entries), "bytes": self.nbytes} | {event: self._counts[event] for event in EVENTS}

    def clear(self) -> None:
        """Gives all answers back; the counters go on."""
        self._entries.clear()
        self.nbytes = 0


def _key(keys, tenant: str, sampling: Sampling, max_tokens: int, stop) -> tuple:
    """All that a greedy answer depends on. Compared by its bytes and strings: the dictionary's hash only finds the candidate."""
    # + 0.0: a penalty of -0.0 is none
    penalties = float(sampling.presence_penalty) + 0.0, float(sampling.repetition_penalty)
    return np.asarray(keys, np.int64).tobytes(), tenant, int(max_tokens), tuple(stop), penalties


def _bytes(key: tuple, response: Response) -> int:
    ids, tenant, max_tokens, stop, penalties = key
    held = (key, ids, tenant, max_tokens, stop, *stop, penalties, *penalties, response, response.tokens)
    return sum(map(sys.getsizeof, held))
