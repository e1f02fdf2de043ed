"""Conversations that clients name: one that waits for a sub-agent stays, though others are likelier to be gone on with."""

import pytest

from qjax.config import CacheConfig
from tests.bits import assert_bits_equal
from tests.equivalence.test_resident import answer, cold, followed
from tests.models import prompt


@pytest.fixture
def caches(tiny_engine):
    tiny_engine.caches = tiny_engine.new_caches(CacheConfig(cache_budget_gb=0))
    yield tiny_engine.caches
    tiny_engine.caches.clear()
    tiny_engine.caches = None


def conversation(engine, **child) -> int:
    """Tokens that a conversation finds of itself after five sub-agents, whose rows fill the pool (16 pages of 64), have had two turns each."""
    tokens = prompt(250)
    _, generated, _ = answer(engine, tokens, session="main", max_tokens=2)
    for seed in range(1, 6):
        theirs = prompt(250, seed=seed)
        _, said, _ = answer(engine, theirs, session=f"child-{seed}", max_tokens=2, **child)
        answer(engine, followed(theirs, said, prompt(3)), session=f"child-{seed}", max_tokens=2, **child)
    after = followed(tokens, generated, prompt(5))
    _, *warm = answer(engine, after, session="main", max_tokens=2)
    expected = cold(engine, after, max_tokens=2)
    assert warm[0] == expected[0]
    assert_bits_equal(warm[1], expected[1])
    return engine.caches.ledger.records[-1].start


def test_a_conversation_that_waits_for_its_sub_agents_stays(tiny_engine, caches):
    assert conversation(tiny_engine, parent="main") == 251
    record = caches.ledger.records[-1]
    assert (record.session, record.source) == ("main", "parked")


def test_the_control_without_a_parent_loses_it(tiny_engine, caches):
    assert conversation(tiny_engine) < 251


def test_another_tenants_request_keeps_nothing(tiny_engine, caches):
    """The name alone is no proof."""
    assert conversation(tiny_engine, tenant="other", parent="main") < 251


def test_it_waits_no_longer_when_it_has_gone_on_itself(tiny_engine, caches):
    answer(tiny_engine, prompt(70, seed=9), session="child", parent="main", max_tokens=2)
    assert caches.resident._is_awaited(type("S", (), {"tenant": "", "owner": "main"}))
    answer(tiny_engine, prompt(250), session="main", max_tokens=2)
    assert not caches.resident._is_awaited(caches.resident.resident)


def test_names_without_end_are_forgotten(tiny_engine, caches):
    for number in range(40):
        answer(tiny_engine, prompt(70, seed=9), session="child", parent=f"main-{number}", max_tokens=1)
    assert len(caches.resident._awaited) == 16
