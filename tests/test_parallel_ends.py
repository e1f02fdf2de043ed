"""Several requests at once: errors, cancels and full pools end one of them, and no other."""

import signal

import pytest

from qjax.pages import PoolFull
from qjax.parallel import Parallel
from tests.models import prompt
from tests.test_parallel import drain, ends


@pytest.fixture(autouse=True)
def no_stop_tokens(small, monkeypatch):
    """A random model says its stop tokens at random; here an answer ends where the test says."""
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", ())


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_an_error_of_one_request_ends_no_other(small, fail_at):
    calls = []

    def progress(now):
        calls.append(now)
        if len(calls) > fail_at:
            raise OSError("the terminal is gone")

    runs = Parallel(small, 3)
    answers = [runs.submit(prompt(200, seed=seed), max_tokens=5, progress=progress if seed == 1 else None) for seed in range(3)]
    events = drain(runs, small)
    assert set(ends(events)) == set(answers)
    assert [len(generation.tokens) for generation in answers] == [5, 0, 5]
    assert str(answers[1].error) == "the terminal is gone"
    assert [generation.error for generation in answers[::2]] == [None, None]


def test_an_interrupt_is_for_the_loop(small, monkeypatch):
    """KeyboardInterrupt in one's forward: it has ended, and the next loop goes on with the other."""
    runs = Parallel(small, 2)
    one, other = (runs.submit(prompt(20, seed=seed), max_tokens=6) for seed in range(2))
    step, count = small.forward.step, iter(range(100))

    def pressed(*arguments):
        done = step(*arguments)
        if next(count) == 5:  # two forwards of each prompt, and before it one of the first answer
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(small.forward, "step", pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            drain(runs, small)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (one.finish, len(one.tokens), int(one.sequence.length)) == ("cancelled", 2, 21)
    small.release(one.sequence)
    assert ends(drain(runs, small)) == [other]
    assert len(other.tokens) == 6


def test_leaving_the_loop_at_an_end_loses_no_other_end(small):
    runs = Parallel(small, 1)
    answers = [runs.submit(prompt(20, seed=seed), max_tokens=3) for seed in range(4)]
    for generation in answers[:3]:
        runs.cancel(generation)
    ended = []
    while runs._open:
        for generation, token in runs:
            if token is None:
                ended.append(generation)
                break
    assert ended == answers
    small.release(answers[3].sequence)


@pytest.mark.parametrize(("after", "left"), [(0, 0), (1, 0), (3, 128), (7, 202)])
def test_a_running_request_is_cancelled_before_its_next_forward(small, after, left):
    """While it waits, at its start, between two chunks, between two tokens: the sequence ends at the last finished row."""
    runs = Parallel(small, 2)
    turns = iter(range(100))

    def progress(now):
        if next(turns) + 1 == after:
            runs.cancel(one)

    one = runs.submit(prompt(200), max_tokens=9, progress=progress)
    other = runs.submit(prompt(30, seed=1), max_tokens=9)
    if not after:
        runs.cancel(one)
    ended = []
    for generation, token in runs:
        if after == 7 and generation is one and len(one.tokens) == 3:
            runs.cancel(one)
        if token is None:
            ended.append(generation)
    assert set(ended) == {one, other}
    assert (one.finish, other.finish) == ("cancelled", "length")
    assert (one.sequence is None) == (after == 0)
    assert (0 if one.sequence is None else int(one.sequence.length)) == left
    for generation in (one, other):
        if generation.sequence is not None:
            small.release(generation.sequence)
    runs.cancel(one)  # it has ended: nothing
    assert list(runs) == []


def test_a_cancel_reaches_one_that_waits_in_a_full_queue(small):
    runs = Parallel(small, 1)
    first = runs.submit(prompt(20), max_tokens=5)
    second, third = (runs.submit(prompt(20, seed=seed), max_tokens=2) for seed in (1, 2))
    ended = []
    for generation, token in runs:
        if generation is first and len(first.tokens) == 2:
            runs.cancel(second)
        if token is None:
            ended.append(generation)
            if generation.sequence is not None:
                small.release(generation.sequence)
    assert ended == [second, first, third]
    assert (second.finish, second.sequence, second.tokens) == ("cancelled", None, [])


def test_leaving_the_loop_at_a_cancelled_ones_end_loses_no_other_cancel(small):
    """The loop looks for cancelled ones where it was told of one; two that wait behind one that runs were cancelled at once."""
    runs = Parallel(small, 1)
    first, *others = (runs.submit(prompt(20, seed=seed), max_tokens=9) for seed in range(3))
    next(iter(runs))
    for generation in others:
        runs.cancel(generation)
    left = next(iter(runs))
    events = drain(runs, small)
    assert [left, events[0]] == [(generation, None) for generation in others]
    assert [generation.finish for generation in (first, *others)] == ["length", "cancelled", "cancelled"]


def test_a_generation_may_be_closed_in_the_loop(small):
    runs = Parallel(small, 2)
    one, other = (runs.submit(prompt(20, seed=seed), max_tokens=6) for seed in range(2))
    for generation, token in runs:
        if len(other.tokens) == 2:
            one.close()
        if token is None:
            small.release(generation.sequence)
    assert (one.finish, other.finish) == ("cancelled", "length")


def test_close_cancels_all_and_takes_no_more(small):
    runs = Parallel(small, 2)
    answers = [runs.submit(prompt(150, seed=seed), max_tokens=6) for seed in range(3)]
    loop = iter(runs)
    next(loop)
    runs.close()
    with pytest.raises(RuntimeError, match="closed"):
        runs.submit(prompt(5))
    events = [*loop]
    assert sorted(map(id, ends(events))) == sorted(map(id, answers))
    assert {generation.finish for generation in answers} == {"cancelled"}
    assert answers[2].sequence is None
    assert not runs.wait()
    for generation in answers[:2]:
        small.release(generation.sequence)


def taken(engine, left):
    """All pages but so many, held by somebody else."""
    return [engine.pool.take() for _ in range(engine.pool.free - left)]


def test_a_request_without_a_page_waits_for_one_that_ends(small):
    """Three pages: the first has two of them, the second waits with one, and gets what the first gives back."""
    others = taken(small, 3)
    runs = Parallel(small, 2)
    first, second = runs.submit(prompt(120), max_tokens=8), runs.submit(prompt(120, seed=1), max_tokens=4)
    events = drain(runs, small)
    assert ends(events) == [first, second]
    assert all(generation is first for generation, _ in events[: events.index((first, None))])
    assert [(g.finish, g.error, len(g.tokens)) for g in (first, second)] == [("length", None, 8), ("length", None, 4)]
    small.pool.release(others)


def test_none_starts_while_one_waits_for_a_page(small):
    """Of three pages the first has two and the second one. A third request stays in the queue. Where the first needs one more page, the second
    goes back there, before the third, and reads its prompt again later.
    """
    others = taken(small, 3)
    runs, third, ended = Parallel(small, 3), None, []
    first, second = (runs.submit(prompt(120, seed=seed), max_tokens=20) for seed in range(2))
    for generation, token in runs:
        if third is None and len(first.tokens) == 2:
            third = runs.submit(prompt(5, seed=2), max_tokens=2)
        if token is None:
            ended.append((generation, type(generation.error)))
            if generation.sequence is not None:
                small.release(generation.sequence)
    assert ended[0] == (first, type(None))
    assert set(ended[1:]) == {(second, type(None)), (third, type(None))}
    assert (second.finish, len(second.tokens)) == ("length", 20)
    small.pool.release(others)


def test_where_all_wait_the_youngest_goes_back_to_the_queue(small):
    """Two sequences of 190 need six pages, and there are four: what one after the other can do is done."""
    others = taken(small, 4)
    runs = Parallel(small, 2)
    first, second = runs.submit(prompt(190), max_tokens=2), runs.submit(prompt(190, seed=1), max_tokens=2)
    assert ends(drain(runs, small)) == [first, second]
    assert [(g.error, g.finish, len(g.tokens)) for g in (first, second)] == [(None, "length", 2)] * 2
    small.pool.release(others)


def test_where_all_wait_the_youngest_that_has_said_something_ends(small):
    """Both write at row 128, and there are four pages for the two of them."""
    others = taken(small, 4)
    runs = Parallel(small, 2)
    first, second = runs.submit(prompt(120), max_tokens=20), runs.submit(prompt(120, seed=1), max_tokens=20)
    assert ends(drain(runs, small)) == [second, first]
    assert isinstance(second.error, PoolFull)
    assert (second.finish, first.error, first.finish, len(first.tokens)) == ("failed", None, "length", 20)
    small.pool.release(others)


def test_the_only_one_gets_the_pools_error(small):
    others = taken(small, 2)
    runs = Parallel(small, 2)
    generation = runs.submit(prompt(190), max_tokens=2)
    assert ends(drain(runs, small)) == [generation]
    assert isinstance(generation.error, PoolFull)
    small.pool.release(others)


def test_one_that_waits_for_a_page_can_be_cancelled(small):
    others = taken(small, 3)
    runs = Parallel(small, 2)
    first, second = runs.submit(prompt(120), max_tokens=8), runs.submit(prompt(120, seed=1), max_tokens=4)
    ended = []
    for generation, token in runs:
        if generation is first and len(first.tokens) == 5:
            runs.cancel(second)
        if token is None:
            ended.append(generation)
            small.release(generation.sequence)
    assert ended == [second, first]
    assert (second.finish, second.error) == ("cancelled", None)
    small.pool.release(others)
