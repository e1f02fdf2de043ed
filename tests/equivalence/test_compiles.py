"""No tier compiles anything while it serves: what the caches run was compiled when the engine started."""

from contextlib import contextmanager

import jax
import numpy as np
import pytest

from qjax.engine import Engine
from qjax.state import BLOCK
from tests.equivalence.test_resident import cached, followed
from tests.models import prompt
from tests.test_programs import Compiles


class Served:
    """Requests, and where each came from. Nothing is read back: a comparison would compile what it runs itself."""

    def __init__(self, engine: Engine):
        self.engine, self.seen = engine, []

    def __call__(self, tokens, source: str, start: int, **more) -> list[int]:
        generation = self.engine.generate(tokens, max_tokens=5, **more)
        list(generation)
        self.engine.release(generation.sequence)
        record = self.engine.caches.ledger.records[-1]
        assert (record.source, record.start) == (source, start), record
        self.seen.append(source)
        return generation.tokens

    def cancelled(self, tokens, forwards: int) -> int:
        """A prefill that is cancelled after so many forwards: how far it came."""
        calls = iter(range(100))
        generation = self.engine.generate(tokens, cancel=lambda: next(calls) >= forwards)
        assert not list(generation)
        self.engine.release(generation.sequence)
        return int(generation.sequence.length)


@contextmanager
def compiles_nothing():
    jax.clear_caches()  # as in a process that has served nothing yet; the engine holds its programs itself
    with Compiles() as found:
        yield
    assert found.count == 0


def in_the_pool(serve: Served) -> None:
    """Prompt, end, an edit, a branch, boundaries that are named, a guest, parked sessions, a cancel, a clear."""
    tokens = prompt(700)
    answer = serve(tokens, "cold", 0, user=333, history=690)
    serve(tokens, "prompt", 700)
    following = followed(tokens, answer, prompt(20, seed=9))
    answer = serve(following, "end", 704)
    serve(np.concatenate([following[:330], prompt(50, seed=1)]), "resident", 320)
    serve(np.concatenate([following[:460], prompt(130, seed=2)]), "resident", 330)
    serve(np.concatenate([following[:460], prompt(40, seed=3)]), "resident", 448)  # the branch
    serve(following, "parked", following.size)
    serve(prompt(60, seed=5), "cold", 0)
    serve(prompt(60, seed=5), "guest", 60)
    again = followed(following, answer, prompt(30, seed=4))
    reached = serve.cancelled(prompt(600, seed=6), 2)
    serve(prompt(600, seed=6), "resident", reached)
    answer = serve(again, "parked", following.size + 4)
    serve.engine.caches.clear()
    serve(again, "cold", 0)


def out_of_the_pool(serve: Served) -> None:
    """A session that goes to the state store, and comes back; one that does so at a block line; the same prompt from there."""
    for length in (333, 4 * BLOCK - 4):
        tokens = prompt(length, seed=length)
        answer = serve(tokens, "cold", 0)
        serve(prompt(400, seed=1 + length), "cold", 0)
        following = followed(tokens, answer, prompt(20, seed=9))
        answer = serve(following, "store", length + 4)
        serve.engine.caches.make_room(lambda: False)
        serve(followed(following, answer, prompt(3, seed=8)), "store", following.size + 4)


def heads(serve: Served) -> None:
    """A session that the park cannot hold leaves its head pinned."""
    serve(prompt(700), "cold", 0)
    serve(prompt(700, seed=3), "cold", 0)
    serve(np.concatenate([prompt(600), prompt(50, seed=4)]), "pinned", 512)


def beside(serve: Served) -> None:
    """A request that goes on from what another one, which is still running, has read."""
    generation = serve.engine.generate(prompt(300), max_tokens=5)
    next(steps := iter(generation))
    serve(np.concatenate([prompt(300), prompt(20, seed=1)]), "running", 300)
    assert len(list(steps)) == 4
    serve.engine.release(generation.sequence)


def test_control_what_is_compiled_is_heard(engine_256):
    with cached(engine_256), pytest.raises(AssertionError), compiles_nothing():
        engine_256.pool.rows("K", [0], 1)


@pytest.mark.parametrize("tier", [in_the_pool, out_of_the_pool, heads, beside])
def test_no_tier_compiles(engine_256, tier):
    layout = engine_256.layout
    pin = (2 * layout.page_bytes + 2.5 * layout.section_bytes) / 2**30
    budgets, wanted = {
        in_the_pool: ({"cache_budget_gb": 0}, {"cold", "prompt", "end", "resident", "guest", "parked"}),
        out_of_the_pool: ({"resident_park_gb": 0, "resident_pin_gb": 0}, {"store"}),
        heads: ({"resident_park_gb": 0, "resident_pin_gb": pin}, {"pinned"}),
        beside: ({}, {"running"}),
    }[tier]
    with cached(engine_256, **budgets):
        serve = Served(engine_256)
        with compiles_nothing():
            tier(serve)
    assert wanted <= set(serve.seen)
