"""Twenty turns of a generated agent conversation: each reads its new tokens, and at most a block or a grid line of what was there."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from qjax.boundaries import Boundaries
from qjax.caches.keys import common
from qjax.commands import demo_conversation as talk
from qjax.commands.conversation import Conversation, Turn
from qjax.config import GRID, TOKEN, EngineConfig
from qjax.engine import Engine
from qjax.model.source import load
from qjax.state import BLOCK
from tests.bits import assert_bits_equal
from tests.equivalence.test_resident import answer, cached, cold
from tests.models import random_model, tiny_config

TURNS, SCALE = 20, 40
OPENING = 4
"""Tokens with which the template begins an answer."""


def lognormal(rng: np.random.Generator, mean: float, median: float, most: float) -> int:
    """A size of the agent traffic, 1 / SCALE of it in tokens."""
    sigma = np.sqrt(2 * np.log(mean / median))
    return max(1, int(min(most, rng.lognormal(np.log(median), sigma)) / SCALE))


@contextmanager
def at_level(engine: Engine, level: str):
    """This machine is pure: at level grid too all bits must be a cold run's, where a session goes on at the end of an answer."""
    engine.level = level
    yield
    engine.level = TOKEN


@pytest.fixture(scope="module")
def agent_engine(compile_cache) -> Engine:
    return Engine(random_model(tiny_config(context=8192)), EngineConfig(grid=256, compile_cache=compile_cache))


@pytest.mark.parametrize(("level", "most"), [(TOKEN, BLOCK), (GRID, 256)])
def test_turns_of_many_sizes(agent_engine, level, most):
    """A head, tool results and answers with the mean and median sizes of agentic coding, where every fourth message is the user's."""
    engine, rng = agent_engine, np.random.default_rng(20)
    opening = rng.integers(0, 1000, OPENING, dtype=np.int32)

    def words(count: int) -> np.ndarray:
        return rng.integers(0, 1000, count, dtype=np.int32)

    before = words(32_000 // SCALE + lognormal(rng, 15_000, 5_000, 50_000))
    sizes, user = [], 0
    with at_level(engine, level), cached(engine):
        for turn in range(TURNS):
            new = words(lognormal(rng, 6_000, 4_000, 50_000))
            user = before.size if turn % 4 == 0 else user
            tokens = np.concatenate([before, new, opening])
            length = lognormal(rng, 1_000, 800, 4_000)
            record, generated, state = answer(engine, tokens, length, history=tokens.size - OPENING, user=user)
            read, fresh = record.prompt_tokens - record.start, tokens.size - (before.size if turn else 0)
            assert read <= fresh + most, record
            assert record.source == ("end" if turn else "cold")
            sizes.append(new.size)
            before = np.concatenate([tokens, np.array(generated, np.int32)])
        expected = cold(engine, tokens, length)
        assert generated == expected[0]
        assert_bits_equal(state, expected[1])
    assert max(sizes) > 256 > BLOCK > min(sizes)  # results of more than a page, and of less than a block


@pytest.fixture(scope="module")
def chat_engine(compile_cache) -> Engine:
    return Engine(load("embedded"), EngineConfig(grid=128, context_tokens=8192, compile_cache=compile_cache))


def prose(rng: random.Random, lines: int) -> str:
    return " ".join(f"{rng.choice(talk.SUBJECTS)} {rng.choice(talk.VERBS)} {rng.choice(talk.OBJECTS)}." for _ in range(lines))


def turns(engine: Engine) -> Iterator[Turn]:
    """A conversation through the chat template, thinking on, whose client drops the reasoning. Each turn when it has been answered."""
    conversation, rng = Conversation(engine, system=talk.SYSTEM, tools=talk.TOOLS, max_tokens=24), random.Random(20)
    for number in range(TURNS):
        text = prose(rng, rng.choice((1, 3, 12, 40)))
        turn = conversation.say([talk.user(text)] if number % 4 == 0 else [{"role": "tool", "content": text}])
        for _ in turn:
            pass
        yield turn
        conversation.messages[-1].pop("reasoning_content", None)


@pytest.mark.parametrize(("level", "most"), [(TOKEN, BLOCK), (GRID, 128)])
def test_a_client_that_drops_the_reasoning(chat_engine, level, most):
    """What the template makes of the beginning of an answer is read again, and no more.

    What is new is all that no earlier request had read, as tokens: the template's own rewriting counts as that.
    """
    engine, rewritten, end = chat_engine, 0, None
    with at_level(engine, level), cached(engine):
        for turn in turns(engine):
            shared = 0 if end is None else common(end, turn.prompt)
            assert turn.read <= turn.prompt.size - shared + most
            assert (turn.source == "cold") == (end is None)
            rewritten += turn.rewritten is not None
            end = np.concatenate([turn.prompt, np.array(turn.tokens, np.int32)])
        record, generated, state = answer(engine, turn.prompt)
        assert (record.source, record.start) == ("prompt", turn.prompt.size)
        expected = cold(engine, turn.prompt)
        assert generated == expected[0]
        assert_bits_equal(state, expected[1])
    assert rewritten > TURNS / 2


def test_control_without_the_boundaries(chat_engine, monkeypatch):
    """A client that says nothing of them: some turn reads more than a block of what was there."""
    monkeypatch.setattr(Boundaries, "history", lambda self, prompt: None)
    with cached(chat_engine):
        assert max(turn.read_again for turn in turns(chat_engine)) > BLOCK
