"""Logprobs of a token: of the row as the model computed it, whatever the request then does with that."""

import math

import numpy as np
import pytest

from qjax.logprobs import logprobs
from qjax.sampling import Sampling
from qjax.thought import Thought
from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import decode, prefill
from tests.test_generation import check_end, finished

PROMPT = prompt(70)


@pytest.fixture(autouse=True)
def no_stop_tokens(small, monkeypatch):
    """A random model says its stop tokens at random; here an answer ends where the test says."""
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", ())


def rows(engine, tokens) -> np.ndarray:
    """The logits that each token of an answer came from, by hand: float32 [n, V]."""
    slot = engine.open()
    try:
        return np.concatenate([[prefill(slot, PROMPT)], decode(slot, tokens[:-1])])
    finally:
        slot.close()


def test_of_a_row_that_can_be_counted():
    row = np.log(np.array([1, 4, 2, 4, 5, 99], np.float32))
    found = logprobs(row, 2, 4, 5)
    assert [i for i, _ in found.top] == [4, 1, 3, 2]  # equal ones by id; the last id has no text
    assert [round(math.exp(value) * 16, 5) for _, value in found.top] == [5, 4, 4, 2]
    assert found.own == found.top[3][1]
    assert logprobs(row, 0, 0, 5).top == []
    assert len(logprobs(row, 0, 20, 5).top) == 5
    far = logprobs(np.array([0, 3e38, -3e38], np.float32), 2, 1, 3)  # neither overflows nor is it no number
    assert math.isclose(far.own, -6e38, rel_tol=1e-6)
    assert far.top == [(1, 0.0)]


@pytest.mark.parametrize("count", [-1, 21, True, 1.0, "3"])
def test_a_count_out_of_range_is_refused(small, count):
    with pytest.raises(ValueError, match=rf"logprobs must be a whole number from 0 to 20, or None, found {count!r}"):
        small.generate(PROMPT, logprobs=count)


SAMPLING = Sampling(temperature=0.7, top_k=5, seed=3, presence_penalty=1.5, repetition_penalty=1.4)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING])
def test_each_token_has_those_of_the_row_that_it_came_from(small, count, sampling):
    """By hand; tokens that are forced or hidden too, and neither temperature nor a penalty enters."""
    run, pieces = finished(small, sampling=sampling, max_tokens=30, logprobs=count, thought=Thought(9, True, (5, 6, 7), (8, 9)))
    size, pieces = small.model.tokenizer.size, [piece for piece in pieces if piece.id is not None]
    assert [piece.hidden for piece in pieces] == [9 <= i < 12 for i in range(30)]
    for piece, row in zip(pieces, rows(small, run.tokens), strict=True):
        allowed = row[:size].astype(np.float64)
        total = math.log(math.fsum(math.exp(x - allowed.max()) for x in allowed.tolist())) + allowed.max()
        assert math.isclose(piece.logprobs.own, allowed[piece.id] - total, abs_tol=1e-12)
        assert [i for i, _ in piece.logprobs.top] == sorted(range(size), key=lambda i: (-row[i], i))[:count]
        assert all(math.isclose(value, allowed[i] - total, abs_tol=1e-12) for i, value in piece.logprobs.top)
    if sampling == Sampling() and count:
        assert all(piece.logprobs.top[0] == (piece.id, piece.logprobs.own) for i, piece in enumerate(pieces) if not 9 <= i < 14)
    check_end(small, run, [*PROMPT, *run.tokens[:-1]])


def test_asked_for_or_not_the_answer_is_the_same(small, monkeypatch):
    told, pieces = finished(small, max_tokens=20, logprobs=20)
    monkeypatch.setattr("qjax.transcript.logprobs", None)  # nothing is computed
    plain, others = finished(small, max_tokens=20)
    assert [piece._replace(logprobs=None) for piece in pieces] == others
    assert_bits_equal(np.array(told.tokens), np.array(plain.tokens))
    for run in (told, plain):
        small.release(run.sequence)


def test_what_is_left_at_the_end_has_none(small):
    whole, _ = finished(small, max_tokens=20)
    run, pieces = finished(small, max_tokens=20, logprobs=1, stop=[whole.text[-3:] + "and never this"])
    assert pieces[-1].id is None
    assert pieces[-1].logprobs is None
    for each in (whole, run):
        small.release(each.sequence)
