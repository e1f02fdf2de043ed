"""One server for all clients: the embedded model, which follows scripts (server.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.live import Live, live

MODEL, CONTEXT = "embedded", 65536
"""opencode's prompts have 15,000 tokens of this model at the least, qwen-code's 35,000."""


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Collected where this directory is named, as `make test-clients` does; the clients are not there for the ordinary run."""
    named = [Path(word.partition("::")[0]).resolve() for word in config.args]
    here = Path(__file__).parent
    return None if any(path == here or here in path.parents for path in named) else True


@pytest.fixture(scope="package")
def server(tmp_path_factory, compile_cache) -> Iterator[Live]:
    flags = ["--context-tokens", str(CONTEXT), "--parallel", "2", "--compile-cache", str(compile_cache), "--disk-cache", "none"]
    with live(tmp_path_factory.mktemp("server"), *flags, program=["tests.clients.server"]) as server:
        yield server
