"""Both exactness levels, for tests of the tiers."""

import pytest

from qjax.config import GRID, TOKEN


@pytest.fixture(params=[TOKEN, GRID])
def level(request, tiny_engine, engine_256, monkeypatch) -> str:
    """The engines of random weights at each level. This machine is pure, so at level grid too all bits must be a cold run's."""
    for engine in (tiny_engine, engine_256):
        monkeypatch.setattr(engine, "level", request.param)
    return request.param
