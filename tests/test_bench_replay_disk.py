"""`qjax bench replay` with files: the tier on NVMe does over a modelled drive what it does in an engine, and time passes as it is told."""

import json

import numpy as np
import pytest

from qjax.bench.cached import Cached
from qjax.bench.cost import Cost
from qjax.bench.counting import Counted, counted
from qjax.bench.counting_nvme import CountingIndex, CountingNvme
from qjax.bench.counting_storage import CountingStorage
from qjax.bench.drive import BURST, READ, SUSTAINED, WRITE, Drive
from qjax.bench.lru_nvme import LruNvme, LruOfAll
from qjax.bench.replay import replay
from qjax.bench.trace import Call
from qjax.bench.traffic import agent_trace
from qjax.caches.nvme.filed import DISK, SPILL
from qjax.caches.nvme.index import DAY
from qjax.cli import main
from qjax.cli_bench import NVME_REPLAYS, REPLAYS
from qjax.config import CacheConfig, DiskConfig
from qjax.model.config import ModelConfig
from qjax.model.qwen3_5 import layout
from tests.equivalence.nvme import started
from tests.models import prompt

GB, GRID = 2**30, 1024
NOTHING = CacheConfig(resident_park_gb=0, resident_pin_gb=0, resident_stash_gb=0, cache_budget_gb=0)
"""Budgets with which a conversation that another one follows has to go."""


@pytest.fixture(scope="module")
def big():
    """The 27B's layout."""
    return counted(layout(ModelConfig.preset("27b")))


def call(number: int, *spans: tuple[int, int], at: float = 0.0, answer: int = 40) -> Call:
    """number: of the answer."""
    bases, counts = np.array(spans, np.int64).T
    return Call(at, bases, counts, answer, -1000 * number, int(counts.sum()) + answer)


def talk(number: int, *more: int, size: int = 20_000) -> Call:
    """A turn of a conversation: its first prompt, then an answer of 40 tokens and so many new ones for each turn before."""
    base, spans = 10**6 * number, []
    for turn, tokens in enumerate((size, *more)):
        spans += [(base + 10_000 * turn, tokens), (-1000 * (number * 10 + turn), 40)]
    return call(10 * number + len(more), *spans[:-1])


def serve(policy: Cached, *calls: Call) -> list[tuple[int, str]]:
    """Each when all was written that came before it."""
    found = []
    for one in calls:
        found.append(tuple(policy.serve(one, one.keys())))
        policy.drain()
    return found


def test_a_drive_writes_in_turn_and_slows_down_when_its_own_cache_is_full():
    drive, told = Drive(), []
    for number in range(3):
        drive.write(int(WRITE), lambda number=number: told.append((number, drive.now)))
    drive.advance(1.5)
    assert (told, drive.now) == ([(0, 1.0)], 1.5)
    drive.step()
    assert (told[-1], drive.now) == ((1, 2.0), 2.0)
    drive.until(10.0)
    assert (told[-1], drive.now) == ((2, 3.0), 10.0)
    drive = Drive()
    drive.write(int(100e9), lambda: None)
    fast = BURST / (WRITE - SUSTAINED)  # seconds, in which it empties too
    assert drive.next == pytest.approx(fast + (100e9 - fast * WRITE) / SUSTAINED)
    drive.until(drive.next + 1.0)
    drive.write(int(2 * SUSTAINED), lambda: None)
    room = SUSTAINED * WRITE / (WRITE - SUSTAINED)  # one second's rest
    assert drive.next - drive.now == pytest.approx(room / WRITE + (2 * SUSTAINED - room) / SUSTAINED)


def test_a_storage_has_names_sizes_and_ids_alone():
    storage = CountingStorage(Drive())
    storage.drive.until(7.0)
    rows, ids = np.asarray(Counted((4, 2**30), np.dtype(np.uint16))), np.arange(5)
    entry = storage.put("p-1", {"K": rows, "ids": ids}, rows=5)
    assert storage.put("p-1", {}) is entry is storage.find("p-1")
    assert (entry.nbytes, entry.fields, entry.used, storage.written_bytes) == (8 * GB + 40, {"rows": 5}, 7.0, 8 * GB + 40)
    back = np.zeros(5, np.int64)
    assert storage.get([("p-1", {"K": rows, "ids": back}), ("p-2", {})]) == 1
    np.testing.assert_array_equal(back, ids)
    assert storage.read_bytes == 8 * GB + 40
    storage.put("p-2", {"ids": ids})
    storage.touch("p-1")
    assert list(storage.entries()) == ["p-2", "p-1"]
    assert [storage.drop("p-2", lambda: True), storage.drop("p-2"), storage.drop("p-2")] == [False, True, False]
    assert storage.stats() == {"entries": 1, "nbytes": 8 * GB + 40, "read_bytes": 8 * GB + 40, "written_bytes": 8 * GB + 80}


@pytest.mark.parametrize("more", [{}, {"session_spill": False, "admit_after": 1}])
def test_files_are_an_engines(engine_256, tmp_path, more):
    """The same requests in a real engine with real files, and replayed; a restart between them. Each starts at the same token, from the same
    source, and leaves the same anchors in memory and on NVMe.
    """
    engine, none = engine_256, {"resident_gb": 0.0002, "resident_park_gb": 0, "resident_pin_gb": 0, "cache_budget_gb": 0}
    files = {"disk_min_tokens": 64, "spill_min_tokens": 128, **more}
    policy = Cached(counted(engine.layout), engine.pool.pages, CacheConfig(**none), disk=DiskConfig(**files))
    texts, sources = [], set()  # of each request the tokens, and the keys that stand for them in the trace

    def ask(caches, before: int | None, new: np.ndarray, answer: int, upto: int | None = None) -> None:
        policy.caches.nvme.forwarded = lambda tokens, seconds: None  # every read pays, as in the engine
        told = texts[before] if before is not None else (np.zeros(0, np.int64),) * 2
        told, keys = (np.concatenate([part[:upto], new]) for part in told)
        generation = engine.generate(told.astype(np.int32), max_tokens=answer + 1)
        list(generation)
        engine.release(generation.sequence)
        forwarded, base = int(generation.sequence.length) - told.size, -1000 * (len(texts) + 1)
        policy.serve(Call(0.0, keys, np.ones_like(keys), forwarded, base, keys.size), keys)
        mine, real = policy.caches.ledger.records[-1], caches.ledger.records[-1]
        for name in ("prompt_tokens", "source", "start", "read_again", "agrees", "why", "anchors_taken", "anchors_dropped", "failed"):
            assert getattr(mine, name) == getattr(real, name), name
        sources.add(mine.source)
        same(caches)
        texts.append((np.concatenate([told, generation.sequence.tokens[told.size :]]), np.concatenate([keys, base + np.arange(forwarded)])))

    def same(caches) -> None:
        caches.nvme.drain()
        policy.drain()
        indices = policy.caches.nvme.index, caches.nvme.index
        mine, real = ([(a.length, a.use, a.kind, len(a.pages), a.hits) for a in index.anchors.values()] for index in indices)
        assert sorted(mine) == sorted(real)
        mine, real = ([(s.length, s.history, s.resident, len(s.pages), len(s.anchors)) for s in index.sessions.values()] for index in indices)
        assert sorted(mine) == sorted(real)
        mine, real = ({**index.stats(), "disk_bytes": 0, "spill_bytes": 0} for index in indices)
        assert mine == real  # but for the bytes of logits, which are left out

    with started(engine, tmp_path, caches=none, **files) as caches:
        for seed in range(3):
            ask(caches, None, prompt(600, seed).astype(np.int64), 5)
        ask(caches, 0, prompt(40, 4).astype(np.int64), 5)
        ask(caches, 0, prompt(200, 5).astype(np.int64), 2, upto=400)
    with started(engine, tmp_path, caches=none, **files) as caches:
        policy.restart()
        same(caches)
        ask(caches, 4, prompt(30, 6).astype(np.int64), 2)
        ask(caches, 1, prompt(50, 7).astype(np.int64), 3)
        ask(caches, None, prompt(300, 8).astype(np.int64), 2)
        ask(caches, 3, prompt(30, 9).astype(np.int64), 2)
    assert {"cold", "disk", "spill"} - ({"spill"} if more else set()) <= sources


def test_reads_take_their_time_and_pending_writes_none(big):
    """A conversation of 20,040 tokens that another one evicts is read back once it is written; as long as it waits it is in memory."""
    calls = talk(1), talk(2), talk(1, 500)
    policy = Cached(big, 64, NOTHING, disk=DiskConfig())
    assert serve(policy, *calls) == [(0, "cold"), (0, "cold"), (20_040, SPILL)]
    anchor = next(a for a in policy.caches.nvme.index.anchors.values() if a.hits)
    nbytes = anchor.nbytes + 20 * (big.page_bytes + 12 * GRID)
    assert policy.written_and_read()["read_bytes"] == nbytes
    assert policy.waited == pytest.approx(nbytes / READ)
    pending = Cached(big, 64, NOTHING, disk=DiskConfig(staging_gb=64))
    pending._drive.write(int(1e15), lambda: None)  # the drive is busy for days
    assert [tuple(pending.serve(one, one.keys())) for one in calls] == [(0, "cold"), (0, "cold"), (20_040, SPILL)]
    assert (pending.waited, pending.written_and_read()["read_bytes"], pending.written_and_read()["written_bytes"]) == (0, 0, 0)


def test_what_the_pool_has_is_not_read(big):
    """Of 20 pages of a conversation that was evicted the one that evicted it has the first 10."""
    policy = Cached(big, 64, NOTHING, disk=DiskConfig())
    serve(policy, talk(1), call(20, (10**6, 10 * GRID + 60), (10**7, 10_000)))
    assert serve(policy, talk(1, 500)) == [(20_040, SPILL)]
    anchor = next(a for a in policy.caches.nvme.index.anchors.values() if a.hits)
    assert policy.written_and_read()["read_bytes"] == anchor.nbytes + 10 * (big.page_bytes + 12 * GRID)
    assert policy.caches.nvme.stats()["shared_tokens"] == 10 * GRID


def test_whoever_evicts_waits_for_the_staging(big):
    """3.3 GB that are to be written, with room to stage 2 GiB: the request that evicts them waits for the drive; nobody does with more room."""
    waited = []
    for staging in (2.0, 64.0):
        policy = Cached(big, 64, NOTHING, disk=DiskConfig(disk_gb=0, staging_gb=staging))
        for one in (talk(1, size=40_000), talk(2)):
            policy.serve(one, one.keys())
        waited.append(policy.waited)
    assert waited[0] > 0 == waited[1]
    late = Cached(big, 64, CacheConfig(), disk=DiskConfig(disk_gb=0, staging_gb=0.1))
    for one in (talk(1, size=40 * GRID - 40), talk(2, size=24 * GRID - 20)):  # whose answer needs a page more than there are
        late.serve(one, one.keys())
    assert late.waited == 0 < late.written_and_read()["spilled"]


def test_the_time_of_a_prompt_is_its_own(big):
    """The clock goes on by forwards, answers and pauses, and what is not forwarded takes none of it."""
    policy = Cached(big, 64, NOTHING, disk=DiskConfig())
    serve(policy, call(1, (0, 3000), at=100.0, answer=80))
    begun = 100.0 + Cost().seconds(0, 3000)
    assert policy._drive.now == pytest.approx(begun + 2.0)
    serve(policy, call(1, (0, 3000)))
    assert policy._drive.now == pytest.approx(begun + 2.0 + Cost().seconds(policy.caches.ledger.records[-1].start, 3000) + 1.0)


def test_a_restart_keeps_the_files_and_nothing_else(big):
    """The next turn after it is the resident one's, read back before it, or a cold one's; and so is the one after another conversation."""
    before, after = (talk(1), talk(2)), (talk(2, 500), talk(1, 500))
    sources = {}
    for name, disk in {"spill": DiskConfig(), "no spill": DiskConfig(session_spill=False), "memory": None}.items():
        policy = Cached(big, 64, NOTHING, disk=disk)
        for one in before:
            policy.serve(one, one.keys())
        policy.restart()
        sources[name] = [tuple(policy.serve(one, one.keys())) for one in after]
        assert (policy.waited > 0) == (name != "memory")
    assert sources == {"spill": [(20_040, SPILL)] * 2, "no spill": [(19_456, DISK)] * 2, "memory": [(0, "cold")] * 2}


def test_plain_lru_gives_up_what_was_used_longest_ago_of_both_kinds(big):
    config = DiskConfig(disk_gb=3, spill_gb=3)
    policy = Cached(big, 64, NOTHING, disk=config, nvme=LruNvme)
    serve(policy, *(talk(number) for number in range(1, 6)))
    index = policy.caches.nvme.index
    assert index.bytes() == sum(e.nbytes for e in policy._storage.entries().values()) <= 6 * GB
    assert index.bytes(DISK) > 3 * GB
    assert [source for _, source in serve(policy, talk(4, 9), talk(1, 9))] == [SPILL, "cold"]
    alone = Cached(big, 64, NOTHING, disk=DiskConfig(disk_gb=3, spill_gb=3, session_spill=False), nvme=LruNvme)
    serve(alone, *(talk(number) for number in range(1, 6)))
    assert alone.caches.nvme.index.bytes(DISK) <= 3 * GB


def test_all_that_is_forwarded_is_written(big):
    policy = Cached(big, 64, NOTHING, disk=DiskConfig(), nvme=LruOfAll)
    serve(policy, talk(1, size=9000), talk(2, size=4000))
    kept = sorted((a.length, a.use) for a in policy.caches.nvme.index.anchors.values())
    lines = [*range(GRID, 9000, GRID), *range(GRID, 4000, GRID)]
    assert kept == sorted([(line, DISK) for line in lines] + [(n, SPILL) for n in (4000, 4040, 9000, 9040)])
    assert len(policy.caches.nvme.index.sessions) == 2


class ByHits(CountingNvme):
    """The chapter's value: hits and one, halved for every day unused."""

    class index_class(CountingIndex):
        def returns(self, filed, now):
            return (filed.hits + 1) * 0.5 ** ((now - filed.used) / DAY)


def test_every_prompt_tells_what_it_missed(big):
    told = []

    class Telling(CountingNvme):
        class index_class(CountingIndex):
            def missed(self, chain, start):
                told.append((chain.keys.size, start))

    serve(Cached(big, 64, NOTHING, disk=DiskConfig(), nvme=Telling), talk(1), talk(2), talk(1, 500))
    assert told == [(20_000, 0), (20_000, 0), (20_540, 20_040)]


def test_values_are_learned(big):
    """A head that comes back after 7 long prompts of others, for which there is no room beside it, stays once that is known, where plain LRU
    loses it; and conversations that have ended do not keep out those that go on, as by the chapter's own value.
    """
    calls = []
    for _ in range(12):
        calls.append(call(len(calls) + 1, (0, 20_000), (10**6 * (len(calls) + 1), 2000)))
        calls += [call(number, (10**6 * number, 20_000)) for number in range(len(calls) + 1, len(calls) + 8)]
    runs = {}
    for nvme in (CountingNvme, LruNvme, ByHits):
        policy = Cached(big, 64, NOTHING, disk=DiskConfig(disk_gb=10, session_spill=False), nvme=nvme)
        runs[nvme] = [start for start, _ in serve(policy, *calls)]
    assert sum(runs[LruNvme]) == 0
    assert runs[CountingNvme][40::8] == [19_456] * 7
    agents = {}
    for nvme in runs:
        policy = Cached(big, 256, CacheConfig(), disk=DiskConfig(disk_gb=20, session_spill=False), nvme=nvme)
        agents[nvme] = sum(policy.serve(one, one.keys()).start for one in agent_trace(12))
    assert agents[CountingNvme] > agents[LruNvme] > 1.05 * agents[ByHits]


def test_with_files_more_is_reused_and_the_rest_is_as_without_them():
    calls = agent_trace(6)
    found, without = replay(calls, CacheConfig(), 16.0, DiskConfig(), restart_every=40), replay(calls, CacheConfig(), 16.0, restart_every=40)
    assert found == json.loads(json.dumps(found))
    assert list(found["runs"]) == [*REPLAYS, *NVME_REPLAYS]
    assert {name: found["runs"][name] for name in REPLAYS} == without["runs"]
    assert (found["restarts"], without["nvme"], list(found["nvme"])) == ((len(calls) - 1) // 40, {}, list(NVME_REPLAYS))
    runs, after = found["runs"], {name: run["after_restart"] for name, run in found["runs"].items()}
    assert {one["requests"] for one in after.values()} == {20 * found["restarts"]}
    assert runs["infinite cache"]["reused"] >= runs["nvme"]["reused"] > runs["nvme, no spill"]["reused"] > runs["default budgets"]["reused"]
    assert after["nvme"]["share"] > after["nvme, no spill"]["share"] > after["default budgets"]["share"]
    assert runs["nvme"]["reused"] >= runs["nvme, lru"]["reused"] > runs["nvme, all, lru"]["reused"] * 0.99
    assert {"spill", "disk"} <= runs["nvme"]["sources"].keys()
    assert all(of["nbytes"] <= 90 * GB and of["written_bytes"] >= of["nbytes"] and of["read_bytes"] > 0 for of in found["nvme"].values())
    whole = replay(calls, CacheConfig(), 16.0)
    assert (whole["restarts"], whole["runs"]["default budgets"]["after_restart"]) == (0, None)
    assert whole["runs"]["infinite budgets"]["reused"] > without["runs"]["infinite budgets"]["reused"]


def test_the_command(capsys):
    assert main(["bench", "replay", "agent:2:1", "--json", "--restart-every", "9", "--disk-gb", "20", "--no-session-spill"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["restarts"] == (len(agent_trace(2, 1)) - 1) // 9
    assert "spill" not in found["runs"]["nvme"]["sources"]
    assert found["nvme"]["nvme"]["nbytes"] <= 20 * GB
    assert main(["bench", "replay", "agent:2:1", "--restart-every", "9"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in NVME_REPLAYS)
    assert "restarts: infinite budgets" in shown
    assert main(["bench", "replay", "agent:2:1", "--memory-only"]) == 0
    assert not any(name in capsys.readouterr().out for name in NVME_REPLAYS)
