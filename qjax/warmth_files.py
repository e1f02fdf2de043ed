"""Warm against cold over files: what a request computes after a hit on NVMe, in this process and in others that come after."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from qjax.bits import differing_bits
from qjax.caches.nvme.filed import SECTIONS
from qjax.caches.nvme.rates import Rates
from qjax.config import CacheConfig, DiskConfig
from qjax.engine import Engine
from qjax.interrupts import deferred
from qjax.ledger import Record
from qjax.purity import Check, prompt
from qjax.warmth import ANSWER, NEW, Answer, answered_cold, ask, ask_of, measured

STAGES = ("killed", "restart", "spill")
"""Processes one after the other: one writes a head and is killed, the next finds it and stops as planned, the last finds the conversation."""
WHERE = {"restart": "in a new process after kill -9", "spill": "in a new process after a planned stop"}
STATE = "state."


class Regardless(Rates):
    """What is to be measured is read also where a prefill would be quicker, as on a small model."""

    def pays(self, nbytes: int, tokens: int) -> bool:
        return True


@contextmanager
def over_files(engine: Engine, directory: str | Path):
    """The engine with caches of its own over a private directory; at the end a planned stop."""
    before = engine.caches
    try:
        with deferred():
            engine.caches = caches = engine.new_caches(CacheConfig(), DiskConfig.private(directory, disk_min_tokens=0))
        caches.nvme.rates = Regardless()
        yield caches
        caches.close()
    finally:
        if engine.caches is not before:
            engine.abandon()
            engine.caches.clear()
        engine.caches = before


def certify_files(engine: Engine, directory: str | Path, progress: Callable[[str], None] = lambda name: None) -> tuple[list[Check], dict[str, int]]:
    """A check for each of the sources on NVMe, and controls, in a directory of its own.

    Raises RuntimeError where a request does not come from the source that it is to measure.
    """
    checks, controls = [], {}
    main, edited, turn = prompts(engine)

    def measure(source: str, tokens: np.ndarray) -> Answer:
        progress(f"tier: {source}")
        got = ask_of(engine, source, tokens)
        checks.append(measured(source, answered_cold(engine, tokens), got, engine.level))
        return got

    with over_files(engine, directory) as caches:
        ask(engine, main)
        caches.nvme.drain()
        caches.clear()
        progress("control: disk")
        controls |= _damaged(engine, edited)
        measure("disk", edited)
        caches.clear()
        end = ask(engine, main).end
    turn = np.concatenate([end, turn])
    with over_files(engine, directory):
        measure("spill", turn)
    return checks, controls


def prompts(engine: Engine) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A prompt past a grid line, another one with its head, and the new tokens of a turn."""
    grid = engine.layout.grid
    main, new = prompt(engine, grid + 200), prompt(engine, NEW)
    return main, np.concatenate([main[: grid + 70], new]), new


def _damaged(engine: Engine, tokens: np.ndarray) -> dict[str, int]:
    """Differing bits of the logits after a restore, with one part after the other of what was read zeroed."""
    want, reader, found = answered_cold(engine, tokens).state["logits"], engine.caches.nvme.reader, {}
    read = reader.read
    for part in (*(SECTIONS + s.name for s in engine.layout.sections), *(v.name for v in engine.layout.views)):

        def zeroed(wanted, part=part):
            return [{name: np.zeros_like(a) if name == part else a for name, a in arrays.items()} for arrays in read(wanted)]

        reader.read = zeroed
        try:
            got = ask_of(engine, "disk", tokens, keep=False).state["logits"]
        finally:
            del reader.read
        found[f"{part.removeprefix(SECTIONS)} of a file zeroed"] = differing_bits(got, want)
    return found


def run_stage(stage: str, engine: Engine, directory: str) -> dict[str, np.ndarray]:
    """What the process of a stage does (see STAGES): its answer as `as_arrays` has it."""
    main, edited, new = prompts(engine)
    with over_files(engine, directory) as caches:
        if stage == "killed":
            ask(engine, main)
            caches.nvme.drain()
            for _ in engine.generate(edited, max_tokens=ANSWER):
                os.kill(os.getpid(), signal.SIGKILL)
        if stage == "restart":
            return as_arrays(ask_of(engine, "disk", edited))
        return as_arrays(ask_of(engine, "spill", np.concatenate([answered_cold(engine, edited).end, new])))


def stage_check(stage: str, engine: Engine, arrays: Mapping[str, np.ndarray]) -> Check:
    """A check of what a stage's process sent against a cold run here."""
    _, edited, new = prompts(engine)
    source, tokens = ("disk", edited) if stage == "restart" else ("spill", np.concatenate([answered_cold(engine, edited).end, new]))
    record = Record(prompt_tokens=tokens.size, source=source, exact=bool(arrays["exact"]))
    state = {name.removeprefix(STATE): a for name, a in arrays.items() if name.startswith(STATE)}
    warm = Answer(state, arrays["tokens"].tolist(), arrays["logits"], arrays["end"], record)
    check = measured(source, answered_cold(engine, tokens), warm, engine.level)
    return replace(check, name=f"{check.name}, {WHERE[stage]}")


def as_arrays(answer: Answer) -> dict[str, np.ndarray]:
    """An answer on its way to another process."""
    state = {STATE + name: np.asarray(a) for name, a in answer.state.items()}
    return state | {"tokens": np.array(answer.tokens), "logits": answer.logits, "end": answer.end, "exact": np.array(answer.record.exact)}
