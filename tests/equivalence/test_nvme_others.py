"""Files of other engines on NVMe: other weights, another grid, level or version, other bits. None of them is served, and what differs is said."""

from dataclasses import replace

import jax
import numpy as np

from qjax.caches.nvme.place import open_storage
from qjax.config import GRID, CacheConfig, DiskConfig, EngineConfig
from qjax.engine import Engine
from tests.equivalence import nvme as helpers
from tests.equivalence.nvme import SMALL, started
from tests.equivalence.nvme_damage import assert_cold, files, there, warnings
from tests.equivalence.test_nvme_faults import HEAD, NOTHING_WRITTEN
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt, random_model, tiny_config


def small(compile_cache) -> EngineConfig:
    return EngineConfig(grid=64, context_tokens=448, compile_cache=compile_cache)


def test_e1_another_engine_of_the_same_name(tiny_engine, compile_cache, tmp_path, caplog, monkeypatch):
    """E1, through the door: the same engine again is served (the control); one with a weight's byte changed finds nothing, and says why."""
    monkeypatch.setattr("qjax.identity.source", lambda packages: "the same")  # somebody may write in the tree meanwhile
    disk = DiskConfig(disk_cache=str(tmp_path / "states"), **SMALL)

    def engine(model=tiny_engine.model, **changes) -> Engine:
        return Engine(model, replace(small(compile_cache), **changes), CacheConfig(), disk)

    with engine() as one:
        _, generated, _ = answer(one, HEAD, user=HEAD.size)
    turn = followed(HEAD, generated, prompt(20, seed=9))
    with engine() as same:
        same.caches.nvme.rates.pays = lambda *_: True
        record = assert_cold(same, turn)
        assert (record.source, record.start, same.caches.nvme.stats()["storage_swept"], warnings(caplog)) == ("spill", 304, [], [])
    model = random_model(tiny_config())
    leaves, tree = jax.tree.flatten(model.params)
    changed = np.array(leaves[0])
    changed.reshape(-1).view(np.uint8)[0] ^= 1
    other = replace(model, params=jax.tree.unflatten(tree, [jax.numpy.asarray(changed), *leaves[1:]]))
    with engine(other) as another:
        (swept,) = another.caches.nvme.stats()["storage_swept"]
        assert list(swept) == ["weights"]
        assert "written under another fingerprint: weights was " in warnings(caplog)[-1]
        assert another.caches.nvme.stats()["anchors"] == 0
        assert assert_cold(another, turn).source == "cold"
    with engine(other, exactness=GRID) as level:
        (swept,) = level.caches.nvme.stats()["storage_swept"]
        assert swept == {"exactness": ("token", "grid")}
        assert assert_cold(level, turn).source == "cold"


def test_e2_what_differs_is_named(tiny_engine, engine_256, embedded_engine, directory, caplog):
    """E2: the grid, the model, the level, a row's type, a version: each sweeps the directory, with the field in the stats and in the log."""
    config, identity = DiskConfig(disk_cache=str(directory), **SMALL), tiny_engine.identity
    others = [engine_256.identity, embedded_engine.identity]
    others += [identity | change for change in ({"exactness": "grid"}, {"view K": "float32 [2, 2, 32]"}, {"jax": "0.9"}, {"tokenizer": "x"})]
    named = [{"grid"}, {"grid", "model.layers"}, {"exactness"}, {"view K"}, {"jax"}, {"tokenizer"}]
    for other, names in zip(others, named, strict=True):
        with open_storage(config, identity, "golden") as mine:
            mine.put("a-one", {"x": np.zeros(3)})
        with open_storage(config, identity, "golden") as mine:
            assert "a-one" in mine.entries()  # the control
        caplog.clear()
        with open_storage(config, other, "golden") as storage:
            (swept,) = storage.stats()["swept"]
            assert set(storage.entries()) == {"golden"}
        assert names <= set(swept)
        assert all(f"{name} was {identity[name]}, is {other[name]}" in caplog.text for name in names)


def test_bits_that_are_others_than_the_files(tiny_engine, kept, directory, caplog, monkeypatch):
    """The same fingerprint and another golden digest: all goes, it is said, and the answers are cold runs'. A second engine empties nothing."""
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        first, pool, before = tiny_engine.caches, tiny_engine.pool, files(directory)
        monkeypatch.setattr(helpers, "open_storage", lambda config, identity, _: open_storage(config, identity, "other"))
        with started(tiny_engine, directory):
            assert "(golden digest golden, here other)" in warnings(caplog)[-1]
            assert assert_cold(tiny_engine, kept[1]).source == "cold"
        assert files(directory) == before
        tiny_engine.caches, tiny_engine.pool = first, pool
    caplog.clear()
    with started(tiny_engine, directory) as caches:
        (line,) = warnings(caplog)
        assert "(golden digest golden, here other)" in line
        assert there(directory) == {"golden"}
        assert caches.nvme.stats()["anchors"] == 0
        assert assert_cold(tiny_engine, kept[1]).source == "cold"
    with started(tiny_engine, directory):
        assert assert_cold(tiny_engine, kept[1]).source == "spill"
    assert len(warnings(caplog)) == 1
