"""The chain: one hash for every line, of a tenant and of all ids up to there."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.caches.nvme.chain import Chain, at_end
from tests.models import prompt


def chain(length, tenant="", seed=0, grid=64) -> Chain:
    return Chain(prompt(length, seed).astype(np.int64), tenant, grid)


def test_a_line_is_the_hash_of_the_line_below_and_the_ids_between():
    """The format of the keys of files: a change of it makes every file that there is unfindable."""
    keys = prompt(130).astype(np.int64)
    expected = hashlib.blake2b("qjax\0ü".encode(), digest_size=16).digest()
    lines = [expected.hex()]
    for first in (0, 64):
        expected = hashlib.blake2b(expected + keys[first : first + 64].astype("<i8").tobytes(), digest_size=16).digest()
        lines.append(expected.hex())
    of = Chain(keys, "ü", 64)
    assert of.lines() == lines
    assert of.at(130) == hashlib.blake2b(expected + keys[128:].astype("<i8").tobytes(), digest_size=16).hexdigest() == at_end(lines[2], keys[128:])
    assert [of.page(0, 130), of.page(64, 130), of.page(128, 130)] == [f"p-{name}" for name in (*lines[1:], of.at(130))]
    assert of.has((of.page(0, 130), of.page(64, 130)))
    assert not of.has((of.page(64, 130),))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=200), st.integers(0, 199), st.text(), st.text())
def test_equal_hashes_are_of_equal_ids_and_tenants(ids, at, one, other):
    keys = np.array(ids, np.int64)
    lines = Chain(keys, one, 32).lines()
    assert lines == Chain(np.append(keys, 7), one, 32).lines()[: len(lines)]
    if other != one:
        assert not set(lines) & set(Chain(keys, other, 32).lines())
    changed, at = keys.copy(), at % keys.size
    changed[at] ^= 1
    differs = [a != b for a, b in zip(lines, Chain(changed, one, 32).lines(), strict=True)]
    assert differs == [number * 32 > at for number in range(len(lines))]
    assert Chain(changed, one, 32).at(keys.size) != Chain(keys, one, 32).at(keys.size)


def test_ids_past_a_line_are_compared_and_not_hashed():
    of = chain(200)
    assert of.agrees(2, of.keys[128:150]) == 150
    other = of.keys[128:150].copy()
    other[5] += 2**32  # the same token, another key id
    assert of.agrees(2, other) == 133
    assert of.agrees(3, of.keys[:0]) == 192


def test_lines_are_made_once_as_far_as_they_are_asked_for(monkeypatch):
    of, made = chain(640), []
    real = hashlib.blake2b
    monkeypatch.setattr(hashlib, "blake2b", lambda *a, **b: made.append(1) or real(*a, **b))
    assert of.line(2) == of.lines()[2]
    assert len(made) == 10
    of.at(640), of.lines(), of.line(10)
    assert len(made) == 10


@pytest.mark.parametrize("tenant", ["", "\ud800", "qjax\0", "a" * 1000])
def test_any_text_is_a_tenant(tenant):
    assert chain(64, tenant).line(1) != chain(64, tenant + "x").line(1)
