"""Three long sessions in turn, in a pool that holds them once: nothing is read again, and of each branch one page is copied."""

from collections import Counter

import numpy as np
import pytest

from qjax.config import GRID, TOKEN, EngineConfig
from qjax.engine import Engine
from qjax.model.config import FULL, LINEAR
from tests.bits import assert_bits_equal
from tests.equivalence.test_resident import GB, answer, cached, cold, followed
from tests.models import random_model, tiny_config

PAGE, LENGTH = 1024, 40_000
HEAD = 20 * PAGE + 7 * 64
"""Tokens that the sessions begin with: some of a page, up to a block line."""
PAGES = 3 * 40 - 2 * 20
"""Three sessions of 40 pages, of which they share the head's 20 full ones. Its partly filled page is in this number three times."""


@pytest.fixture(scope="module")
def engine(compile_cache) -> Engine:
    """Random weights, one layer of each kind, because only the lengths matter: 40 pages a sequence, 80 in the pool."""
    model = random_model(tiny_config(layers=2, layer_types=(LINEAR, FULL), heads=2, kv_heads=1, vocab=1024 + 64, context=40 * PAGE))
    row_bytes = 2 * 2 * model.config.kv_heads * model.config.head_dim
    engine = Engine(model, EngineConfig(grid=PAGE, kv_gb=PAGES * PAGE * row_bytes / GB, compile_cache=compile_cache))
    assert (engine.pool.pages, engine.limit) == (PAGES, 40 * PAGE)
    return engine


@pytest.fixture(params=[TOKEN, GRID])
def level(request, engine):
    """This machine is pure: at level grid too all bits must be a cold run's, where sessions go on at the end of an answer."""
    engine.level = request.param
    yield request.param
    engine.level = TOKEN


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)


@pytest.fixture
def copies(engine, monkeypatch) -> Counter:
    """How often a page was copied inside the pool, out of it and into it."""
    count = Counter()

    def counted(of, name):
        plain = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *arguments: count.update([name]) or plain(*arguments))

    counted(engine.forward, "copy_page")
    for name in ("copy_out", "copy_in"):
        counted(type(engine.pool), name)
    return count


def test_three_long_sessions_in_turn(engine, copies, level):
    """A, B, A, C, B, A with 40,000 tokens each and a head in common, every answer and state of a last turn a cold run's.

    The others part from A inside a page. At level grid they read that page's rows up to there again, and copy none.
    """
    head, branch = words(HEAD, 0), HEAD if level == TOKEN else 20 * PAGE
    prompts = {name: np.concatenate([head, words(LENGTH - HEAD, seed)]) for seed, name in enumerate("ABC", 1)}
    last, read = {}, Counter()
    with cached(engine) as caches:
        for turn, name in enumerate("ABACBA"):
            tokens, back = prompts[name], name in last
            record, *last[name] = answer(engine, tokens, user=HEAD)
            start = tokens.size - 20 if back else branch if turn else 0
            source = "parked" if back else "resident" if turn else "cold"
            again = HEAD - branch if source == "resident" else 0
            assert (record.source, record.start, record.read_again) == (source, start, again), (turn, record)
            read["rows"] += record.prompt_tokens - record.start
            asked = tokens
            prompts[name] = followed(tokens, last[name][0], words(20, 10 + turn))
            last[name].append(asked)
        sessions = caches.resident.sessions
        assert [s.length for s in sessions] == [40_004, 40_028, 40_052]
        assert engine.pool.free == 0
        assert read["rows"] == branch + 3 * (LENGTH - branch) + 3 * 20
        assert copies == ({"copy_page": 2} if level == TOKEN else {})  # where B and C part from A
        assert caches.stats()["store"]["offers"] == 0
        for name, (generated, state, tokens) in last.items():
            expected = cold(engine, tokens)
            assert generated == expected[0], name
            assert_bits_equal(state, expected[1])


def test_control_a_pool_of_one_page_less_gives_a_session_up(engine, copies):
    """With a page that somebody else holds the third session finds no room: of another one the end goes, and is copied out."""
    head = words(HEAD, 0)
    with cached(engine) as caches:
        spare = engine.pool.take()
        for seed in (1, 2, 3):
            answer(engine, np.concatenate([head, words(LENGTH - HEAD, seed)]), user=HEAD)
        engine.pool.release([spare])
        assert [s.role for s in caches.resident.sessions].count("pinned") == 1
        assert copies["copy_out"] == 1
