"""What the files of a conversation save after a restart, and what writing them costs a cold request.

Cold requests run with the tier on NVMe and without it in turn, into a directory of the measurement's own that is empty for each. After the
last one the caches stop as at the end of a program, and a new process takes the conversation's next turns.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from qjax.bench.resume import ask, paired
from qjax.child import run_qjax
from qjax.config import CacheConfig, DiskConfig, EngineConfig
from qjax.engine import Engine
from qjax.model.source import Model, load

NEW = 20
"""New tokens of a turn."""
ANSWER = 32
"""Tokens of an answer, while which the files are written."""
TURNS = 5
"""Turns after the restart; the first one is the figure."""
TOLD = "told.json"


def sized(model: Model, config: EngineConfig, tokens: int) -> EngineConfig:
    """The config with room for the conversation."""
    longest = min(tokens + ANSWER + TURNS * (NEW + ANSWER) + 1, model.config.context)
    return config if config.context_tokens else dataclasses.replace(config, context_tokens=longest)


def measure(
    model: str, config: EngineConfig, caches: CacheConfig, directory: Path, tokens: int, rounds: int, *, progress: Callable[[str], None]
) -> dict:
    """What `qjax bench restart --json` prints; times in seconds, medians over the rounds.

    disk_cost: time to the first token of a cold prompt with the tier over without it. answer_cost: the same of the whole request.
    stop_s: a planned stop, written_bytes in all. restart: the first turn of a new process, which has read the conversation back before;
    ratio: the cold time to the first token over its. RuntimeError where a request was not served from where it should be.
    """
    loaded = load(model)
    config = sized(loaded, config, tokens)
    engine = Engine(loaded, config)
    try:
        return _measured(engine, model, config, caches, directory, tokens, rounds, progress)
    finally:
        engine.abandon()


def _measured(engine: Engine, model: str, config: EngineConfig, caches: CacheConfig, directory: Path, tokens: int, rounds: int, progress) -> dict:
    random = np.random.default_rng(tokens)
    words = min(256, engine.model.tokenizer.size)  # below the special tokens
    prompt = random.integers(0, words, tokens).tolist()
    first: dict[bool, list[float]] = {True: [], False: []}
    whole: dict[bool, list[float]] = {True: [], False: []}
    order = [i % 4 in (0, 3) for i in range(2 * rounds)][::-1]  # in turn who goes first, so that a drift hits both alike
    for i, with_tier in enumerate(order):
        progress(f"cold {i + 1} of {len(order)}")
        states = directory / f"states-{i}"
        engine.caches = engine.new_caches(caches, DiskConfig.private(states) if with_tier else None)
        begin = time.perf_counter()
        turn = ask(engine, prompt, ANSWER)
        whole[with_tier].append(time.perf_counter() - begin)
        first[with_tier].append(turn.seconds)
        if turn.record.source != "cold":
            raise RuntimeError(f"expected a cold request, found {turn.record}")
        tokens_now = np.concatenate([turn.sequence.tokens, turn.tokens[-1:]]).tolist()
        engine.release(turn.sequence)
        if i + 1 < len(order):
            engine.caches.clear()
            if with_tier:
                engine.caches.nvme.close()
    progress("a planned stop")
    nvme, begin = engine.caches.nvme, time.perf_counter()
    nvme.drain()
    drained, begin = time.perf_counter() - begin, time.perf_counter()
    engine.close()
    stop, written = time.perf_counter() - begin, nvme.stats()["written_bytes"]
    progress("a new process")
    cold = median(first[True])
    (directory / TOLD).write_text(json.dumps({"states": str(states), "tokens": tokens_now}))
    flags = ["--model", model, "--restarted", str(directory), "--json", *config.flags(), *caches.flags()]
    told = json.loads(run_qjax(["bench", "restart", *flags], "the process after the restart"))
    if told["source"] != "spill":
        raise RuntimeError(f"expected source spill after the restart, found {told}")
    return {
        "model": engine.model.name,
        "tokens": tokens,
        "rounds": rounds,
        "cold_s": cold,
        "disk_cost": paired(first[True], first[False]),
        "answer_cost": paired(whole[True], whole[False]),
        "drain_s": drained,
        "stop_s": stop,
        "written_bytes": written,
        "restart": told | {"ratio": cold / told["warm_s"]},
    }


def restarted(model: str, config: EngineConfig, caches: CacheConfig, directory: str) -> dict:
    """What the new process measures. start_s: opening the files and reading the conversation back. later_s: the next turns, a median."""
    told = json.loads((Path(directory) / TOLD).read_text())
    engine = Engine(load(model), config)
    engine.identity  # noqa: B018  its time is no part of opening the files
    begin = time.perf_counter()
    engine.caches = engine.new_caches(caches, DiskConfig.private(told["states"]))
    start = time.perf_counter() - begin
    random, tokens, turns = np.random.default_rng(0), told["tokens"], []
    words = min(256, engine.model.tokenizer.size)
    try:
        for _ in range(TURNS):
            prompt = tokens + random.integers(0, words, NEW - 1).tolist()  # with the answer's last token, which was not forwarded
            turn = ask(engine, prompt, ANSWER)
            tokens = prompt + turn.tokens
            engine.release(turn.sequence)
            turns.append(turn)
    finally:
        engine.abandon()
    record = turns[0].record
    return {
        "source": record.source,
        "new_tokens": record.prompt_tokens - record.start,
        "read_again": record.read_again,
        "start_s": start,
        "warm_s": turns[0].seconds,
        "later_s": median(turn.seconds for turn in turns[1:]),
    }
