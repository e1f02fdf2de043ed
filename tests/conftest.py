"""What holds for every test: no silent promotion of dtype or rank. pyproject.toml makes warnings errors."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

from qjax.compile_cache import use_compile_cache
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.model.source import load
from qjax.pages import PagePool
from tests.models import random_model, tiny_config

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A time limit for each example fails on a busy machine; on CI hypothesis' own profile, which this one extends, also fixes the seeds.
hypothesis.settings.register_profile("qjax", deadline=None)
hypothesis.settings.load_profile("qjax")

# The live comparison imports torch and transformers, which only the environment of `make reference` has.
collect_ignore = [] if importlib.util.find_spec("torch") else ["reference"]


@pytest.fixture(scope="session")
def compile_cache(request) -> Path:
    """Keeps compiled programs from run to run, beside pytest's own cache (`--cache-clear` empties it)."""
    directory = Path(request.config.cache.mkdir("qjax-compile"))
    use_compile_cache(directory)
    return directory


@pytest.fixture(scope="session")
def embedded_engine(compile_cache) -> Engine:
    """The embedded model on a grid of 128: 8 pages a sequence, 18 in the pool."""
    return Engine(load("embedded"), EngineConfig(grid=128, context_tokens=1024, compile_cache=compile_cache))


@pytest.fixture(scope="session")
def tiny_engine(compile_cache) -> Engine:
    """Random weights that forget slowly, on the smallest grid: 7 pages a sequence, 16 in the pool."""
    return Engine(random_model(tiny_config()), EngineConfig(grid=64, context_tokens=448, compile_cache=compile_cache))


@pytest.fixture(scope="session")
def engine_256(compile_cache) -> Engine:
    """Random weights on a grid of 256, so that block lines lie inside a page: 4 pages a sequence, 10 in the pool."""
    return Engine(random_model(tiny_config()), EngineConfig(grid=256, context_tokens=1024, compile_cache=compile_cache))


@pytest.fixture
def engine(embedded_engine) -> Iterator[Engine]:
    """The embedded model's engine with a new page pool, of which the test leaves no page held."""
    yield from _clean(embedded_engine)


@pytest.fixture
def small(tiny_engine) -> Iterator[Engine]:
    """The random model's engine with a new page pool, of which the test leaves no page held."""
    yield from _clean(tiny_engine)


def _clean(engine: Engine) -> Iterator[Engine]:
    engine.pool = PagePool(engine.layout, engine.pool.pages)
    yield engine
    assert engine.pool.free == engine.pool.pages, f"{engine.pool.pages - engine.pool.free} pages are still held"
