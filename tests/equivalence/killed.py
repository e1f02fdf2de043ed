"""kill -9 of engines that write to NVMe, at random moments: python -m tests.equivalence.killed [KILLS] says what came of it.

After each kill another engine opens the directory. What was acknowledged must be served, and what is served must have a cold run's bits.
"""

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import jax
import numpy as np

from qjax.caches.nvme.chain import Chain
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.ledger import Record
from tests.equivalence.nvme import DISK, started
from tests.equivalence.nvme_children import CACHES, CONVERSATIONS, LONGEST, next_turn, opening
from tests.equivalence.nvme_damage import assert_cold
from tests.equivalence.test_resident import cold
from tests.models import prompt, random_model, tiny_config

LATEST = 0.8
"""Seconds from a child's first request to its end: some 15 requests, and the planned stops between them."""
SERVED, AGAIN = 4, 20
"""Heads that are asked for after each kill, of all that were acknowledged; entries that are read again, beside the new ones."""
ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("wrong", "lost", "damaged")


class Children:
    """Two of them: one makes its engine while the other is killed and looked after."""

    def __init__(self, engine: Engine, cache: Path, directory: Path, seed: int):
        self._directory, self._rng, self._said = directory, random.Random(seed), defaultdict(list)
        self._seed = seed * 10_000
        model = directory.with_name("model")
        model.write_bytes(pickle.dumps((engine.model.name, engine.model.config, jax.tree.map(np.asarray, engine.model.params))))
        command = [sys.executable, "-m", "tests.equivalence.nvme_children", str(model), str(cache)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._next = [self._start(), self._start()]

    def _tell(self, *words) -> None:
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def _hear(self, word: str, process: str | None = None) -> str:
        """Reads until a process says a word; the process."""
        for line in self._process.stdout:
            who, said, *rest = line.split()
            self._said[who].append((said, rest))
            assert said != "failed", f"process {who} broke off"
            if said == word and process in (None, who):
                return who
        raise AssertionError(f"the children's process ended before one said {word!r}")

    def _start(self) -> str:
        """A child; two and two have a world, so that one finds what the other wrote."""
        self._seed += 1
        self._tell("start", self._directory, self._seed, self._seed // 2)
        return self._hear("born")

    def kill_one(self) -> tuple[int, list[tuple[str, list[str]]]]:
        """A child's world, and what it said before it was killed."""
        child, world = self._next.pop(0), (self._seed - 1) // 2
        go = Path(f"{self._directory}.{child}")
        go.touch()
        if ("open", []) not in self._said[child]:
            self._hear("open", child)
        time.sleep(self._rng.uniform(0, LATEST))
        os.kill(int(child), signal.SIGKILL)
        self._tell("reap", child)
        self._hear("ended", child)
        go.unlink()
        assert self._said[child][-1] == ("ended", [str(int(signal.SIGKILL))])
        self._next.append(self._start())
        return world, self._said.pop(child)

    def close(self) -> None:
        for child in self._next:
            os.kill(int(child), signal.SIGKILL)
            self._tell("reap", child)
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Survey:
    """What must be there, over all kills, and what is. counts: kills, requests, and what is wrong."""

    def __init__(self, engine: Engine, directory: Path, seed: int = 0):
        self._engine, self._directory, self._rng = engine, directory, random.Random(seed)
        self._turns: dict[tuple[int, int, int], np.ndarray] = {}
        self._heads: dict[str, np.ndarray] = {}  # the chain's hash at a line -> the prompt up to it
        self._read: set[str] = set()
        self.acknowledged: dict[str, str] = {}  # key -> line
        self.spilled: tuple[int, int, int] | None = None
        self.counts: Counter[str] = Counter()
        self.opened: list[tuple[int, float]] = []  # entries, and seconds to open the directory and to fill the index

    def turn(self, world: int, conversation: int, number: int) -> np.ndarray:
        """The prompt of a turn, as it follows from cold answers."""
        if (found := self._turns.get((world, conversation, number))) is None:
            if number == 0:
                found = opening(world, conversation)
            else:
                before = self.turn(world, conversation, number - 1)
                found = next_turn(before, cold(self._engine, before)[0], number - 1)
            self._turns[world, conversation, number] = found
            self._heads |= {line: found[: 64 * number] for number, line in enumerate(Chain(found.astype(np.int64), "", 64).lines())}
        return found

    def _look_up(self, world: int, line: str) -> None:
        """Goes on with the conversations of a world until one has a line."""
        longest = dict.fromkeys(range(CONVERSATIONS), 0)
        while line not in self._heads:
            assert longest, f"{line} is no line of this world"
            for conversation, number in list(longest.items()):
                longest[conversation] += 1
                if self.turn(world, conversation, number).size > LONGEST:
                    del longest[conversation]

    def hear(self, world: int, said: list[tuple[str, list[str]]]) -> None:
        for word, rest in said:
            if word == "written":
                for key, line in (one.split("/") for one in rest):
                    self._look_up(world, line)
                    self.acknowledged[key] = line
            elif word == "spilled":
                self.spilled = world, int(rest[0]), int(rest[1])

    def look(self) -> None:
        """Opens the directory as an engine does, reads all there is, and asks for some of what was acknowledged."""
        begin = time.perf_counter()
        with started(self._engine, self._directory, caches=CACHES, disk_min_tokens=10**6) as caches:
            nvme = caches.nvme
            self.opened.append((len(nvme.storage.entries()), time.perf_counter() - begin))
            self.counts["unfinished"] += nvme.storage.stats()["unfinished"]
            there = {key for key, filed in nvme.index.anchors.items() if filed.use == DISK}
            if lost := sorted(self.acknowledged.keys() - there):
                self.counts["lost"] += len(lost)
                print(f"{lost} were written: {[key for key in lost if nvme.storage.find(key)]} are there, {nvme.index.stats()}")
            if self.spilled:
                self._ask(*self._further(*self.spilled), ("spill", "disk"))
            for key in self._rng.sample(sorted(self.acknowledged), min(SERVED, len(self.acknowledged))):
                head = self._heads[self.acknowledged[key]]
                caches.clear()
                self._ask(np.concatenate([head, prompt(30, seed=7)]), head.size, ("disk", "spill"))
            nvme.drain()  # of these requests' own books
            entries = nvme.storage.entries()
            old = sorted(self._read & entries.keys())
            for key in [*(entries.keys() - self._read), *self._rng.sample(old, min(AGAIN, len(old)))]:
                self.counts["damaged"] += nvme.storage.get([(key, entries[key].empty())]) != 1
                self.counts["read"] += 1
            self._read = set(entries)
            caches.clear()
            nvme.abandon()  # so that nothing of this is spilled
        self.counts["kills"] += 1

    def _further(self, world: int, conversation: int, number: int) -> tuple[np.ndarray, int]:
        """(the next turn of a conversation, where it must start): it may have gone on and have been written again, before anybody was told."""
        tokens = self.turn(world, conversation, number)
        while True:
            start, tokens = tokens.size, self.turn(world, conversation, number := number + 1)
            hits = self._engine.caches.find(tokens.astype(np.int64), "")
            if (hits and hits[0].start >= start) or tokens.size > LONGEST:
                return tokens, start

    def _ask(self, tokens: np.ndarray, start: int, sources: tuple[str, ...]) -> Record | None:
        self.counts["requests"] += 1
        try:
            record = assert_cold(self._engine, tokens)
        except AssertionError as error:
            self.counts["wrong"] += 1
            print(error)
            return
        if record.start < start or record.source not in sources:
            self.counts["lost"] += 1
            print(f"{tokens.size} tokens: expected a start at {start}, found {record}")


def kills(engine: Engine, cache: Path, directory: Path, number: int, seed: int = 0) -> Survey:
    """So many, one after the other, on one directory."""
    survey = Survey(engine, directory, seed)
    with contextlib.closing(Children(engine, cache, directory, seed)) as children:
        for _ in range(number):
            survey.hear(*children.kill_one())
            survey.look()
    return survey


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as temporary:
        config = EngineConfig(grid=64, context_tokens=448)
        engine = Engine(random_model(tiny_config()), config)
        begin = time.perf_counter()
        survey = kills(engine, config.compile_cache, Path(temporary) / "states", number)
    counts, slowest = dict(survey.counts), max(survey.opened, key=lambda opened: opened[1])
    print(f"{counts}\nacknowledged {len(survey.acknowledged)} heads, {time.perf_counter() - begin:.0f} s")
    print(f"slowest start: {slowest[0]} entries in {slowest[1]:.3f} s; last: {survey.opened[-1][0]} entries in {survey.opened[-1][1]:.3f} s")
    sys.exit(any(survey.counts[fault] for fault in FAULTS))


if __name__ == "__main__":
    main()
