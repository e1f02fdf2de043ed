"""Several requests at once: whose turn it is, who waits, and how each ends."""

import threading
from collections import defaultdict

import jax
import numpy as np
import pytest

from qjax.generation import Token
from qjax.parallel import Parallel
from qjax.slot import Slot
from tests.models import prompt
from tests.test_programs import Compiles


@pytest.fixture(autouse=True)
def no_stop_tokens(small, monkeypatch):
    """A random model says its stop tokens at random; here an answer ends where the test says."""
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", ())


@pytest.fixture
def forwards(monkeypatch):
    """What runs, in order: (a letter for each slot in the order of their first forwards, "prefill" or "step", rows)."""
    seen, letters = [], {}

    def watch(name):
        real = getattr(Slot, name)

        def watched(self, tokens, *more, **named):
            seen.append((letters.setdefault(self, "abcdefgh"[len(letters)]), name, len(tokens)))
            return real(self, tokens, *more, **named)

        monkeypatch.setattr(Slot, name, watched)

    watch("prefill")
    watch("step")
    return seen


def drain(runs, engine) -> list:
    """All that comes: (generation, token, or None at its end). What ended is released at once."""
    events = []
    for generation, token in runs:
        events.append((generation, token))
        if token is None and generation.sequence is not None:
            engine.release(generation.sequence)
    return events


def ends(events) -> list:
    return [generation for generation, token in events if token is None]


def test_an_answer_waits_for_one_prefill_forward_at_the_most(small, forwards):
    """One answers while three read: a step of it, one forward of one of them in turn, and again."""
    runs = Parallel(small, 4)
    runs.submit(prompt(10), max_tokens=40)
    for seed in (1, 2, 3):
        runs.submit(prompt(320, seed=seed), max_tokens=1)
    drain(runs, small)
    letters = "".join(who for who, _, _ in forwards)
    assert letters == "a" + "".join("a" + reader for reader in "bcd" * 5) + "a" * (39 - 15)
    assert [kind for who, kind, _ in forwards if who != "a"] == ["prefill"] * 15


def test_a_short_request_does_not_wait_for_a_long_prefill(small, forwards):
    """It comes when the long one has read one chunk of six, and has ended before it has read the last."""
    runs = Parallel(small, 2)
    reports = []

    def progress(now):
        reports.append(now.done)
        if now.done == 64:
            runs.submit(prompt(60, seed=1), max_tokens=2)

    long = runs.submit(prompt(384), max_tokens=2, progress=progress)
    events = drain(runs, small)
    short = ends(events)[0]
    assert short is not long
    assert len(short.tokens) == len(long.tokens) == 2
    assert "".join(who for who, _, _ in forwards) == "aabbaaaaa"  # a reads six times, and takes a step


def test_one_at_a_time_by_default(small, forwards):
    assert small.parallel == 1
    runs = Parallel(small)
    answers = [runs.submit(prompt(100, seed=seed), max_tokens=3) for seed in range(3)]
    assert ends(drain(runs, small)) == answers
    assert "".join(who for who, _, _ in forwards) == "aaaabbbbcccc"


def test_at_most_so_many_run_at_once_and_they_start_in_order(small, monkeypatch):
    opened, most = [], []
    open_, close = small.open, Slot.close

    def opening(sequence=None):
        slot = open_(sequence)
        opened.append(slot)
        most.append(len(opened))
        return slot

    monkeypatch.setattr(small, "open", opening)
    monkeypatch.setattr(Slot, "close", lambda self: (opened.remove(self), close(self)) if self in opened else close(self))
    runs = Parallel(small, 3)
    answers = [runs.submit(prompt(30, seed=seed), max_tokens=4) for seed in range(8)]
    events = drain(runs, small)
    firsts = list(dict.fromkeys(generation for generation, token in events if token is not None))
    assert firsts == answers
    assert max(most) == 3
    assert len(most) == 8


def test_numbers_below_one_are_refused(small):
    with pytest.raises(ValueError, match="at least 1 request must run at once, found 0"):
        Parallel(small, 0)


def test_what_is_wrong_with_a_request_is_told_at_once(small):
    runs = Parallel(small, 2)
    with pytest.raises(ValueError, match="the prompt is empty"):
        runs.submit([])
    with pytest.raises(ValueError, match="max_tokens must be a whole number, at least 1"):
        runs.submit(prompt(5), max_tokens=0)
    assert list(runs) == []


def test_a_given_sequence_is_gone_on_with(small):
    head, _ = small.prefill(prompt(100))
    runs = Parallel(small, 2)
    answers = [runs.submit(prompt(length), head, max_tokens=2) for length in (130, 150)]
    drain(runs, small)
    assert [generation.start for generation in answers] == [100, 100]
    small.release(head)


def test_leaving_the_loop_leaves_the_requests_where_they_are(small):
    runs = Parallel(small, 2)
    answers = [runs.submit(prompt(20, seed=seed), max_tokens=6) for seed in range(2)]
    for generation, _ in runs:
        if len(generation.tokens) == 3:
            break
    came = sum(len(generation.tokens) for generation in answers)
    assert 3 <= came < 12
    assert len(drain(runs, small)) == 12 - came + 2
    assert [generation.finish for generation in answers] == ["length", "length"]


def test_nobody_else_iterates_what_it_runs(small):
    runs = Parallel(small, 1)
    generation = runs.submit(prompt(20), max_tokens=4)
    assert next(iter(runs)) == (generation, Token(generation.tokens[0], generation.text))
    assert list(generation) == []  # and a loop over it is its end, as a second loop always was
    assert ends(drain(runs, small)) == [generation]


def test_one_thread_runs_what_others_submit(small):
    """As a server does: the driver sleeps until there is work, tells each of its tokens, and ends when it is closed."""
    alone = []
    for seed in range(6):
        run = small.generate(prompt(90, seed=seed), max_tokens=5)
        list(run)
        small.release(run.sequence)
        alone.append(run.tokens)
    runs, told, ended = Parallel(small, 3), defaultdict(list), threading.Semaphore(0)

    def drive():
        while runs.wait():
            for generation, token in runs:
                if token is None:
                    small.release(generation.sequence)
                    ended.release()
                else:
                    told[generation].append(token.id)

    def ask(seed):
        answers[seed] = runs.submit(prompt(90, seed=seed), max_tokens=5)

    driver, answers = threading.Thread(target=drive), {}
    driver.start()
    askers = [threading.Thread(target=ask, args=[seed]) for seed in range(6)]
    for thread in askers:
        thread.start()
    for _ in range(6):
        assert ended.acquire(timeout=60)
    for seed, thread in enumerate(askers):
        thread.join()
        assert told[answers[seed]] == answers[seed].tokens == alone[seed]
    runs.close()
    driver.join(60)
    assert not driver.is_alive()


def test_nothing_is_compiled(small):
    jax.clear_caches()  # as in a process that has served nothing yet; the engine holds its programs itself
    with Compiles() as found:
        runs = Parallel(small, 4)
        head, _ = small.prefill(prompt(70))
        for seed, length in enumerate((1, 70, 130, 200)):
            runs.submit(prompt(length, seed=seed), max_tokens=10)
        runs.submit(prompt(90), head, max_tokens=3)
        runs.submit(prompt(95), head, max_tokens=3)
        drain(runs, small)
        small.release(head)
    assert found.count == 0
    with Compiles() as control:
        jax.jit(lambda x: x * 5 + 1)(np.arange(7))
    assert control.count > 1
