"""Random requests side by side against a reference that keeps nothing."""

from collections import Counter

import numpy as np

from qjax.pages import PoolFull
from qjax.parallel import Parallel
from tests.bits import assert_bits_equal
from tests.equivalence.counting import ANSWER, Reference, recount
from tests.equivalence.test_parallel import joined
from tests.equivalence.test_resident import cached
from tests.models import prompt
from tests.runs import kept


def at_random(engine, reference, seed) -> Counter:
    """40 requests with heads in common, next turns, cancels and a pool that others hold a part of; what came up."""
    rng, seen = np.random.default_rng(seed), Counter()
    with cached(engine, cache_budget_gb=seed % 2, resident_park_gb=seed // 2 % 2) as caches:
        spare = [engine.pool.take() for _ in range(2 * seed)]
        runs, past, asked = Parallel(engine, 4), [prompt(150)], []

        def submit():
            base = past[-1 - rng.integers(min(len(past), 4))]
            base = base[: rng.integers(1, base.size + 1)] if rng.random() < 0.5 else base
            tokens = joined(base, prompt(rng.integers(1, 120), seed=rng.integers(1, 5)))[:400]
            how = {"max_tokens": int(rng.integers(1, ANSWER + 1)), "tenant": str(rng.choice(["a", "a", "b"]))}
            asked.append((runs.submit(tokens, **how), tokens))

        for _ in range(4):
            submit()
        for generation, token in runs:
            if len(asked) < 40 and rng.random() < 0.4:
                submit()
            if rng.random() < 0.03:
                runs.cancel(asked[rng.integers(len(asked))][0])
            seen["waited for a page"] += any(run.full is not None for run in runs._running)
            if token is not None:
                continue
            tokens = next(tokens for one, tokens in asked if one is generation)
            assert generation.error is None or isinstance(generation.error, PoolFull)
            seen[generation.finish if generation.error is None else "full"] += 1
            assert generation.tokens == reference.answer(tokens)[: len(generation.tokens)]
            if generation.sequence is not None:
                assert_bits_equal(kept(engine.pool, generation.sequence), reference.state(generation.sequence.tokens))
                engine.release(generation.sequence)
                past.append(joined(tokens, generation.tokens))
        assert len(asked) == 40
        assert caches.running.requests == []
        for session in caches.resident.sessions:
            for anchor in session.anchors:
                assert_bits_equal(kept(engine.pool, anchor.sequence), reference.state(anchor.sequence.tokens))
        engine.pool.release(spare)
        recount(caches, [])
        return seen + Counter(record.source for record in caches.ledger.records)


def test_random_requests_side_by_side_equal_cold_runs(tiny_engine):
    """A20: every end and every anchor that is left has a cold run's bits, every count is right, and most of what can happen happened."""
    reference = Reference(tiny_engine)
    seen = sum((at_random(tiny_engine, reference, seed) for seed in range(5)), Counter())
    assert min(seen[what] for what in ("running", "store", "resident", "cancelled", "length", "waited for a page")) > 0, seen
