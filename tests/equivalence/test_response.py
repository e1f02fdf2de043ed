"""The response cache through the engine: an identical greedy request forwards nothing and says the same."""

import numpy as np
import pytest

from qjax.config import GRID
from qjax.sampling import Sampling
from tests.bits import assert_bits_equal
from tests.equivalence.test_resident import GB, answer, cached, cold, followed
from tests.impure import impure_steps
from tests.models import prompt

ON = {"response_gb": 1e-3}


def ask(engine, tokens, **more):
    """(tokens with their texts, generation) of a request; its state is given back."""
    generation = engine.generate(tokens, **{"max_tokens": 6} | more)
    said = list(generation)
    engine.release(generation.sequence)
    return said, generation


def test_the_same_request_again_forwards_nothing(tiny_engine, monkeypatch):
    tokens = prompt(150)
    with cached(tiny_engine, **ON) as caches:
        said, first = ask(tiny_engine, tokens, max_tokens=30)
        monkeypatch.setattr(tiny_engine.forward, "chunk", None)
        monkeypatch.setattr(tiny_engine.forward, "step", None)
        again, second = ask(tiny_engine, tokens, max_tokens=30)
        monkeypatch.undo()
        assert again == said
        assert (second.tokens, second.text, second.finish) == (first.tokens, first.text, first.finish)
        assert (second.start, second.prompt_tokens, second.sequence.tokens.size) == (150, 150, 0)
        record = caches.ledger.records[-1]
        assert (record.source, record.start, record.read_again, record.why) == ("response", 150, 0, "none")
        assert (record.generated, record.finish, record.exact) == (len(first.tokens), first.finish, True)
        assert caches.stats()["responses"]["hits"] == 1
        following = followed(tokens, first.tokens, prompt(10, seed=4))
        record, *warm = answer(tiny_engine, following)
        assert (record.source, record.start) == ("end", following.size - 10)  # of the request that computed it
        assert_bits_equal(warm[1], cold(tiny_engine, following)[1])


def test_a_stop_string_and_a_limit_come_again(tiny_engine):
    tokens = prompt(150)
    with cached(tiny_engine, **ON) as caches:
        text = ask(tiny_engine, tokens, max_tokens=30)[1].text
        stop = [text[len(text) // 2 : len(text) // 2 + 3]]
        found = [ask(tiny_engine, tokens, max_tokens=30, stop=stop) for _ in range(2)]
        assert found[0][0] == found[1][0]
        assert [g.finish for _, g in found] == ["stop", "stop"]
        assert found[1][1].text == text[: text.index(stop[0])]
        assert caches.stats()["responses"]["hits"] == 1


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 5}, {"tenant": "b"}, {"stop": ["xyz"]}, {"sampling": Sampling(presence_penalty=1.0)}, {"sampling": Sampling(temperature=1.0)}],
)
def test_another_request_is_computed(tiny_engine, change):
    tokens = prompt(100)
    with cached(tiny_engine, **ON) as caches:
        ask(tiny_engine, tokens)
        ask(tiny_engine, tokens, **change)
        assert caches.ledger.records[-1].source != "response"
        ask(tiny_engine, tokens)
        assert caches.ledger.records[-1].source == "response"


def test_off_by_default_and_after_a_clear_and_for_a_request_with_a_sequence(tiny_engine):
    tokens = prompt(100)
    with cached(tiny_engine) as caches:
        for _ in range(2):
            ask(tiny_engine, tokens)
        assert caches.ledger.records[-1].source == "prompt"
        assert caches.stats()["responses"]["entries"] == 0
    with cached(tiny_engine, **ON) as caches:
        ask(tiny_engine, tokens)
        caches.clear()
        ask(tiny_engine, tokens)
        assert caches.ledger.records[-1].source == "cold"
        sequence, _ = tiny_engine.prefill(tokens[:64])
        ask(tiny_engine, tokens, sequence=sequence)
        tiny_engine.release(sequence)
        assert caches.stats()["responses"]["hits"] == 0


def test_an_answer_that_was_left_or_cancelled_is_not_kept(tiny_engine):
    tokens = prompt(100)
    with cached(tiny_engine, **ON) as caches:
        generation = tiny_engine.generate(tokens, max_tokens=6)
        next(iter(generation))
        generation.close()
        tiny_engine.release(generation.sequence)
        ask(tiny_engine, tokens, cancel=lambda: True)
        assert caches.stats()["responses"]["entries"] == 0
        said, _ = ask(tiny_engine, tokens)
        generation = tiny_engine.generate(tokens, max_tokens=6)
        assert next(iter(generation)) == said[0]  # an answer out of the cache may be left early too
        generation.close()
        tiny_engine.release(generation.sequence)
        assert (generation.finish, generation.tokens) == ("cancelled", [said[0].id])


def test_at_level_grid_the_answer_of_a_session_resume_is_not_kept(tiny_engine):
    """It has the greedy gate's promise; another request for the same is owed a cold run's."""
    with impure_steps(tiny_engine, GRID) as engine, cached(engine, **ON) as caches:
        tokens = prompt(150)
        said, generation = ask(engine, tokens)
        following = followed(tokens, generation.tokens, prompt(10, seed=4))
        ask(engine, following)
        assert not caches.ledger.records[-1].exact
        assert caches.stats()["responses"]["entries"] == 1
        again, _ = ask(engine, tokens)
        assert caches.ledger.records[-1].source == "response"
        assert again == said


def test_the_answers_count_against_the_caches_together(tiny_engine):
    with cached(tiny_engine, **ON) as caches:
        ask(tiny_engine, np.arange(100))
        held = caches.budget.held
        assert 0 < caches.responses.nbytes < held
    for limit, entries in ((held, 1), (held - 1, 0), (0, 0)):
        with cached(tiny_engine, caches_gb=limit / GB, **ON) as caches:
            ask(tiny_engine, np.arange(100))
            assert caches.stats()["responses"]["entries"] == entries
