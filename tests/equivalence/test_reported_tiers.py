"""Faults that users of other engines reported, over every tier in memory: each is hit, and every bit is a cold run's."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from qjax.caches.session import ROLES
from qjax.config import GRID, TOKEN
from qjax.ledger import SOURCES
from tests.bits import assert_bits_equal
from tests.equivalence.test_reported import joined
from tests.equivalence.test_resident import answer, cached, cold, followed
from tests.models import prompt

PAGE, ANSWER = 256, 5
NEW = prompt(20, seed=9)
IN_MEMORY = set(SOURCES) - {"cold", "running", "response", "disk", "spill"}  # test_parallel_caches.py, test_response.py, test_disk.py, test_spill.py
NO_PARK = {"resident_park_gb": 0, "resident_pin_gb": 0}


def said(engine, tokens) -> np.ndarray:
    """What a request of these tokens leaves: they and their answer, as far as it was forwarded."""
    return followed(tokens, answer(engine, tokens, ANSWER)[1], NEW[:0])


def same_prompt(engine, length: int) -> np.ndarray:
    tokens = prompt(length)
    answer(engine, tokens)
    return tokens


def next_turn(engine, length: int) -> np.ndarray:
    return joined(said(engine, prompt(length - ANSWER + 1)), NEW)


def edited(engine, length: int) -> np.ndarray:
    answer(engine, prompt(length + 200))  # the block that it ends in lies further on
    return joined(prompt(length), (prompt(length + 20)[length:] + 1) % 1000)


def after_another(engine, length: int) -> np.ndarray:
    tokens = next_turn(engine, length)
    answer(engine, prompt(length // 4 + 10, seed=5))  # not so short that it would be a guest
    return tokens


def as_a_guest(engine, length: int) -> np.ndarray:
    answer(engine, prompt(4 * length + 1, seed=5))
    return next_turn(engine, length)


TIERS: dict[str, tuple[Callable, dict]] = {
    "prompt": (same_prompt, {}),
    "end": (next_turn, {}),
    "resident": (edited, {}),
    "guest": (as_a_guest, {}),
    "parked": (after_another, {}),
    "pinned": (after_another, {"resident_park_gb": 0}),
    "store": (after_another, NO_PARK),
}
"""How a request is brought to find a state of a length there: what runs before it, and the budgets."""
LENGTHS = [*(g * PAGE + n for g in (1, 2) for n in (0, 1, 2, 63, 64, 65)), 2 * PAGE - 1, 3 * PAGE - 1]
LENGTH = {tier: 200 if tier == "guest" else 300 for tier in TIERS}
CASES = [(tier, n) for tier in TIERS for n in (LENGTHS if tier != "guest" else (63, 64, 65, 127, 128, 129, PAGE - 1))]


def first_logits(engine, tokens, cached: bool) -> np.ndarray:
    """The logits that the first token is drawn from. A request that leaves nothing."""
    request = engine.caches.begin(tokens) if cached else None
    done = engine.run_prompt(tokens, request=request)
    done.slot.close()
    if request:
        request.fail()
    return done.logits


@pytest.fixture(params=[TOKEN, GRID])
def level(request, engine_256):
    """This machine is pure: at level grid too all bits must be a cold run's, where a session goes on at the end of an answer."""
    engine_256.level = request.param
    yield request.param
    engine_256.level = TOKEN


@pytest.mark.parametrize(("tier", "length"), CASES)
def test_a1_a12_every_tier_at_the_lines(engine_256, level, tier, length):
    """A1: brought back, asked, asked again. A12: at a line, a block and next to them, the first logits too, and they are numbers."""
    before, budgets = TIERS[tier]
    with cached(engine_256, **budgets):
        tokens = before(engine_256, length)
        expected, logits = cold(engine_256, tokens), first_logits(engine_256, tokens, cached=False)
        assert np.isfinite(logits).all()
        record, *found = answer(engine_256, tokens)
        assert (record.source, record.start) == (tier, length // PAGE * PAGE if tier == "resident" else length)
        assert found[0] == expected[0]
        assert_bits_equal(found[1], expected[1])
        assert_bits_equal(first_logits(engine_256, tokens, cached=True), logits)
        record, *found = answer(engine_256, tokens)
        assert record.start == tokens.size
        assert found[0] == expected[0]
        assert_bits_equal(found[1], expected[1])


@pytest.mark.parametrize("tier", TIERS)
def test_control_a_damaged_hit_shows(engine_256, tier, monkeypatch):
    """Of what the tier gives back one section is zeroed."""
    before, budgets = TIERS[tier]
    with cached(engine_256, **budgets) as caches:
        tokens, take = before(engine_256, LENGTH[tier]), caches.take

        def damaged(hit):
            assert hit.source == tier
            found = take(hit)
            sections = found.sequence.sections | {"gdn.S": jnp.zeros_like(found.sequence.sections["gdn.S"])}
            return replace(found, sequence=found.sequence.replace(sections=sections))

        monkeypatch.setattr(caches, "take", damaged)
        _, _, state = answer(engine_256, tokens)
        with pytest.raises(AssertionError, match="differ"):
            assert_bits_equal(state, cold(engine_256, tokens)[1])


def test_b9_every_tier_is_written_and_hit(engine_256):
    """B9: with one set of caches over all; a source that the ledger knows and nothing here reaches is a fault."""
    for tier, (before, budgets) in TIERS.items():
        with cached(engine_256, **budgets) as caches:
            tokens = before(engine_256, LENGTH[tier])
            stats, kinds = caches.stats(), Counter()
            for record in caches.ledger.records:
                kinds.update(record.anchors_taken)
            sessions = {role: stats["resident"][f"{role}_sessions"] for role in ROLES}
            written = kinds | sessions | {"resident": kinds["grid"], "store": stats["store"]["session_entries"]}
            answer(engine_256, tokens)
            totals = caches.ledger.totals()["by_source"]
            assert written[tier] >= 1 <= totals[tier]
            assert tier != "store" or caches.stats()["store"]["hits"] == 1
    assert set(TIERS) == IN_MEMORY


@pytest.mark.parametrize("tier", TIERS)
def test_f5_keys_that_a_weak_hash_takes_for_equal(engine_256, tier):
    """F5: the same tokens in another order, of the same length, sum and ends: compared one by one, they part where they part."""
    before, budgets = TIERS[tier]
    with cached(engine_256, **budgets):
        tokens = before(engine_256, LENGTH[tier])
        forged = tokens.copy()
        forged[[90, 100]] = forged[[100, 90]]
        assert (forged.sum(), np.bitwise_xor.reduce(forged), forged.size) == (tokens.sum(), np.bitwise_xor.reduce(tokens), tokens.size)
        record, *found = answer(engine_256, forged)
        assert record.start <= 90
        expected = cold(engine_256, forged)
        assert found[0] == expected[0]
        assert_bits_equal(found[1], expected[1])
        with pytest.raises(AssertionError, match="differ"):
            assert_bits_equal(found[1]["sections"], cold(engine_256, tokens)[1]["sections"])
        assert answer(engine_256, tokens)[0].start >= 256 - 56 * (tier == "guest")  # control: the tokens themselves are a hit


def test_h1_two_hundred_prompts(embedded_engine):
    """H1: twenty prompts over each of ten heads, cold and from what is kept: no token differs, and all but each head's first are hits."""
    engine = embedded_engine
    with cached(engine) as caches:
        for number in range(200):
            head, tail = divmod(number, 20)
            tokens = joined(prompt(128 + 13 * head, seed=head), prompt(9 + 3 * tail, seed=100 + tail))
            record, generated, _ = answer(engine, tokens, 8)
            assert generated == cold(engine, tokens, 8)[0]
            assert (record.start >= 128) == (tail > 0)
        assert caches.ledger.totals()["by_source"]["cold"] == 10
