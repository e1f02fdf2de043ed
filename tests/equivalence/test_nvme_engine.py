"""The tier on NVMe by the engine's own door: Engine(..., disk=...)."""

from qjax.config import CacheConfig, DiskConfig, EngineConfig
from qjax.engine import Engine
from tests.equivalence.nvme import SMALL, assert_restored
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt, random_model, tiny_config


def test_an_engine_with_a_directory_is_closed_and_started_again(tmp_path, compile_cache):
    """D7: the context manager, a close more than once, and the next turn after it."""

    def start():
        config = EngineConfig(grid=64, context_tokens=448, compile_cache=compile_cache)
        return Engine(random_model(tiny_config()), config, CacheConfig(), DiskConfig(**SMALL, disk_cache=str(tmp_path)))

    tokens = prompt(200)
    with start() as engine:
        _, generated, _ = answer(engine, tokens)
        engine.close()
    engine.close()
    following = followed(tokens, generated, prompt(20, seed=9))
    with start() as engine:
        assert_restored(engine, following, "spill", 204)
