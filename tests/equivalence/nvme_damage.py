"""What happens to files on NVMe, and what a restart must then show: the answer of a cold run, and nothing left of what was damaged."""

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np

from qjax.caches.nvme.chain import Chain
from qjax.engine import Engine
from storage.arrays import Leaf
from storage.entry import Entry, seal, unseal
from tests.bits import assert_bits_equal
from tests.equivalence.nvme import started
from tests.equivalence.test_resident import answer, cold, followed
from tests.models import prompt

GRID = 64
_cold: dict[bytes, tuple] = {}


def keep(engine: Engine, directory: Path) -> tuple[Path, np.ndarray]:
    """A directory with heads of a prompt and the conversation that it began; and that one's next turn."""
    tokens = prompt(300)
    with started(engine, directory):
        _, generated, _ = answer(engine, tokens, user=tokens.size)
    return directory, followed(tokens, generated, prompt(20, seed=9))


def write_heads(engine: Engine, directory: Path, *prompts: np.ndarray) -> Path:
    """A directory with the heads of some prompts, at the last four lines of each."""
    with started(engine, directory, session_spill=False):
        for tokens in prompts:
            answer(engine, tokens, user=tokens.size)
    return directory


def write_conversation(engine: Engine, directory: Path, tokens: np.ndarray) -> tuple[Path, np.ndarray]:
    """A directory with the conversation that a prompt began and no heads; and that one's next turn."""
    with started(engine, directory, disk_gb=0):
        _, generated, _ = answer(engine, tokens)
    return directory, followed(tokens, generated, prompt(20, seed=9))


def entry(directory: Path, key: str) -> Path:
    (found,) = directory.glob(f"*/{key}")
    return found


def keys(directory: Path, prefix: str = "") -> set[str]:
    """Of the entries whose `meta` is there."""
    return {meta.parent.name for meta in directory.glob(f"*/{prefix}*/meta")}


def there(directory: Path) -> set[str]:
    """Of all that is left of entries, finished or not."""
    return {path.name for path in directory.glob("*/*") if path.is_dir()}


def files(directory: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all there is."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*")}


def leaves(directory: Path, key: str) -> list[str]:
    return sorted(path.name for path in entry(directory, key).iterdir() if path.is_dir())


def file(directory: Path, key: str, name: str) -> Path:
    """The file of an array, or `meta`."""
    if name == "meta":
        return entry(directory, key) / name
    (found,) = (entry(directory, key) / name).iterdir()
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "first bit": lambda path: flip(path, 0),
    "last byte": lambda path: flip(path, -1),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "zero length": lambda path: os.truncate(path, 0),
    "gone": lambda path: shutil.rmtree(path.parent),
}
"""Of the file of an array, or of its directory."""


def read(directory: Path, key: str) -> Entry:
    return unseal(key, file(directory, key, "meta").read_bytes())


def write(directory: Path, key: str, **changes) -> None:
    """Another `meta` with a right sum. changes: of the Entry; `fields` to those that are there."""
    was = read(directory, key)
    changes["fields"] = {**was.fields, **changes.get("fields", {})}
    file(directory, key, "meta").write_bytes(seal(dataclasses.replace(was, **changes)))


def write_array(directory: Path, key: str, name: str, array: np.ndarray) -> None:
    """Another array in the place of one, and a `meta` that has its sum."""
    file(directory, key, name).write_bytes(array.tobytes())
    write(directory, key, leaves={**read(directory, key).leaves, name: Leaf.of(array)})


def line_keys(tokens, tenant: str = "") -> tuple[list[str], list[str]]:
    """Keys of the pages and of the anchors at the lines of a prompt; the first is no line's."""
    lines = Chain(np.asarray(tokens, np.int64), tenant, GRID).lines()
    return [f"p-{line}" for line in lines], [f"a-{line}" for line in lines]


def assert_cold(engine, tokens, **more):
    """Runs a prompt through the caches; every bit is a cold run's. Its record."""
    record, *warm = answer(engine, tokens, **more)
    name = np.asarray(tokens, np.int32).tobytes() + repr((id(engine), sorted(more))).encode()
    if name not in _cold:
        _cold[name] = cold(engine, tokens, more.get("max_tokens", 5))
    assert warm[0] == _cold[name][0]
    assert_bits_equal(warm[1], _cold[name][1])
    return record


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]
