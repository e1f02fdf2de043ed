"""An engine whose steps are impure on purpose: they differ from a prefill by roundings, as where decode is another kernel."""

from contextlib import contextmanager

import jax.numpy as jnp
import numpy as np

from qjax.engine import Engine
from qjax.forward import Forward
from qjax.pages import PagePool


class ImpureForward:
    """A forward whose steps run with one embedding in four an ulp larger; its prefills are the engine's own."""

    def __init__(self, forward: Forward, params):
        embed = params["embed"]
        bits = jnp.asarray(embed).view(jnp.uint16)
        bumped = (bits + (np.arange(bits.size).reshape(bits.shape) % 4 == 0).astype(np.uint16)).view(embed.dtype)
        self._prefills, self._steps = forward, Forward(forward.programs, params | {"embed": bumped})

    def __getattr__(self, name):
        return getattr(self._prefills, name)

    def step(self, *arguments):
        return self._steps.step(*arguments)


@contextmanager
def impure_steps(engine: Engine, level: str):
    """The engine with impure steps, told that it has this level, on a new pool."""
    before = engine.forward, engine.pool, engine.level, engine.caches
    engine.forward, engine.pool, engine.level, engine.caches = (
        ImpureForward(engine.forward, engine.model.params),
        PagePool(engine.layout, engine.pool.pages),
        level,
        None,
    )
    try:
        yield engine
    finally:
        engine.forward, engine.pool, engine.level, engine.caches = before
