"""Writers that are killed (test_kill.py). python -m tests.storage.killed, and per writer a line on standard input: DIRECTORY SEED ORDER

Each writer is a fork of this process, which never uses TensorStore itself, so that it starts in milliseconds. It opens the directory and
puts and drops entries until it is killed, and says so: what it begins, and what has returned. ORDER "meta-first" is the control: a
writer that commits before its arrays are there.
"""

import os
import random
import sys
import time

from storage import Storage
from storage.arrays import Leaf
from storage.entry import META, Entry, seal
from tests.storage.content import FINGERPRINT, content, key

MOST = 12
"""Entries at a time."""


def say(*words) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def work(directory: str, seed: int, order: str) -> None:
    rng = random.Random(seed)
    if order == "meta-first":
        Storage._write = write_meta_first
    store = Storage.open(directory, FINGERPRINT)
    there = [entry.fields["number"] for entry in store.entries().values()]
    say("open", os.getpid())
    number = seed * 10000
    while True:
        if len(there) < MOST and rng.random() < 0.7:
            number += 1
            say("putting", number)
            store.put(key(number), content(number), number=number)
            say("put", number)
            there.append(number)
        elif there:
            dropped = there.pop(rng.randrange(len(there)))
            say("dropping", dropped)
            store.drop(key(dropped))
            say("dropped", dropped)


def write_meta_first(self: Storage, name, tree, fields) -> Entry:
    """Storage._write in a wrong order."""
    self._place.begin(name, tree)
    entry = Entry(name, {leaf: Leaf.of(array) for leaf, array in tree.items()}, fields, time.time(), self._now())
    self._place.kv.write(f"{name}/{META}", seal(entry)).result()
    for write in self._place.write(name, tree):
        write.result()
    return entry


def main() -> None:
    for line in sys.stdin:
        directory, seed, order = line.split()
        if not (child := os.fork()):
            try:
                work(directory, int(seed), order)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("ended", status)


if __name__ == "__main__":
    main()
