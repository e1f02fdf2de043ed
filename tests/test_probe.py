"""The probe: what differs is found, also where the last logits do not show it; and a backend that differs from itself is refused.

The golden digest: the same for the same weights in every engine of them, another for one bit of one weight.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.config import GRID, TOKEN, EngineConfig
from qjax.engine import Engine
from qjax.forward import Forward
from qjax.pages import PagePool
from qjax.probe import Impure, golden, probe
from tests.impure import impure_steps
from tests.models import random_model, tiny_config


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
    assert probe(Spoilt(tiny_engine.forward, lambda steps, freezes: False), pool).level == TOKEN
    assert probe(Spoilt(tiny_engine.forward, lambda steps, freezes: steps > 0), pool).level == GRID
    assert pool.free == pool.pages


def test_two_prefills_that_differ_are_refused(tiny_engine):
    pool = PagePool(tiny_engine.layout, tiny_engine.pool.pages)
    with pytest.raises(Impure, match="the same prefill twice has different bits"):
        probe(Spoilt(tiny_engine.forward, lambda steps, freezes: freezes == 1), pool)
    assert pool.free == pool.pages


@pytest.mark.parametrize("exactness", ["auto", "grid"])
def test_golden_is_the_same_in_another_engine(tiny_engine, compile_cache, exactness):
    """With the probe, and without it where the level is given."""
    config = EngineConfig(grid=64, context_tokens=448, compile_cache=compile_cache, exactness=exactness)
    other = Engine(random_model(tiny_config()), config)
    assert len(other.golden) == 32
    assert other.golden == tiny_engine.golden
    assert other.pool.free == other.pool.pages


def changed(params, *path):
    """The weights with one bit of one of them changed: the first of its mantissa, of the first of the leaf."""
    leaf = np.array(params[path[0]] if len(path) == 1 else params[path[0]][path[1]])
    leaf.reshape(-1).view(f"uint{8 * leaf.itemsize}")[0] ^= 1 << (6 if leaf.itemsize == 2 else 22)
    return params | {path[0]: jax.device_put(leaf) if len(path) == 1 else params[path[0]] | {path[1]: jax.device_put(leaf)}}


@pytest.mark.parametrize("path", [("norm",), ("head",), ("gdn", "A_log"), ("gdn", "inputs"), ("attention", "k_norm"), ("attention", "down")])
def test_golden_of_one_weight_changed_is_another(tiny_engine, path):
    pool = PagePool(tiny_engine.layout, tiny_engine.pool.pages)
    found = golden(Forward(tiny_engine.programs, changed(tiny_engine.model.params, *path)), pool)
    assert found != tiny_engine.golden
    assert golden(Forward(tiny_engine.programs, tiny_engine.model.params), pool) == tiny_engine.golden  # control
    assert pool.free == pool.pages


def test_golden_has_the_steps_and_what_they_leave(tiny_engine):
    """Also where the prefill is the same, and where no logits show it."""
    with impure_steps(tiny_engine, GRID) as engine:
        assert golden(engine.forward, engine.pool) == probe(engine.forward, engine.pool).golden != tiny_engine.golden
    pool = PagePool(tiny_engine.layout, tiny_engine.pool.pages)
    assert golden(Spoilt(tiny_engine.forward, lambda steps, freezes: steps > 0), pool) != tiny_engine.golden
    assert golden(Spoilt(tiny_engine.forward, lambda steps, freezes: False), pool) == tiny_engine.golden  # control
