"""Requests that a new user got wrong or broke off: they are refused in words, and nothing stays held."""

import signal

import pytest

from tests.equivalence.test_resident import answer, cached
from tests.models import prompt


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tenant": None}, "tenant must be a text, found None"),
        ({"tenant": 3}, "tenant must be a text, found 3"),
        ({"history": "x"}, "history must be a number of tokens of the prompt, 0 to 100, found 'x'"),
        ({"history": 101}, "history must be .* found 101"),
        ({"user": -1}, "user must be .* found -1"),
        ({"user": 2.0}, "user must be .* found 2.0"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number, at least 1, found 2.5"),
        ({"max_tokens": float("nan")}, "max_tokens must be .* found nan"),
        ({"max_tokens": True}, "max_tokens must be .* found True"),
        ({"stop": [3]}, "stop strings must be texts"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_taken(tiny_engine, wrong, message):
    with cached(tiny_engine) as caches:
        with pytest.raises(ValueError, match=message):
            tiny_engine.generate(prompt(100), **wrong)
        assert (caches.ledger.records, tiny_engine.pool.free) == ([], tiny_engine.pool.pages)


def test_what_breaks_in_a_lookup_gives_back_what_was_taken(tiny_engine, monkeypatch):
    """An error or Ctrl-C after the hit was taken, before there is a request that knows of it: its pages were held for ever."""
    with cached(tiny_engine) as caches:
        answer(tiny_engine, prompt(150))
        for error in (KeyboardInterrupt, ZeroDivisionError):

            def broken(more, error=error):
                raise error

            monkeypatch.setattr(caches.budget, "before_prefill", broken)
            with pytest.raises(error):
                answer(tiny_engine, prompt(170))
            monkeypatch.undo()
        record, *_ = answer(tiny_engine, prompt(170))
        assert record.start == 150


def test_ctrl_c_in_a_lookup_is_raised_at_its_end(tiny_engine, monkeypatch):
    """`cached` checks that nothing stays held."""
    with cached(tiny_engine) as caches:
        answer(tiny_engine, prompt(150))
        begin = caches.begin

        def interrupted(**lookup):
            signal.raise_signal(signal.SIGINT)
            return begin(**lookup)

        monkeypatch.setattr(caches, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(tiny_engine, prompt(170))


def test_one_stop_string_is_not_its_letters(tiny_engine):
    """In the response cache a text and the tuple of its letters were one key."""
    with cached(tiny_engine, response_gb=1e-3) as caches:
        for stop in ("xy", ("x", "y"), ["xy"], ("xy",)):
            answer(tiny_engine, prompt(100), stop=stop)
        assert [r.source for r in caches.ledger.records] == ["cold", "prompt", "response", "response"]


def test_a_list_of_stop_strings_is_read_when_it_is_given(tiny_engine):
    with cached(tiny_engine, response_gb=1e-3) as caches:
        stops = ["xy"]
        generation = tiny_engine.generate(prompt(100), max_tokens=5, stop=stops)
        stops.clear()
        list(generation)
        tiny_engine.release(generation.sequence)
        list(again := tiny_engine.generate(prompt(100), max_tokens=5, stop=iter(["xy"])))
        tiny_engine.release(again.sequence)
        answer(tiny_engine, prompt(100), max_tokens=5)
        assert [r.source for r in caches.ledger.records] == ["cold", "response", "prompt"]


def test_an_answer_out_of_the_cache_is_cancelled_and_reported_like_another(tiny_engine):
    with cached(tiny_engine, response_gb=1e-3) as caches:
        answer(tiny_engine, prompt(100))
        reports = []
        generation = tiny_engine.generate(prompt(100), max_tokens=5, cancel=lambda: bool(generation.tokens), progress=reports.append)
        list(generation)
        tiny_engine.release(generation.sequence)
        assert (generation.finish, len(generation.tokens)) == ("cancelled", 1)
        assert [(p.done, p.total, p.start) for p in reports] == [(100, 100, 100)]
        assert (caches.ledger.records[-1].source, caches.ledger.records[-1].finish) == ("response", "cancelled")


def test_a_generation_that_was_closed_before_it_began_is_cancelled(tiny_engine):
    generation = tiny_engine.generate(prompt(100))
    generation.close()
    assert (generation.finish, generation.sequence, list(generation)) == ("cancelled", None, [])
