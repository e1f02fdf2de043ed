"""Replays a trace through the caches' own lookup and placement, with counted bytes for arrays and modelled seconds for forwards, reads and
writes. The sizes are the 27B model's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Protocol

import numpy as np

from qjax.bench.baselines import Chapter, Infinite, LruSnapshots, Served
from qjax.bench.cached import Cached
from qjax.bench.cost import Cost
from qjax.bench.counting import counted
from qjax.bench.lru_nvme import LruNvme, LruOfAll
from qjax.bench.trace import Call
from qjax.config import MOST_GB, CacheConfig, DiskConfig
from qjax.model.config import ModelConfig
from qjax.model.qwen3_5 import layout

BUDGETS = ("resident_gb", "resident_stash_gb", "resident_pin_gb", "resident_park_gb", "cache_budget_gb", "response_gb")
"""What the caches may hold together. Rows count in the first four too, though they lie in the pool: the bytes are an upper bound."""
REPORT = 50
"""Requests from one report of the progress to the next."""
AFTER = 20
"""Requests after a restart that are told apart."""


class Policy(Protocol):
    """waited: modelled seconds of the last request, to its first token, that were not forwards."""

    waited: float

    def serve(self, call: Call, keys: np.ndarray) -> Served:
        """Serves one request; keys: int64, its prompt's."""

    def restart(self) -> None:
        """A planned stop of the machine's program, and a new start: what is only in memory is gone."""


class Run:
    """What one policy did with a trace."""

    def __init__(self):
        self._seconds: list[float] = []
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._prompts = self._read_again = 0
        self._after: Counter[str] = Counter()

    def add(self, prompt: int, served: Served, reachable: int, seconds: float, after: bool) -> None:
        """prompt: its tokens. reachable: those of them that a request before it began with. seconds: to the first token.

        after: it is one of the first after a restart.
        """
        self._seconds.append(seconds)
        self._requests[served.source] += 1
        self._tokens[served.source] += served.start
        self._prompts += prompt
        self._read_again += max(0, reachable - served.start)
        if after:
            self._after.update(requests=1, prompt_tokens=prompt, reused=served.start)

    def found(self) -> dict:
        reused = self._tokens.total()
        by = {name: {"requests": n, "reused": self._tokens[name]} for name, n in self._requests.most_common()}
        return {
            "reused": reused,
            "read_again": self._read_again,
            "share": reused / self._prompts,
            "ttft_s": {"mean": mean(self._seconds), "median": median(self._seconds)},
            "sources": {name: counts | {"share": counts["reused"] / self._prompts} for name, counts in by.items()},
            "after_restart": {**self._after, "share": self._after["reused"] / self._after["prompt_tokens"]} if self._after else None,
        }


def check(calls: Sequence[Call], tokens: int) -> None:
    """ValueError where a request does not fit a pool of so many tokens."""
    for number, call in enumerate(calls, 1):
        if call.prompt + call.answer > tokens:
            raise ValueError(
                f"request {number} of the trace has {call.prompt:,} tokens and an answer of {call.answer:,}: a pool of {tokens:,} tokens cannot hold "
                f"them (--kv-gb)"
            )


def replay(
    calls: Sequence[Call],
    config: CacheConfig,
    kv_gb: float,
    disk: DiskConfig | None = None,
    *,
    restart_every: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """What `qjax bench replay --json` prints, but for the trace's name. ValueError where a request does not fit the pool.

    config: the budgets, and the ledger of the run that has them. The snapshots get the bytes of the pool and of all budgets together.
    disk: with runs that have a tier on NVMe, too. restart_every: requests from one planned stop and new start to the next.
    """
    of = counted(layout(ModelConfig.preset("27b")))
    pages = int(kv_gb * 2**30) // of.page_bytes
    check(calls, pages * of.grid)
    if config.caches_gb is None:  # the machine that replays has nothing to do with the one that is modelled
        config = dataclasses.replace(config, caches_gb=sum(getattr(config, name) for name in BUDGETS))
    total = pages * of.page_bytes + config.together
    silent = dataclasses.replace(config, ledger=None)
    unlimited = dataclasses.replace(silent, **dict.fromkeys((*BUDGETS, "store_entry_gb", "caches_gb"), float(MOST_GB)))
    enough = sum((call.prompt + call.answer) // of.grid + 2 for call in calls)
    policies: dict[str, Policy] = {
        "infinite budgets": Cached(of, enough, unlimited, shelf=True),
        "default budgets": Cached(of, pages, config),
        "infinite cache": Infinite(),
        "lru snapshots": LruSnapshots(of, total),
        "chapter rules": Chapter(of, config),
    }
    on_nvme = {}
    if disk:
        on_nvme = {
            "nvme": Cached(of, pages, silent, disk=disk),
            "nvme, no spill": Cached(of, pages, silent, disk=dataclasses.replace(disk, session_spill=False)),
            "nvme, lru": Cached(of, pages, silent, disk=disk, nvme=LruNvme),
            "nvme, all, lru": Cached(of, pages, silent, disk=disk, nvme=LruOfAll),
        }
        policies |= on_nvme
    cost, runs, prompts, restarts = Cost(), {name: Run() for name in policies}, 0, 0
    for number, call in enumerate(calls):
        if restart_every and number and number % restart_every == 0:
            restarts += 1
            for policy in policies.values():
                policy.restart()
        if number % REPORT == 0:
            progress(f"{number:,} of {len(calls):,} requests")
        keys = call.keys()
        prompts += keys.size
        served = {name: policy.serve(call, keys) for name, policy in policies.items()}
        for name, one in served.items():
            seconds = cost.seconds(one.start, keys.size) + policies[name].waited
            runs[name].add(keys.size, one, served["infinite cache"].start, seconds, restarts > 0 and number % restart_every < AFTER)
    for policy in on_nvme.values():
        policy.drain()
    return {
        "requests": len(calls),
        "prompt_tokens": prompts,
        "pool_gb": pages * of.page_bytes / 2**30,
        "total_gb": total / 2**30,
        "restarts": restarts,
        "runs": {name: run.found() for name, run in runs.items()},
        "nvme": {name: policy.written_and_read() for name, policy in on_nvme.items()},
    }
