"""A disk cache that a tiny engine left, and `qjax cache` over it."""

import json
from pathlib import Path

import numpy as np

from qjax.caches.lookup import Caches
from qjax.caches.nvme.disk import Nvme
from qjax.caches.nvme.filed import FiledAnchor
from qjax.caches.nvme.place import open_storage
from qjax.cli import main
from qjax.config import CacheConfig, DiskConfig
from qjax.engine import Engine
from qjax.pages import PagePool
from storage import Storage
from tests.models import prompt
from tests.runs import kept

GRID = 64
FIRST, SECOND = prompt(300), prompt(200, seed=4)
FIELDS = {"grid": str(GRID), "exactness": "token", "jax": "0.0"}
DAY = 86_400


def started(engine: Engine, directory: Path, **caches) -> None:
    """The engine with new caches over the directory; disk: settings of the tier."""
    disk = {"disk_cache": str(directory), "disk_free_gb": 0, "disk_min_tokens": 64, "spill_min_tokens": 128} | caches.pop("disk", {})
    config = DiskConfig(**disk)
    engine.pool = PagePool(engine.layout, engine.pool.pages)
    nvme = Nvme(engine.pool, open_storage(config, engine.identity, engine.golden), config, engine.level)
    engine.caches = Caches(engine.pool, CacheConfig(**caches), engine.level, engine.model.tokenizer.decode, nvme)


def stopped(engine: Engine) -> None:
    """A planned stop; the engine keeps nothing afterwards."""
    engine.close()
    engine.caches, engine.pool = None, PagePool(engine.layout, engine.pool.pages)


def ask(engine: Engine, tokens: np.ndarray, **more) -> tuple[str, dict]:
    """Where the state came from, and what is kept after an answer of 5 tokens."""
    run = engine.generate(tokens, max_tokens=5, **more)
    list(run)
    sequence = kept(engine.pool, run.sequence)
    engine.release(run.sequence)
    return engine.caches.ledger.records[-1].source if engine.caches else "", sequence


def write(engine: Engine, directory: Path) -> None:
    """Two conversations, of 304 and of 204 tokens, and their heads, one of which was read back once."""
    started(engine, directory)
    ask(engine, FIRST, user=250)
    engine.caches.nvme._writer.drain()
    engine.caches.clear()
    assert ask(engine, FIRST)[0] == "disk"
    ask(engine, SECOND)
    stopped(engine)


def make(directory: Path, *lengths: int) -> Path:
    """A directory of a head of each length, all of one chain, 16 bytes each over pages of 32."""
    keys = np.arange(max(lengths))
    with Storage.open(directory, FIELDS) as storage:
        for length in lengths:
            line = length - length % GRID
            pages = [f"p-{min(end, length):032}" for end in range(GRID, length + GRID, GRID)]
            for page in pages:
                storage.put(page, {"K": np.full(8, int(page[2:]), np.float32)}, rows=GRID)
            fields = FiledAnchor.fields("end", length, f"{line:032}", keys[line:length], pages, False, "disk")
            storage.put(f"a-{length:032}", {"section.S": np.zeros(4, np.float32)}, **fields)
    return directory


def snapshot(directory: Path) -> dict:
    """What a look at the directory must leave as it is."""
    found = {path: path.lstat() for path in (directory, *directory.rglob("*"))}
    return {path: (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_mode) for path, stat in found.items()}


def shown(capsys, *argv, status: int = 0) -> str:
    assert main(["cache", *map(str, argv)]) == status
    return capsys.readouterr().out


def as_json(capsys, *argv, status: int = 0) -> dict:
    (line,) = shown(capsys, *argv, "--json", status=status).splitlines()
    return json.loads(line)


def rows(capsys, directory: Path) -> dict[str, dict]:
    return {row["key"]: row for row in as_json(capsys, directory)["fingerprints"][0]["rows"]}


def key_of(capsys, directory: Path, what: str, tokens: int) -> str:
    """Of the first in the list that is it."""
    return next(row["key"] for row in rows(capsys, directory).values() if (row["what"], row["tokens"]) == (what, tokens))


def refused(capsys, *argv) -> str:
    """What is said in one line where the status is 2."""
    assert main(["cache", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qjax: error: ")
    assert err.count("\n") == 1
    return err
