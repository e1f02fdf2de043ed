"""The probe: what differs is found, also where the last logits do not show it; and a backend that differs from itself is refused."""

import jax.numpy as jnp
import pytest

from qjax.config import GRID, TOKEN
from qjax.pages import PagePool
from qjax.probe import Impure, probe


class Spoilt:
    """A forward whose frozen states differ in one bit of one leaf, where `when` says so of the number of steps and of freezes until then."""

    def __init__(self, forward, when):
        self._forward, self._when, self.steps, self.freezes = forward, when, 0, 0

    def __getattr__(self, name):
        return getattr(self._forward, name)

    def step(self, *arguments):
        self.steps += 1
        return self._forward.step(*arguments)

    def freeze(self, *arguments):
        sections, opened = self._forward.freeze(*arguments)
        if self._when(self.steps, self.freezes):
            sections = sections | {"gdn.conv": jnp.asarray(sections["gdn.conv"]).at[(0,) * sections["gdn.conv"].ndim].add(1)}
        self.freezes += 1
        return sections, opened


def test_a_state_that_steps_leave_is_compared_whole(tiny_engine):
    """Its logits are a prefill's; what a later token would read is not."""
    pool = PagePool(tiny_engine.layout, tiny_engine.pool.pages)
    assert probe(Spoilt(tiny_engine.forward, lambda steps, freezes: False), pool) == TOKEN
    assert probe(Spoilt(tiny_engine.forward, lambda steps, freezes: steps > 0), pool) == GRID
    assert pool.free == pool.pages


def test_two_prefills_that_differ_are_refused(tiny_engine):
    pool = PagePool(tiny_engine.layout, tiny_engine.pool.pages)
    with pytest.raises(Impure, match="the same prefill twice has different bits"):
        probe(Spoilt(tiny_engine.forward, lambda steps, freezes: freezes == 1), pool)
    assert pool.free == pool.pages
