"""kill -9 at random moments: what was acknowledged is there, what was dropped is gone, and nothing unfinished is ever seen."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from storage import Storage
from tests.storage.children import ROOT
from tests.storage.content import FINGERPRINT, content, empty, equal, key, names

KILLS = 220
LONGEST = 0.08
"""Seconds from a writer's start to its end: some 5 entries are written in that time."""


@pytest.fixture
def writers() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-m", "tests.storage.killed"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def kill_one(writers, directory, seed, order, wait) -> list[tuple[str, int]]:
    """What a writer said before it was killed."""
    writers.stdin.write(f"{directory} {seed} {order}\n")
    writers.stdin.flush()
    word, process = writers.stdout.readline().split()
    assert word == "open"
    time.sleep(wait)
    os.kill(int(process), signal.SIGKILL)
    said = []
    for line in writers.stdout:
        word, number = line.split()
        if word == "ended":
            assert int(number) == signal.SIGKILL
            return said
        said.append((word, int(number)))
    raise AssertionError("the writers' process ended")


def check(directory, known: set[int], said, counts: Counter) -> set[int]:
    """Opens what a killed writer left, and counts what is wrong with it. Returns the numbers of the entries that are there."""
    acknowledged, gone, open_ = set(known), set(), set()
    for word, number in said:
        if word == "put":
            acknowledged.add(number)
        elif word == "dropping":
            acknowledged.discard(number)
        elif word == "dropped":
            gone.add(number)
        if word in ("putting", "dropping"):
            open_.add(number)
    with Storage.open(directory, FINGERPRINT) as store:
        found = {entry.fields["number"] for entry in store.entries().values()}
        held = {number: empty() for number in found}
        counts["visible, wrong"] += sum(not (store.get([(key(n), a)]) == 1 and equal(a, content(n))) for n, a in held.items())
        counts["acknowledged, lost"] += len(acknowledged - found)
        counts["dropped, there"] += len(gone & found)
        counts["never begun, there"] += len(found - known - open_)
        counts["left behind"] += len(names(directory) ^ {key(n) for n in found} if not counts["visible, wrong"] else ())
        counts["unfinished"] += store.stats()["unfinished"]
    counts.update(read=len(found), acknowledged=len(acknowledged), kills=1)
    return found


FAULTS = ("visible, wrong", "acknowledged, lost", "dropped, there", "never begun, there", "left behind")


def test_writers_that_are_killed(tmp_path, writers):
    """220 of them one after another on one directory; the moments come from a seed. Some of them were in the middle of a write."""
    rng, counts, there = random.Random(4), Counter(), set()
    for seed in range(KILLS):
        said = kill_one(writers, tmp_path / "store", seed, "meta-last", rng.uniform(0, LONGEST))
        there = check(tmp_path / "store", there, said, counts)
    print(dict(counts))
    assert not any(counts[fault] for fault in FAULTS), counts
    assert counts["kills"] == KILLS
    assert counts["unfinished"] >= 10, counts
    assert counts["acknowledged"] >= KILLS, counts


def test_a_writer_that_commits_first_is_caught(tmp_path, writers):
    """The control: with `meta` written before the arrays the same check finds an entry that is visible and wrong."""
    rng, counts, there = random.Random(5), Counter(), set()
    for seed in range(KILLS):
        said = kill_one(writers, tmp_path / "store", seed, "meta-first", rng.uniform(0, LONGEST))
        there = check(tmp_path / "store", there, said, counts)
        if counts["visible, wrong"]:
            return
    raise AssertionError(f"{KILLS} kills, and no entry was found unfinished: {counts}")
