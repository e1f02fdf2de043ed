"""One small engine for the commands' tests, and answers that are written down: no test depends on what the embedded model says."""

import re
import shutil
import signal
from pathlib import Path

import pytest

from qjax.caches.lookup import Caches
from qjax.commands import chat, demo, generate
from qjax.config import CacheConfig, EngineConfig
from qjax.engine import Engine
from qjax.model.source import load
from qjax.pages import PagePool
from tests.commands import cached


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C is what it is in a terminal, also where the tests run in the background and a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def flags(compile_cache) -> list[str]:
    """Flags of an engine that is compiled once for all tests, with the directory that keeps the tests' programs."""
    return ["--grid", "128", "--context-tokens", "3072", "--kv-gb", "0.002", "--compile-cache", str(compile_cache)]


@pytest.fixture(scope="session")
def shared_engine(flags) -> Engine:
    grid, context, kv_gb, cache = flags[1::2]
    config = EngineConfig(grid=int(grid), context_tokens=int(context), kv_gb=float(kv_gb), compile_cache=Path(cache))
    return Engine(load("embedded"), config)


@pytest.fixture
def engine(shared_engine, monkeypatch) -> Engine:
    """The engine with empty caches, given to every command that starts one; what the caches keep is all that the test leaves held."""
    shared_engine.pool = PagePool(shared_engine.layout, shared_engine.pool.pages)
    shared_engine.caches = Caches(shared_engine.pool, CacheConfig(), decode=shared_engine.model.tokenizer.decode)
    for command in (chat, demo, generate):
        monkeypatch.setattr(command, "start", lambda model, config, console, caches, disk=None: shared_engine)
    monkeypatch.setattr(demo, "restart", lambda *_: None)  # another process cannot have this engine: tried in test_as_a_program
    yield shared_engine
    shared_engine.caches.clear()
    assert shared_engine.pool.free == shared_engine.pool.pages


@pytest.fixture
def answers(monkeypatch, shared_engine):
    """Call it with texts: the generations that follow draw their tokens, each text followed by the stop token unless it ends in '...'."""

    def script(*texts: str) -> None:
        waiting, current = [tokens(text) for text in texts], []

        def draw(logits, sampling, history, number, allowed):
            if number == 0:
                current[:] = waiting.pop(0)
            return current[number]

        monkeypatch.setattr("qjax.generation.sample", draw)

    def tokens(text: str) -> list[int]:
        tokenizer = shared_engine.model.tokenizer
        ids = []
        for piece in re.split("(</?think>)", text.removesuffix("...")):
            ids += [tokenizer.special[piece]] if piece in tokenizer.special else tokenizer.encode(piece)
        return ids if text.endswith("...") else [*ids, tokenizer.stop_ids[0]]

    return script


@pytest.fixture(scope="session")
def written_states(tiny_engine, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("cache") / "states"
    cached.write(tiny_engine, directory)
    return directory


@pytest.fixture
def states(written_states, tmp_path) -> Path:
    """A disk cache of the test's own; cached.write says what is in it."""
    return shutil.copytree(written_states, tmp_path / "states")
