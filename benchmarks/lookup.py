"""What a lookup costs over all tiers in memory, every one of them with long sessions that agree with the prompt nearly to its end.

    python -m benchmarks.lookup [--tokens 131072] [--sessions 8] [--json]

A request is begun as the engine begins it: the search in the pool and in the state store, the reasons for the ledger, the taking of what was
found. Nothing is forwarded: the sequences have the right keys, pages of two bytes a token, and no model. Sessions take the four roles in turn;
as many again are in the state store, and remembered as gone. They share a head and part in their last 300 tokens, so that every comparison
reads all of its keys. Three prompts: the same again, the next turn of the resident session, and one that parts where no anchor is.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from qjax.caches.keys import common
from qjax.caches.lookup import Caches
from qjax.caches.session import ROLES
from qjax.config import CacheConfig
from qjax.pages import PagePool
from qjax.state import Layout, Section, Sequence, View

LAYOUT = Layout(
    sections=(Section("S", (1,), "float32"),), open=(Section("u", (64, 1), "float32"),), views=(View("K", 1, 1, 1, "bfloat16"),), grid=1024
)
TAIL = 300


def fill(caches: Caches, tokens: np.ndarray) -> None:
    """A conversation's request as the engine would run it: an anchor at every line, at the prompt's end and at the answer's."""
    request, pool = caches.begin(tokens), caches.pool
    if request.restored is not None:
        pool.release(request.restored.sequence.pages)
    whole = np.append(tokens, np.arange(20, dtype=np.int32))
    pages = np.array([pool.take() for _ in range(-(-whole.size // LAYOUT.grid))], np.int32)

    def cut(length: int) -> Sequence:
        some = pages[: -(-length // LAYOUT.grid)]
        return Sequence.empty(LAYOUT).replace(tokens=whole[:length], pages=some, length=np.int32(length), stamps=pool.stamps[some])

    for line in range(LAYOUT.grid, tokens.size, LAYOUT.grid):
        request.add("grid", cut(line))
    request.add("prompt", cut(tokens.size), np.zeros(8, np.float32))
    request.finish(cut(whole.size))
    pool.release(pages)


def filled(tokens: int, sessions: int) -> tuple[Caches, list[np.ndarray]]:
    """Caches with that many sessions in the pool, as many snapshots and as many remembered as gone; the prompts of the first."""
    pool = PagePool(LAYOUT, (sessions + 1) * (tokens // LAYOUT.grid + 2))
    caches = Caches(pool, CacheConfig(resident_park_gb=64, resident_pin_gb=64, resident_stash_gb=64))
    head, ends = prompt(tokens, 0), []
    for of in ("store", "pool"):
        ends = [np.concatenate([head[:-TAIL], prompt(TAIL, 1 + i + sessions * (of == "pool"))]) for i in range(sessions)]
        for one in ends:
            fill(caches, one)
        if of == "store":
            caches.make_room(lambda: False)
    for i, session in enumerate(sorted(caches.resident.sessions, key=lambda s: -s.used)):
        session.role = ROLES[1 + i % (len(ROLES) - 1)] if i else "resident"
    return caches, ends


def prompt(tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 248_000, tokens, dtype=np.int32)


def timed(act: Callable[[], object], rounds: int, after: Callable[[object], None] = lambda made: None) -> dict[str, float]:
    """Milliseconds of a call: the median and the worst of its rounds. after: what is done with its outcome, not timed."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        made = act()
        found.append(1e3 * (time.perf_counter() - begin))
        after(made)
        del made
    return {"median_ms": statistics.median(found), "worst_ms": max(found)}


def measure(tokens: int, sessions: int, rounds: int) -> dict:
    caches, ends = filled(tokens, sessions)
    resident = caches.resident.resident
    last = resident.keys.astype(np.int32)
    prompts = {"same prompt": ends[-1], "next turn": np.append(last, prompt(200, 9)), "parts late": np.append(ends[-1][:-100], prompt(200, 9))}
    found = {}
    for name, one in prompts.items():
        seen = []

        def after(request, seen=seen):
            seen.append(request.record)
            request.fail()

        whole = timed(lambda one=one: caches.begin(one), rounds, after)
        keys = one.astype(np.int64)
        parts = {
            "pool": lambda keys=keys: caches.resident.find(keys, ""),
            "store": lambda keys=keys: caches.store.find(keys, ""),
            "nearest": lambda keys=keys: caches.resident.nearest(keys, ""),
            "gone": lambda keys=keys, record=seen[0]: caches.resident.missed(keys, "", record.agrees),
        }
        record = seen[0]
        where = {"source": record.source, "start": record.start, "agrees": record.agrees, "why": str(record.why)}
        found[name] = where | whole | {"parts": {part: timed(act, rounds)["median_ms"] for part, act in parts.items()}}
    entries = caches.store.stats()["entries"]
    compare = timed(lambda: common(resident.keys, resident.keys.copy()), rounds)["median_ms"]
    roles = {role: sum(s.role == role for s in caches.resident.sessions) for role in ROLES}
    return {"tokens": tokens, "sessions": roles, "snapshots": entries, "rounds": rounds, "one_comparison_ms": compare, "lookups": found}


def show(found: dict) -> None:
    roles = ", ".join(f"{count} {role}" for role, count in found["sessions"].items())
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("prompt", "source"):
        table.add_column(name, no_wrap=True)
    for name in ("median ms", "worst", *next(iter(found["lookups"].values()))["parts"]):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in found["lookups"].items():
        figures = (one["median_ms"], one["worst_ms"], *one["parts"].values())
        table.add_row(name, one["source"], *(f"{figure:.2f}" for figure in figures))
    console = Console()
    console.print(f"{found['tokens']:,} keys each: sessions {roles}; {found['snapshots']} snapshots; {found['rounds']} rounds", highlight=False)
    console.print(table)
    console.print(f"comparing two sequences of so many keys takes {found['one_comparison_ms']:.3f} ms", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="keys of every session and of the prompts (default 131072)")
    parser.add_argument("--sessions", type=int, default=8, help="sessions in the pool, and as many snapshots (default 8)")
    parser.add_argument("--rounds", type=int, default=100, help="lookups of each prompt (default 100)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.tokens, args.sessions, args.rounds)
    if args.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
