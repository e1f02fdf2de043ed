"""Replays a trace through the caches' own lookup and placement, with counted bytes for arrays and modelled seconds for forwards.

The sizes are the 27B model's. A request takes its pages, marks and anchors as in the engine; requests follow each other as they came,
one at a time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Protocol

import numpy as np

from qjax.bench.baselines import Chapter, Infinite, LruSnapshots, Served
from qjax.bench.counting import LOGITS, CountingPool, CountingSlot, counted
from qjax.bench.shelf import Shelf
from qjax.bench.trace import Call
from qjax.caches.lookup import Caches, Request
from qjax.config import MOST_GB, CacheConfig
from qjax.model.config import ModelConfig
from qjax.model.qwen3_5 import layout
from qjax.programs import MARKS
from qjax.state import Layout
from qjax.state import Sequence as State

MEASURED = {32768: 44.4, 65536: 93.7, 131072: 208.3}
"""Seconds of a cold prefill to its first token by length, measured on the 27B: what the modelled seconds are fitted to."""


class Cost:
    """Modelled seconds of a prefill: a token costs `first`, and `deeper` more for each token before it."""

    def __init__(self):
        lengths, seconds = (np.array(of, float) for of in (list(MEASURED), list(MEASURED.values())))
        terms = np.stack([lengths, lengths**2 / 2], axis=1)
        # the least relative error: below 0.4 % at all three lengths
        self.first, self.deeper = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(seconds)))[0].tolist()

    def seconds(self, start: int, end: int) -> float:
        """Of the rows from start to end."""
        return self.first * (end - start) + self.deeper * (end**2 - start**2) / 2


BUDGETS = ("resident_gb", "resident_stash_gb", "resident_pin_gb", "resident_park_gb", "cache_budget_gb", "response_gb")
"""What the caches may hold together. Rows count in the first four too, though they lie in the pool: the bytes are an upper bound."""
REPORT = 50
"""Requests from one report of the progress to the next."""


class Policy(Protocol):
    def serve(self, call: Call, keys: np.ndarray) -> Served:
        """Serves one request; keys: int64, its prompt's."""


class Cached:
    """The caches of an engine that computes nothing."""

    def __init__(self, layout: Layout, pages: int, config: CacheConfig, shelf: bool = False):
        """shelf: nothing is ever given up for room, see Shelf."""
        self._pool = CountingPool(layout, pages)
        self.caches = Caches(self._pool, config)
        self._empty = State.empty(layout)
        self._shelf = Shelf(self.caches.resident) if shelf else None

    def serve(self, call: Call, keys: np.ndarray) -> Served:
        if self._shelf:
            self._shelf.fetch(call)
        request = self.caches.begin(keys, keys, history=call.history, user=call.user)
        restored, pool = request.restored, self._pool
        ids = np.concatenate([keys, call.answer_keys()])
        slot = CountingSlot(pool, restored.sequence if restored else self._empty, ids)
        if restored:
            pool.release(restored.sequence.pages)
        self._prompt(slot, request, keys.size)
        while slot.length < ids.size:
            self._forward(slot, ids.size)
        end = slot.at(slot.length)
        pool.hold(end.pages)
        slot.close()
        request.finish(end)
        pool.release(end.pages)
        if self._shelf:
            self._shelf.put_back(call)
        return Served(request.start, request.record.source)

    def _prompt(self, slot: CountingSlot, request: Request, size: int) -> None:
        """Forwards what is left of the prompt, as Engine.run_prompt does."""
        while slot.length < size:
            start = slot.length
            marks = request.marks(start, start + min(slot.room(), size - start))[-MARKS:]
            self._forward(slot, size)
            request.caught([slot.at(mark) for mark in marks])
            if kind := "prompt" if slot.length == size else request.kind_at(slot.length):
                request.add(kind, slot.at(slot.length), LOGITS if slot.length == size else None)

    def _forward(self, slot: CountingSlot, end: int) -> None:
        """Up to the next grid line."""
        self.caches.make_room(lambda: self._pool.free > 0 or not slot.needs_page())
        slot.forward(min(slot.room(), end - slot.length))


class Run:
    """What one policy did with a trace."""

    def __init__(self):
        self._seconds: list[float] = []
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._prompts = self._read_again = 0

    def add(self, prompt: int, served: Served, reachable: int, seconds: float) -> None:
        """prompt: its tokens. reachable: those of them that a request before it began with. seconds: to the first token."""
        self._seconds.append(seconds)
        self._requests[served.source] += 1
        self._tokens[served.source] += served.start
        self._prompts += prompt
        self._read_again += max(0, reachable - served.start)

    def found(self) -> dict:
        reused = self._tokens.total()
        by = {name: {"requests": n, "reused": self._tokens[name]} for name, n in self._requests.most_common()}
        return {
            "reused": reused,
            "read_again": self._read_again,
            "share": reused / self._prompts,
            "ttft_s": {"mean": mean(self._seconds), "median": median(self._seconds)},
            "sources": {name: counts | {"share": counts["reused"] / self._prompts} for name, counts in by.items()},
        }


def check(calls: Sequence[Call], tokens: int) -> None:
    """ValueError where a request does not fit a pool of so many tokens."""
    for number, call in enumerate(calls, 1):
        if call.prompt + call.answer > tokens:
            raise ValueError(
                f"request {number} of the trace has {call.prompt:,} tokens and an answer of {call.answer:,}: a pool of {tokens:,} tokens cannot hold "
                f"them (--kv-gb)"
            )


def replay(calls: Sequence[Call], config: CacheConfig, kv_gb: float, *, progress: Callable[[str], None] = lambda text: None) -> dict:
    """What `qjax bench replay --json` prints, but for the trace's name. ValueError where a request does not fit the pool.

    config: the budgets, and the ledger of the run that has them. The snapshots get the bytes of the pool and of all budgets together.
    """
    of = counted(layout(ModelConfig.preset("27b")))
    pages = int(kv_gb * 2**30) // of.page_bytes
    check(calls, pages * of.grid)
    if config.caches_gb is None:  # the machine that replays has nothing to do with the one that is modelled
        config = dataclasses.replace(config, caches_gb=sum(getattr(config, name) for name in BUDGETS))
    total = pages * of.page_bytes + config.together
    unlimited = dataclasses.replace(config, ledger=None, **dict.fromkeys((*BUDGETS, "store_entry_gb", "caches_gb"), float(MOST_GB)))
    enough = sum((call.prompt + call.answer) // of.grid + 2 for call in calls)
    policies: dict[str, Policy] = {
        "infinite budgets": Cached(of, enough, unlimited, shelf=True),
        "default budgets": Cached(of, pages, config),
        "infinite cache": Infinite(),
        "lru snapshots": LruSnapshots(of, total),
        "chapter rules": Chapter(of, config),
    }
    cost, runs, prompts = Cost(), {name: Run() for name in policies}, 0
    for number, call in enumerate(calls):
        if number % REPORT == 0:
            progress(f"{number:,} of {len(calls):,} requests")
        keys = call.keys()
        prompts += keys.size
        served = {name: policy.serve(call, keys) for name, policy in policies.items()}
        for name, one in served.items():
            runs[name].add(keys.size, one, served["infinite cache"].start, cost.seconds(one.start, keys.size))
    return {
        "requests": len(calls),
        "prompt_tokens": prompts,
        "pool_gb": pages * of.page_bytes / 2**30,
        "total_gb": total / 2**30,
        "runs": {name: run.found() for name, run in runs.items()},
    }
