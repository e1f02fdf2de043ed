"""Engines that write to a directory until they are killed (killed.py). python -m tests.equivalence.nvme_children MODEL COMPILE_CACHE

Reads lines: "start DIRECTORY SEED WORLD" makes a child, "reap PROCESS" waits for one that was killed. Each child is a fork of this process, which
never starts JAX's backend or TensorStore itself. It makes an engine, waits for the file DIRECTORY.PROCESS, and then talks in
conversations, those of a world, with planned stops in between, on and on. Lines that it says begin with its process:

    born, open                    there is a process; its engine runs
    written KEY/LINE ...          anchors of heads, with the chain's hash, that it has written since it said so before
    spilled CONVERSATION TURN     which was the resident one at a planned stop, when that has returned
"""

import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qjax.caches.lookup import Caches
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.model.source import EMBEDDED, Model
from qjax.model.tokenizer import Tokenizer
from tests.equivalence.nvme import DISK, started
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt

CONVERSATIONS, LONGEST = 4, 400
CACHES = {"cache_budget_gb": 0, "resident_pin_gb": 0}
"""What the pool gives up is on NVMe or nowhere."""


def opening(world: int, conversation: int) -> np.ndarray:
    """A conversation's first prompt; two and two have a head of 128 tokens together."""
    seed = 100 * world + conversation
    return np.concatenate([prompt(128, seed=100 * world + 50 + conversation // 2), prompt(70 + 9 * conversation, seed=seed)]).astype(np.int32)


def next_turn(tokens, generated, turn: int) -> np.ndarray:
    return followed(tokens, generated, prompt(25, seed=10**6 + turn))


def say(*words) -> None:
    os.write(1, (" ".join(map(str, (os.getpid(), *words))) + "\n").encode())


def heads(caches: Caches) -> set[str]:
    return {f"{key}/{a.line}" for key, a in caches.nvme.index.anchors.items() if a.use == DISK}


def conversations(rng: random.Random) -> Iterator[tuple[int, int]]:
    """(conversation, turn): each goes on for some turns, then another does."""
    turns = dict.fromkeys(range(CONVERSATIONS), 0)
    while True:
        conversation = rng.randrange(CONVERSATIONS)
        for _ in range(rng.randrange(1, 4)):
            yield conversation, turns[conversation]
            turns[conversation] += 1


def work(model: Model, cache: Path, directory: str, seed: int, world: int) -> None:
    rng = random.Random(seed)
    engine = Engine(model, EngineConfig(grid=64, context_tokens=448, compile_cache=cache))
    while not Path(f"{directory}.{os.getpid()}").exists():
        time.sleep(0.002)
    say("open")
    tokens, said, asked = {c: opening(world, c) for c in range(CONVERSATIONS)}, None, conversations(rng)
    while True:
        with started(engine, directory, caches=CACHES) as caches:
            said = heads(caches) if said is None else said
            for _ in range(rng.randrange(1, 8)):
                conversation, turn = next(asked)
                if tokens[conversation].size > LONGEST:
                    continue
                _, generated, _ = answer(engine, tokens[conversation], user=tokens[conversation].size if turn == 0 else None)
                tokens[conversation] = next_turn(tokens[conversation], generated, turn)
                last = conversation, turn
                if rng.random() < 0.4:
                    caches.nvme.drain()
                    new = sorted(heads(caches) - said)
                    said |= set(new)
                    for first in range(0, len(new), 40):  # a line that is longer than a pipe takes at once could be cut
                        say("written", *new[first : first + 40])
            resident = caches.resident.resident
            stop = last if resident is not None and resident.length >= 64 else None
        if stop:
            say("spilled", *stop)
        if all(t.size > LONGEST for t in tokens.values()):
            tokens, asked = {c: opening(world, c) for c in range(CONVERSATIONS)}, conversations(rng)


def main() -> None:
    name, config, params = pickle.loads(Path(sys.argv[1]).read_bytes())
    model = Model(name, config, params, Tokenizer.from_directory(EMBEDDED), None, {}, 0.0)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "reap":
            _, status = os.waitpid(int(rest[0]), 0)
            os.write(1, f"{rest[0]} ended {status}\n".encode())
        elif child := os.fork():
            os.write(1, f"{child} born\n".encode())
        else:
            try:
                work(model, Path(sys.argv[2]), rest[0], int(rest[1]), int(rest[2]))
            except BaseException:
                traceback.print_exc()
                say("failed")
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
