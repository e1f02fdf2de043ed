"""`qjax bench replay`: the caches do with counted bytes what they do in an engine, the baselines what they say, and the figures add up."""

import dataclasses
import json
import math

import numpy as np
import pytest

from qjax.bench import traffic
from qjax.bench.baselines import Chapter, Infinite, LruSnapshots
from qjax.bench.cached import Cached
from qjax.bench.cost import MEASURED, Cost
from qjax.bench.counting import Counted, CountingPool, counted
from qjax.bench.replay import replay
from qjax.bench.trace import Call, read
from qjax.bench.traffic import agent_trace
from qjax.caches.keys import common
from qjax.caches.lookup import Caches
from qjax.cli import main
from qjax.cli_bench import REPLAYS
from qjax.config import MOST_GB, CacheConfig
from qjax.model.config import ModelConfig
from qjax.model.qwen3_5 import layout
from qjax.pages import PoolFull
from tests.models import prompt

GB = 2**30


@pytest.fixture(scope="module")
def big():
    """The 27B's layout."""
    return counted(layout(ModelConfig.preset("27b")))


def call(*spans: tuple[int, int], answer: int = 0, base: int = -1) -> Call:
    bases, counts = np.array(spans, np.int64).T
    return Call(0.0, bases, counts, answer, base - answer, int(counts.sum()) + answer)


def serve(policy, calls):
    return [policy.serve(one, one.keys()) for one in calls]


def test_the_sizes_are_the_27bs_and_nothing_is_there(big):
    assert (big.section_bytes, big.row_bytes) == (153_944_064, 65_536)
    sections = [s.zeros() for s in big.sections]
    assert all(isinstance(s, Counted) for s in sections)
    assert sum(s.nbytes for s in sections) == big.section_bytes
    pool = CountingPool(big, 256)
    assert (pool.nbytes, pool.views) == (16 * GB, {})
    rows = pool.copy_out([], 2000)
    assert sum(r.nbytes for r in rows.values()) == 2000 * big.row_bytes
    pages = pool.copy_in(rows, 2000)
    assert [int(pool.fill[p]) for p in pages] == [1024, 976]
    with pytest.raises(PoolFull):
        pool.copy_in(rows, 255 * 1024)
    assert pool.free == 254


@pytest.mark.parametrize(
    ("config", "source"), [(CacheConfig(), "parked"), (CacheConfig(resident_gb=0.0002, resident_park_gb=0, resident_pin_gb=0), "store")]
)
def test_records_are_an_engines(engine_256, config, source):
    """The same requests in a real engine and replayed: each starts at the same token, from the same source, and leaves the same anchors."""
    engine = engine_256
    pool, engine.caches = engine.pool, Caches(engine.pool, config)
    policy = Cached(counted(engine.layout), engine.pool.pages, config)
    texts: list[tuple[np.ndarray, np.ndarray]] = []  # a conversation's tokens, and the keys that stand for them in the trace

    def ask(before, new, answer: int) -> int:
        told, keys = (np.concatenate(parts) for parts in ((before[0], new), (before[1], new)))
        generation = engine.generate(told.astype(np.int32), max_tokens=answer + 1)
        list(generation)
        engine.release(generation.sequence)
        forwarded = int(generation.sequence.length) - told.size
        base = -1000 * (len(texts) + 1)
        policy.serve(Call(0.0, keys, np.ones_like(keys), forwarded, base, keys.size), keys)
        mine, real = policy.caches.ledger.records[-1], engine.caches.ledger.records[-1]
        for name in ("prompt_tokens", "source", "start", "read_again", "agrees", "why", "anchors_taken", "anchors_dropped"):
            assert getattr(mine, name) == getattr(real, name), name
        texts.append((np.concatenate([told, generation.sequence.tokens[told.size :]]), np.concatenate([keys, np.arange(base, base + forwarded)])))
        return len(texts) - 1

    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
    try:
        first = ask(nothing, prompt(600, 1).astype(np.int64), 5)
        ask(nothing, prompt(90, 2).astype(np.int64), 3)
        other = ask(nothing, prompt(520, 3).astype(np.int64), 3)
        first = ask(texts[first], prompt(40, 4).astype(np.int64), 5)
        ask(tuple(t[:400] for t in texts[first]), prompt(200, 5).astype(np.int64), 2)
        other = ask(texts[other], prompt(100, 6).astype(np.int64), 4)
        ask(tuple(t[:400] for t in texts[first]), prompt(200, 5).astype(np.int64), 2)
        ask(texts[other], prompt(30, 7).astype(np.int64), 2)
        assert {"cold", source} <= {record.source for record in policy.caches.ledger.records}
    finally:
        engine.caches.clear()
        engine.caches = None
    assert pool.free == pool.pages


def test_seconds_are_the_measured_ones_close_to():
    cost = Cost()
    for length, seconds in MEASURED.items():
        assert cost.seconds(0, length) == pytest.approx(seconds, rel=0.004)
    assert cost.seconds(0, 5000) + cost.seconds(5000, 70_000) == pytest.approx(cost.seconds(0, 70_000), rel=1e-12)
    assert cost.seconds(100_000, 101_000) > cost.seconds(0, 1000) > 0 == cost.seconds(7, 7)


def test_the_infinite_cache_starts_where_a_prompt_parts_from_all_before():
    calls = [*agent_trace(5, seed=2), call((0, 100)), call((0, 300)), call((0, 200), (900_000_000, 5)), call((0, 300))]
    told, found = [], serve(Infinite(), calls)
    for one, (start, source) in zip(calls, found, strict=True):
        keys = one.keys()
        assert start == max((common(keys, t) for t in told), default=0)
        assert source == ("rows" if start else "cold")
        told.append(np.concatenate([keys, one.answer_keys()]))


def test_snapshots_serve_whole_and_the_least_recent_goes(big):
    a, b = call((0, 3000), answer=10, base=-1), call((10**6, 3000), answer=10, base=-100)
    after_a, after_b = (call(*one.spans(), (2 * 10**6, 50)) for one in (a, b))
    shorter = call((0, 2999), (3 * 10**6, 9))
    room = 3 * (big.section_bytes + 3100 * big.row_bytes)
    assert serve(LruSnapshots(big, room), [a, b, after_a, after_b, shorter]) == [
        (0, "cold"),
        (0, "cold"),
        (3010, "snapshot"),
        (3010, "snapshot"),
        (0, "cold"),  # no snapshot is a part of it
    ]
    # in less the other one goes, for what the third needs to run
    assert [s.start for s in serve(LruSnapshots(big, room * 2 // 3), [a, b, after_a, after_b])] == [0, 0, 3010, 0]
    assert [s.start for s in serve(LruSnapshots(big, room * 2 // 3), [a, b, after_b, after_a])] == [0, 0, 3010, 0]


def test_the_chapters_rules(big):
    def talk(number: int, *more: int, size: int = 40_000) -> Call:
        return call((number * 10**6, size), *((number * 10**6 + 500_000 + i * 1000, n) for i, n in enumerate(more)), base=-(10**6) * number)

    config = CacheConfig(cache_budget_gb=0)

    def sources(*calls, config=config):
        return [(s.source, s.start) for s in serve(Chapter(big, config), calls)]

    a, b, c = talk(1), talk(2), talk(3)
    assert sources(a, talk(1, 50)) == [("cold", 0), ("resident", 40_000)]
    assert sources(a, b, talk(1, 50), talk(2, 50)) == [("cold", 0), ("cold", 0), ("parked", 40_000), ("parked", 40_000)]
    # one is parked, and of one the head is pinned: 4 GiB with the anchors that fit
    assert sources(a, b, c, talk(2, 50))[-1] == ("parked", 40_000)
    assert sources(a, b, c, talk(1, 50))[-1] == ("cold", 0)
    assert sources(a, b, a, c, talk(2, 50))[-1] == ("cold", 0)
    long = talk(1, size=60_000)
    assert sources(long, b, talk(1, 50, size=60_000))[-1][0] == "pinned"
    # a guest leaves the conversation where it is, and nothing of its own
    guest = talk(9, size=4000)
    assert sources(a, guest, guest, talk(1, 50)) == [("cold", 0), ("cold", 0), ("cold", 0), ("resident", 40_000)]
    # 17 anchors on the grid: a prompt that parts before the oldest starts cold, and after it on a line
    assert sources(a, call((1_000_000, 39_000), (7 * 10**6, 9)))[-1] == ("resident", 38 * 1024)
    assert sources(a, call((1_000_000, 5000), (7 * 10**6, 30_000)))[-1] == ("cold", 0)
    # heads of whole lines are in the store, as far as an entry goes
    stored = sources(a, b, call((1_000_000, 30_000), (7 * 10**6, 9)), config=CacheConfig(resident_park_gb=0, resident_pin_gb=0))
    assert stored[-1] == ("store", 13 * 1024)


def test_without_limits_little_is_read_again_and_nothing_too_much():
    calls = agent_trace(3)
    found = replay(calls, CacheConfig(), 16.0)
    assert found == json.loads(json.dumps(found))
    assert list(found["runs"]) == list(REPLAYS)
    infinite = found["runs"]["infinite cache"]
    assert infinite["reused"] == sum(one.start for one in serve(Infinite(), calls)) > 0
    assert (found["requests"], found["prompt_tokens"]) == (len(calls), sum(one.prompt for one in calls))
    assert (found["pool_gb"], found["total_gb"]) == (16, 29.5)
    cost = Cost()
    for run in found["runs"].values():
        assert sum(source["requests"] for source in run["sources"].values()) == len(calls)
        assert sum(source["reused"] for source in run["sources"].values()) == run["reused"] <= infinite["reused"]
        assert run["read_again"] == infinite["reused"] - run["reused"]
        assert run["share"] == run["reused"] / found["prompt_tokens"]
        assert run["ttft_s"]["mean"] <= cost.seconds(0, max(one.prompt for one in calls))
    runs = found["runs"]
    assert runs["infinite budgets"]["reused"] >= 0.97 * infinite["reused"] > runs["chapter rules"]["reused"]
    assert runs["default budgets"]["reused"] < runs["infinite budgets"]["reused"]
    assert runs["infinite cache"]["ttft_s"]["mean"] < runs["lru snapshots"]["ttft_s"]["mean"]


def test_budgets_are_the_flags():
    nothing = CacheConfig(resident_gb=0, resident_park_gb=0, resident_pin_gb=0, resident_stash_gb=0, cache_budget_gb=0)
    found = replay(agent_trace(3), nothing, 16.0)
    assert found["total_gb"] == 16
    assert found["runs"]["default budgets"]["reused"] < replay(agent_trace(3), CacheConfig(), 16.0)["runs"]["default budgets"]["reused"]
    assert found["runs"]["infinite budgets"]["reused"] >= 0.97 * found["runs"]["infinite cache"]["reused"]


@pytest.mark.parametrize("agents", [1, 4])
def test_the_shelf_changes_nothing(big, monkeypatch, agents):
    monkeypatch.setattr(traffic, "AGENTS", agents)
    calls = agent_trace(6, seed=5)
    most = {f.name: float(MOST_GB) for f in dataclasses.fields(CacheConfig) if f.name.endswith("_gb")}
    pages = sum((one.prompt + one.answer) // big.grid + 2 for one in calls)
    plain, shelved = (Cached(big, pages, CacheConfig(**most), shelf) for shelf in (False, True))
    assert serve(plain, calls) == serve(shelved, calls)
    assert len(plain.caches.resident.sessions) == 6
    totals = [dict(policy.caches.ledger.totals()) for policy in (plain, shelved)]
    assert totals[0] == totals[1]


def test_a_request_that_no_pool_holds_is_named():
    calls = [call((0, 2000)), call((0, 1000), answer=49)]
    with pytest.raises(ValueError, match=r"request 1 of the trace has 2,000 tokens and an answer of 0: a pool of 1,024 tokens cannot hold them"):
        replay(calls, CacheConfig(), 1 / 16)
    with pytest.raises(ValueError, match=r"request 2 of the trace has 1,000 tokens and an answer of 49"):
        replay([call((0, 100)), calls[1]], CacheConfig(), 1 / 16)
    assert replay([call((0, 1000), answer=24)], CacheConfig(), 1 / 16)["pool_gb"] == 1 / 16


def test_the_command(tmp_path, capsys):
    file, records = tmp_path / "agent.jsonl", tmp_path / "ledger.jsonl"
    assert main(["bench", "replay", "agent:2:1", "--json", "--write", str(file), "--ledger", str(records)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"] == "agent:2:1"
    assert found["requests"] == len(agent_trace(2, 1)) == len(read(file)) == len(records.read_text().splitlines())
    assert math.isclose(found["runs"]["default budgets"]["share"], found["runs"]["default budgets"]["reused"] / found["prompt_tokens"])
    assert main(["bench", "replay", str(file), "--first", "3", "--kv-gb", "32", "--resident-park-gb", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 requests" in shown
    assert "pool 32 GiB, all budgets and the pool 42.5 GiB" in shown
    assert all(name in shown for name in REPLAYS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"timestamp": 0}\n', "line 1: input_length: expected a whole number, 1 to 16,777,216, found no such field"),
        ("", "expected a request a line, found none"),
    ],
)
def test_wrong_traces_are_told(tmp_path, capsys, text, says):
    (tmp_path / "trace.jsonl").write_text(text)
    assert main(["bench", "replay", str(tmp_path / "trace.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"qjax: error: {tmp_path / 'trace.jsonl'}")
    assert error.endswith(f"{says}\n")
    assert main(["bench", "replay", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
