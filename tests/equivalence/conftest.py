"""For tests of the tiers: both exactness levels, and a directory that costs nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qjax.config import GRID, TOKEN
from tests.equivalence.nvme_damage import keep


@pytest.fixture(params=[TOKEN, GRID])
def level(request, tiny_engine, engine_256, monkeypatch) -> str:
    """The engines of random weights at each level. This machine is pure, so at level grid too all bits must be a cold run's."""
    for engine in (tiny_engine, engine_256):
        monkeypatch.setattr(engine, "level", request.param)
    return request.param


@pytest.fixture
def memory_path(tmp_path) -> Iterator[Path]:
    """A directory in memory, where there is one: on a disk that syncs a write takes ten times as long."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def kept(tiny_engine, tmp_path_factory) -> tuple[Path, np.ndarray]:
    """A directory with heads and a conversation, and that one's next turn."""
    return keep(tiny_engine, tmp_path_factory.mktemp("kept"))


@pytest.fixture
def directory(kept, tmp_path) -> Path:
    """A copy of it for one test."""
    return shutil.copytree(kept[0], tmp_path / "states")
