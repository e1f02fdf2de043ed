"""Beside others against alone: tokens, every row of logits that was drawn from, and the end's state have the same bits."""

from collections import defaultdict
from contextlib import nullcontext

import numpy as np
import pytest

from qjax.pages import PagePool
from qjax.parallel import Parallel
from qjax.sampling import Sampling, sample
from qjax.slot import Slot
from qjax.state import BLOCK
from tests.bits import assert_bits_equal
from tests.equivalence.counting import recount
from tests.equivalence.test_resident import answer, cached, followed
from tests.models import prompt
from tests.runs import cold as alone
from tests.runs import decode, kept, new_pool, new_slot, prefill

GREEDY, WARM = {}, {"temperature": 0.9, "top_k": 40}


def joined(*parts) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


class Watch:
    """What each request's tokens were drawn from, by its seed, and in which order the slots ran."""

    def __init__(self, monkeypatch):
        self.logits, self.order = defaultdict(list), []

        def drawn(logits, sampling, *more):
            self.logits[sampling.seed].append(np.array(logits))
            return sample(logits, sampling, *more)

        monkeypatch.setattr("qjax.generation.sample", drawn)
        for name in ("prefill", "step"):
            monkeypatch.setattr(Slot, name, self.watched(getattr(Slot, name), name))

    def watched(self, real, name):
        def ran(slot, tokens, *more, **named):
            self.order.append((slot, name, len(tokens)))
            return real(slot, tokens, *more, **named)

        return ran

    @property
    def switches(self) -> int:
        """How often a slot ran after another one."""
        return sum(a[0] is not b[0] for a, b in zip(self.order, self.order[1:], strict=False))


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def result(engine, generation, watch) -> dict:
    """All that a request gave. Its sequence is released."""
    assert generation.error is None
    state = kept(engine.pool, generation.sequence)
    engine.release(generation.sequence)
    logits = watch.logits.pop(generation._sampling.seed)
    return {"tokens": np.array(generation.tokens), "logits": np.stack(logits), "state": state}


def by_itself(engine, watch, tokens, sequence=None, **options) -> dict:
    """The same request on a pool and with caches of nobody."""
    pool, caches = engine.pool, engine.caches
    engine.pool, engine.caches = PagePool(engine.layout, pool.pages), None
    try:
        generation = engine.generate(tokens, **options)
        list(generation)
        return result(engine, generation, watch)
    finally:
        engine.pool, engine.caches = pool, caches


def together(engine, watch, requests, most=None, **options) -> list[dict]:
    """Requests (tokens, options) side by side; their results in this order."""
    runs = Parallel(engine, most or len(requests))
    generations = [runs.submit(tokens, **options | own) for tokens, own in requests]
    list(runs)
    return [result(engine, generation, watch) for generation in generations]


def assert_as_alone(engine, watch, requests, most=None, **options) -> None:
    found = together(engine, watch, requests, most, **options)
    for (tokens, own), one in zip(requests, found, strict=True):
        assert_bits_equal(one, by_itself(engine, watch, tokens, **options | own))


def mixed(sampling) -> list:
    """Prompts of one to five pages of 64 with answers of 30 to 3 tokens: most of the time some read and some write."""
    lengths = ((20, 30), (290, 6), (130, 12), (64, 3))
    return [(prompt(n, seed=n), {"max_tokens": most, "sampling": Sampling(**sampling, seed=n)}) for n, most in lengths]


@pytest.mark.parametrize("many", [2, 3, 4])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("with_caches", [False, True], ids=["alone", "cached"])
def test_each_says_what_it_says_alone(tiny_engine, watch, many, sampling, with_caches):
    with cached(tiny_engine) if with_caches else nullcontext():
        assert_as_alone(tiny_engine, watch, mixed(sampling)[:many])
        switches, watch.order = watch.switches, []
    assert switches > 10  # they did run side by side


def test_more_requests_than_slots(engine_256, watch):
    with cached(engine_256):
        assert_as_alone(engine_256, watch, mixed(GREEDY), most=2)


def test_control_a_state_of_another_slot_is_found(tiny_engine, watch, monkeypatch):
    """One step goes on from the other request's S: what it computes is not what it computes alone."""
    step, seen, swapped = tiny_engine.forward.step, [], []

    def confused(pool, S, *more):
        if len(seen) == 12 and not swapped:
            swapped.append(1)
            S = seen[-1]
        seen.append(S)
        return step(pool, S, *more)

    requests = [(tokens, own | {"max_tokens": 12}) for tokens, own in mixed(GREEDY)[2:]]
    monkeypatch.setattr(tiny_engine.forward, "step", confused)
    found = together(tiny_engine, watch, requests)
    monkeypatch.setattr(tiny_engine.forward, "step", step)
    assert swapped
    expected = [by_itself(tiny_engine, watch, tokens, **own) for tokens, own in requests]
    with pytest.raises(AssertionError, match="differ"):
        assert_bits_equal(found, expected)


@pytest.mark.parametrize("length", [290, 256, 320, 383])
def test_continuations_of_one_sequence(engine_256, watch, length):
    """Three go on from one end inside a page: one writes there, the others copy it; and one says the same prompt again."""
    with cached(engine_256) as caches:
        tokens = prompt(length)
        _, generated, _ = answer(engine_256, tokens)
        watch.logits.clear()
        ends = [followed(tokens, generated, prompt(n, seed=n)) for n in (40, 9, 70)] + [tokens]
        requests = [(end, {"sampling": Sampling(seed=i)}) for i, end in enumerate(ends)]
        assert_as_alone(engine_256, watch, requests, max_tokens=9)
        records = caches.ledger.records[1:]
        assert sorted((r.prompt_tokens, r.start) for r in records) == sorted([(end.size, length + 4) for end in ends[:3]] + [(length, length)])
        recount(caches, [])


@pytest.mark.parametrize("length", [100, 290])
def test_a_given_sequence_is_shared(tiny_engine, watch, length):
    """Without caches: all go on from one held sequence, which stays as it is."""
    tiny_engine.pool = PagePool(tiny_engine.layout, tiny_engine.pool.pages)
    head, _ = tiny_engine.prefill(prompt(length))
    before = kept(tiny_engine.pool, head)
    runs = Parallel(tiny_engine, 3)
    requests = [(joined(prompt(length), prompt(n, seed=n)), Sampling(seed=n)) for n in (3, 30, 65)]
    generations = [runs.submit(tokens, head, max_tokens=20, sampling=sampling) for tokens, sampling in requests]
    list(runs)
    for (tokens, sampling), generation in zip(requests, generations, strict=True):
        assert generation.start == length
        assert_bits_equal(result(tiny_engine, generation, watch), by_itself(tiny_engine, watch, tokens, max_tokens=20, sampling=sampling))
    assert_bits_equal(kept(tiny_engine.pool, head), before)
    tiny_engine.release(head)
    assert tiny_engine.pool.free == tiny_engine.pool.pages


@pytest.mark.parametrize(("read", "said"), [*((64 * n, 0) for n in range(5)), *((290, n) for n in (1, 2, 5))])
def test_a_cancel_disturbs_nobody_and_is_gone_on_with(tiny_engine, watch, read, said):
    """A4: one of three is cancelled after each of its forwards, in the prompt and in the answer; then it is asked again."""
    with cached(tiny_engine) as caches:
        requests = [(prompt(n, seed=n), {"max_tokens": 6, "sampling": Sampling(seed=n)}) for n in (30, 290, 100)]
        runs = Parallel(tiny_engine, 3)
        generations = [
            runs.submit(tokens, **own, progress=lambda now: now.done == read != 290 and runs.cancel(gone)) for tokens, own in requests[1:2]
        ]
        gone = generations[0]
        others = [runs.submit(tokens, **own) for tokens, own in requests[::2]]
        for generation, _ in runs:
            if generation is gone and len(gone.tokens) == said:
                runs.cancel(gone)
        assert (gone.finish, len(gone.tokens), int(gone.sequence.length)) == ("cancelled", said, read + max(0, said - 1))
        assert_bits_equal(kept(tiny_engine.pool, gone.sequence), alone(tiny_engine, gone.sequence.tokens))
        tiny_engine.release(gone.sequence)
        watch.logits.pop(290, None)
        for (tokens, own), generation in zip(requests[::2], others, strict=True):
            assert_bits_equal(result(tiny_engine, generation, watch), by_itself(tiny_engine, watch, tokens, **own))
        (again,) = together(tiny_engine, watch, requests[1:2])
        assert caches.ledger.records[-1].start == read
        assert_bits_equal(again, by_itself(tiny_engine, watch, requests[1][0], **requests[1][1]))


ACCEPTS = ((1, [1]), (4, [3, 4, 0, 2]), (16, [16, 1, 0, 5]), (6, [2, 0, 6, 5, 1]))
"""Rows of a verify step, and how many of them are taken in each round: four drafters that are right at other times."""


def test_a2_four_slots_with_different_accept_patterns(tiny_engine):
    """A2: all forward their drafts, then all take what is right of theirs, in another order; the state of each at every length that it
    passes, at every offset in a block, is that of a sequential run."""
    pool, ends = new_pool(tiny_engine), [set() for _ in ACCEPTS]
    texts = [prompt(448, seed=seed) for seed in range(4)]
    slots = [new_slot(tiny_engine, pool) for _ in ACCEPTS]
    for slot, text, first in zip(slots, texts, (1, 30, 63, 64), strict=True):
        prefill(slot, text[:first])
    for turn in range(100):
        taken = []
        for slot, text, (rows, accepts) in zip(slots, texts, ACCEPTS, strict=True):
            rows = min(rows, slot.verify_room(), 250 - slot.length)
            right = min(accepts[turn % len(accepts)], rows)
            taken.append(text[slot.length : slot.length + right])
            if rows:
                wrong = (text[slot.length + right : slot.length + rows] + 1) % 1000
                slot.step(joined(taken[-1], wrong))
        for which in (2, 0, 3, 1):
            slots[which].accept(taken[which])
        for slot, text, passed in zip(slots, texts, ends, strict=True):
            if slot.length in passed:
                continue
            passed.add(slot.length)
            assert_bits_equal(kept(pool, slot.freeze()), alone(tiny_engine, text[: slot.length]))
    assert {length % BLOCK for length in ends[0]} == set(range(BLOCK))
    assert len({length % BLOCK for passed in ends[1:] for length in passed}) > 60
    for slot, text in zip(slots, texts, strict=True):
        sequential, following = new_slot(tiny_engine, new_pool(tiny_engine)), text[slot.length : slot.length + 5]
        prefill(sequential, text[: slot.length])
        assert_bits_equal(decode(slot, following), decode(sequential, following))
