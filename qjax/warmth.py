"""Warm against cold, measured: what a request computes after a hit in each tier, against a run that never saw a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from qjax.caches.lookup import Caches
from qjax.config import CacheConfig
from qjax.engine import Engine
from qjax.purity import TOKEN, Check, Outcome, compare, leaves, prompt

NEW = 20
"""New tokens of a turn."""
ANSWER = 3
"""Tokens of an answer."""


def certify_tiers(engine: Engine, progress: Callable[[str], None] = lambda name: None) -> tuple[list[Check], dict[str, int]]:
    """A check for every source of the tiers in memory, and a control. Puts caches of its own in the engine's place meanwhile.

    Raises RuntimeError where a request does not come from the tier that it is to measure.
    """
    before = engine.caches
    try:
        return _certify(engine, progress)
    finally:
        engine.caches = before


def _certify(engine: Engine, progress) -> tuple[list[Check], dict[str, int]]:
    grid = engine.layout.grid
    length = grid + 200
    main, other, new = prompt(engine, length), prompt(engine, 2 * length)[length:], prompt(engine, NEW)
    edited, guest = np.concatenate([main[: grid + 70], new]), other[: grid // 8]
    checks, controls = [], {}

    def measure(source: str, tokens: np.ndarray) -> np.ndarray:
        progress(f"tier: {source}")
        got, end, found = _request(engine, tokens)
        if found != source:
            raise RuntimeError(f"expected a hit of {source!r}, found {found!r}")
        checks.append(Check(f"resumed from {source}", 1, compare(_cold(engine, tokens), got), TOKEN, hit=True))
        return np.concatenate([end, new])

    engine.caches = Caches(engine.pool, CacheConfig())
    _request(engine, main)
    turn = measure("end", measure("prompt", main))
    measure("resident", edited)
    _, end, _ = _request(engine, guest)
    measure("guest", np.concatenate([end, new]))
    _request(engine, other)
    turn = measure("parked", turn)
    session = engine.caches.resident.resident
    anchor = session.anchors[-1]
    for name, section in anchor.sequence.sections.items():
        zeroed = anchor.sequence.replace(sections=anchor.sequence.sections | {name: jnp.zeros_like(section)})
        session.anchors[-1] = replace(anchor, sequence=zeroed)
        controls[f"{name} of an anchor zeroed"] = compare(_cold(engine, turn), _request(engine, turn, keep=False)[0])
    engine.caches.clear()

    budget = (2 * engine.layout.page_bytes + 9 * engine.layout.section_bytes) / 2**30
    engine.caches = Caches(engine.pool, CacheConfig(resident_park_gb=0, resident_pin_gb=budget))
    _request(engine, main)
    _request(engine, other)
    measure("pinned", edited)
    engine.caches.clear()
    return checks, controls


def _request(engine: Engine, tokens: np.ndarray, keep: bool = True) -> tuple[Outcome, np.ndarray, str]:
    """A prompt through the caches, and a short answer: what it computed at the prompt's end, all its tokens, and where it came from."""
    request = engine.caches.begin(tokens)
    done = engine.run_prompt(tokens, request=request)
    slot, logits = done.slot, done.logits
    try:
        got = {"logits": logits[None], **leaves(engine, slot.freeze())}
        for _ in range(ANSWER):
            token = int(logits.argmax())
            logits = slot.step([token])[0]
            slot.accept([token])
        end = slot.freeze()
        if keep:
            request.finish(end)
        return got, end.tokens, request.record.source
    finally:
        slot.close()


def _cold(engine: Engine, tokens: np.ndarray) -> Outcome:
    done = engine.run_prompt(tokens)
    try:
        return {"logits": done.logits[None], **leaves(engine, done.slot.freeze())}
    finally:
        done.slot.close()
