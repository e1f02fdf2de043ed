"""A file system on which one of two conversations has room: what is durable stays until its successor is sure to fit."""

import re

from tests.storage.children import run_with_mounts

SMALL = """
import logging, subprocess, sys
from pathlib import Path
from qjax.config import EngineConfig
from qjax.engine import Engine
from tests.equivalence.nvme import on_disk, recount, started
from tests.equivalence.nvme_damage import assert_cold
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt, random_model, tiny_config

directory, said = Path(sys.argv[1]), []
class Told(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger().addHandler(Told(logging.WARNING))
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[3]}k", "tmpfs", directory], check=True)
engine = Engine(random_model(tiny_config()), EngineConfig(grid=64, context_tokens=448, compile_cache=Path(sys.argv[2])))
turns, heads = {}, {} if sys.argv[5] == "heads" else {"disk_gb": 0}
def run(seed, length):
    with started(engine, directory, caches={"cache_budget_gb": 0}, **heads) as caches:
        _, turns[seed], _ = answer(engine, prompt(length, seed=seed), user=length)
        caches.nvme.drain()
        recount(caches, directory)
def whole(seed, length):
    with started(engine, directory, caches={"cache_budget_gb": 0}, session_spill=False, disk_min_tokens=10**6) as caches:
        caches.nvme.storage.touch = lambda *_: None
        record = assert_cold(engine, followed(prompt(length, seed=seed), turns[seed], prompt(9, seed=9)))
        recount(caches, directory)
        return record.start > length
sequence = eval(sys.argv[4])
for seed, length in sequence:
    run(seed, length)
    print(seed, [one for one, size in sorted(set(sequence)) if one in turns and whole(one, size)], sum(on_disk(directory).values()) // 1024)
print("said", *said, sep="\\n")
"""


def told(compile_cache, tmp_path, size: int, sequence, heads: bool) -> tuple[list[str], list[str]]:
    (tmp_path / "small").mkdir()
    out = run_with_mounts(SMALL, tmp_path / "small", compile_cache, size, repr(sequence), "heads" if heads else "none")
    rows, _, said = out.partition("said\n")
    return rows.splitlines(), said.splitlines()


def test_one_after_the_other(compile_cache, tmp_path):
    """Each fits alone, with its heads, and both do not: the last one is there whole, at every time. Of the other, which a start has read
    back and which gave way to new heads, a stop may say that it has no room.
    """
    rows, said = told(compile_cache, tmp_path, 1350, [(1, 200), (2, 330), (2, 330), (1, 200), (2, 330), (1, 200)], heads=True)
    assert [row.rsplit(" ", 1)[0] for row in rows] == ["1 [1]", "2 [2]", "2 [2]", "1 [1]", "2 [2]", "1 [1]"]
    assert all(re.match(r"a conversation of (204|334) tokens is not written: it needs .* could make way", line) for line in said), said


def test_one_that_never_fits(compile_cache, tmp_path):
    """Nothing makes way for it, and one line a start says what it needs and what there is."""
    rows, said = told(compile_cache, tmp_path, 1000, [(1, 100), (2, 420), (2, 420), (1, 100)], heads=False)
    assert [row.rsplit(" ", 1)[0] for row in rows] == ["1 [1]", "2 [1]", "2 [1]", "1 [1]"]
    assert len({row.rsplit(" ", 1)[1] for row in rows[:3]}) == 1
    size = r"\d\.\d MiB"
    wanted = rf"a conversation of 424 tokens is not written: it needs {size} more, {size} are free, {size} could make way, and 0.0 MiB are left to .*"
    assert [bool(re.fullmatch(wanted, line)) for line in said] == [True, True], said
