"""A bounded thought and logprobs through the caches and beside others: the bits of a run that never saw a cache."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest

from qjax.config import TOKEN
from qjax.pages import PagePool
from qjax.parallel import Parallel
from qjax.sampling import Sampling
from qjax.thought import Thought
from tests.bits import assert_bits_equal
from tests.equivalence.test_resident import cached, followed
from tests.models import prompt
from tests.runs import kept

BOUND = Thought(6, True, (17, 18, 19, 20), (1023, 22))
BOTH = {"max_tokens": 20, "logprobs": 5, "thought": BOUND}


def told(engine, generation, pieces) -> dict:
    """All that a request gave; its state is given back."""
    state = kept(engine.pool, generation.sequence)
    engine.release(generation.sequence)
    rows = [piece.logprobs for piece in pieces if piece.id is not None]
    return {
        "tokens": np.array(generation.tokens),
        "hidden": np.array(generation.hidden),
        "own": np.array([row.own for row in rows]),
        "ids": np.array([[i for i, _ in row.top] for row in rows]),
        "top": np.array([[value for _, value in row.top] for row in rows]),
        "state": state,
    }


def ask(engine, tokens, **more) -> dict:
    generation = engine.generate(tokens, **BOTH | more)
    return told(engine, generation, list(generation))


def cold(engine, tokens, **more) -> dict:
    """The same without caches, on a pool of its own."""
    caches, pool = engine.caches, engine.pool
    engine.caches, engine.pool = None, PagePool(engine.layout, pool.pages)
    try:
        return ask(engine, tokens, **more)
    finally:
        engine.caches, engine.pool = caches, pool


@pytest.fixture(autouse=True)
def no_stop_tokens(tiny_engine, monkeypatch):
    monkeypatch.setattr(tiny_engine.model.tokenizer, "stop_ids", ())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=4, repetition_penalty=1.2)], ids=["greedy", "sampled"])
def test_h3_a_warm_answer_and_its_logprobs_are_a_cold_ones(tiny_engine, level, sampling):
    """H3: no row of them is missing, shifted or another's, after a hit of each kind; the thought is closed at the same place."""
    tokens = prompt(150)
    with cached(tiny_engine) as caches:
        first = ask(tiny_engine, tokens, sampling=sampling)
        assert first["hidden"].tolist() == [[6, 10]]
        for hit, following in {
            ("prompt", 150): tokens,
            ("end", 169): followed(tokens, first["tokens"], prompt(10, seed=4)),
            ("resident", 128): np.concatenate([tokens[:130], prompt(10, seed=5)]),
        }.items():
            warm = ask(tiny_engine, following, sampling=sampling)
            record = caches.ledger.records[-1]
            if hit != ("resident", 128) or level != TOKEN:
                assert (record.source, record.start) == hit
            else:
                assert (record.source, record.start) in (hit, ("resident", 130))
            assert_bits_equal(warm, cold(tiny_engine, following, sampling=sampling))


def test_control_one_bit_of_one_row_is_found(tiny_engine, monkeypatch):
    tokens, real, steps = prompt(150), tiny_engine.forward.all_logits, []

    def nudged(x):
        rows = np.array(real(x))
        steps.append(1)
        if len(steps) == 8:  # inside what is forced: no token changes
            rows.view(np.uint32)[0, BOUND.phrase[2]] ^= 1
        return rows

    with cached(tiny_engine) as caches:
        ask(tiny_engine, tokens)
        monkeypatch.setattr(tiny_engine.forward, "all_logits", nudged)
        warm = ask(tiny_engine, tokens)
        assert caches.ledger.records[-1].source == "prompt"
        monkeypatch.undo()
        expected = cold(tiny_engine, tokens)
        assert_bits_equal(warm["tokens"], expected["tokens"])
        with pytest.raises(AssertionError, match=r"\['own'\]"):
            assert_bits_equal(warm, expected)


def test_an_answer_with_either_is_neither_kept_nor_answered_from_what_is(tiny_engine):
    """Kept answers have no rows, and were not closed; a thought that is only counted is no other answer."""
    tokens = prompt(100)
    with cached(tiny_engine, response_gb=1e-3) as caches:
        for more in ({"thought": None}, {"logprobs": None}):
            ask_more = {"max_tokens": 20, "logprobs": 0, "thought": BOUND} | more
            list(generation := tiny_engine.generate(tokens, **ask_more))
            tiny_engine.release(generation.sequence)
        assert caches.stats()["responses"]["entries"] == 0
        for expected in ("prompt", "response"):
            generation = tiny_engine.generate(tokens, max_tokens=20, thought=Thought(None, True))
            pieces = list(generation)
            tiny_engine.release(generation.sequence)
            assert caches.ledger.records[-1].source == expected
            assert (generation.hidden, generation.thought_tokens) == ([], 20)
            assert "".join(piece.text for piece in pieces) == generation.text == generation.raw
        for more in ({"logprobs": 0}, {"thought": BOUND}):
            generation = tiny_engine.generate(tokens, max_tokens=20, **more)
            pieces = list(generation)
            tiny_engine.release(generation.sequence)
            assert caches.ledger.records[-1].source == "prompt"
            assert all(piece.logprobs for piece in pieces if piece.id is not None) == ("logprobs" in more)
        assert caches.stats()["responses"]["hits"] == 1


@pytest.mark.parametrize("with_caches", [False, True], ids=["alone", "cached"])
def test_beside_others_a_thought_is_its_own(tiny_engine, with_caches):
    """One is closed, one may think on, one has no thought: each says what it says alone, and what is hidden is hidden in one of them."""
    asked = [(prompt(90, seed=1), {}), (prompt(130, seed=2), {"thought": Thought(None, True)}), (prompt(20, seed=3), {"thought": None})]
    tiny_engine.pool = PagePool(tiny_engine.layout, tiny_engine.pool.pages)
    with cached(tiny_engine) if with_caches else nullcontext():
        runs, pieces = Parallel(tiny_engine, 3), {}
        generations = [runs.submit(tokens, **BOTH | more) for tokens, more in asked]
        order = []
        for generation, token in runs:
            if token is not None:
                order.append(generation)
                pieces.setdefault(generation, []).append(token)
        assert sum(a is not b for a, b in pairwise(order)) > 20  # side by side
        assert [generation.hidden for generation in generations] == [[(6, 10)], [], []]
        assert [generation.thought_tokens for generation in generations] == [10, 20, 0]
        for generation, (tokens, more) in zip(generations, asked, strict=True):
            assert_bits_equal(told(tiny_engine, generation, pieces[generation]), cold(tiny_engine, tokens, **more))
