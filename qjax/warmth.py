"""Warm against cold, measured: what a request computes after a hit in each tier, against a run that never saw a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from qjax.bits import differing_bits
from qjax.caches.lookup import Caches
from qjax.config import GRID, CacheConfig
from qjax.engine import Engine, Prefilled
from qjax.gate import greedy_gate
from qjax.ledger import Record
from qjax.purity import Check, Outcome, compare, leaves, prompt

NEW = 20
"""New tokens of a turn."""
ANSWER = 8
"""Tokens of an answer."""


@dataclass(frozen=True)
class Answer:
    """state: at the prompt's end, with its logits. tokens, logits: the greedy answer, and float32 [ANSWER, V] that it was drawn from.

    end: int32 tokens of the prompt and the answer, as far as they were forwarded. record: the ledger's, None for a cold run.
    """

    state: Outcome
    tokens: list[int]
    logits: np.ndarray
    end: np.ndarray
    record: Record | None


def certify_tiers(engine: Engine, progress: Callable[[str], None] = lambda name: None) -> tuple[list[Check], dict[str, int]]:
    """A check for every source of the tiers in memory, and controls. Puts caches of its own in the engine's place meanwhile.

    Raises RuntimeError where a request does not come from the tier that it is to measure.
    """
    before = engine.caches
    try:
        return _certify(engine, progress)
    finally:
        if engine.caches is not before:
            engine.caches.clear()
        engine.caches = before


def _certify(engine: Engine, progress) -> tuple[list[Check], dict[str, int]]:
    grid = engine.layout.grid
    length = grid + 200
    main, other, new = prompt(engine, length), prompt(engine, 2 * length)[length:], prompt(engine, NEW)
    edited, guest = np.concatenate([main[: grid + 70], new]), other[: grid // 8]
    checks, controls = [], {}

    def measure(source: str, tokens: np.ndarray) -> np.ndarray:
        progress(f"tier: {source}")
        got = ask_of(engine, source, tokens)
        checks.append(measured(source, answered_cold(engine, tokens), got, engine.level))
        return np.concatenate([got.end, new])

    engine.caches = Caches(engine.pool, CacheConfig(), engine.level)
    ask(engine, main)
    turn = measure("end", measure("prompt", main))
    measure("resident", edited)
    measure("guest", np.concatenate([ask(engine, guest).end, new]))
    ask(engine, other)
    turn = measure("parked", turn)
    session = engine.caches.resident.resident
    anchor = session.anchors[-1]
    for name, section in anchor.sequence.sections.items():
        zeroed = anchor.sequence.replace(sections=anchor.sequence.sections | {name: jnp.zeros_like(section)})
        session.anchors[-1] = replace(anchor, sequence=zeroed)
        controls[f"{name} of an anchor zeroed"] = compare(answered_cold(engine, turn).state, ask_of(engine, "end", turn, keep=False).state)
    engine.caches.clear()

    budget = (2 * engine.layout.page_bytes + 9 * engine.layout.section_bytes) / 2**30
    engine.caches = Caches(engine.pool, CacheConfig(resident_park_gb=0, resident_pin_gb=budget), engine.level)
    ask(engine, main)
    ask(engine, other)
    measure("pinned", edited)
    engine.caches.clear()

    request = engine.caches.begin(main)
    done = engine.run_prompt(main, request=request)
    try:
        measure("running", np.concatenate([main, new]))
        request.finish(done.slot.freeze())
    finally:
        done.slot.close()
    engine.caches.clear()

    engine.caches = Caches(engine.pool, CacheConfig(resident_park_gb=0, resident_pin_gb=0), engine.level)
    turn = np.concatenate([ask(engine, main).end, new])
    ask(engine, other)  # the first session goes from the pool to the store
    progress("control: store")
    controls |= _damaged_snapshots(engine, turn)
    measure("store", turn)
    engine.caches.clear()

    progress("tier: response")
    engine.caches = Caches(engine.pool, CacheConfig(response_gb=2**-10), engine.level)
    (cold, _), (again, source) = (_generated(engine, main) for _ in range(2))
    if source != "response":
        raise RuntimeError(f"expected a hit of 'response', found {source!r}")
    checks.append(Check("answered from response", again.size, differing_bits(cold, again), engine.level, hit=True))
    engine.caches.clear()
    return checks, controls


def _generated(engine: Engine, tokens: np.ndarray) -> tuple[np.ndarray, str]:
    """A greedy answer, int32, and where it came from."""
    generation = engine.generate(tokens, max_tokens=ANSWER)
    list(generation)
    engine.release(generation.sequence)
    return np.array(generation.tokens, np.int32), engine.caches.ledger.records[-1].source


def _damaged_snapshots(engine: Engine, turn: np.ndarray) -> dict[str, int]:
    """Differing bits of the logits after a turn from the store, with one part after the other of its snapshot zeroed."""
    want, hit = answered_cold(engine, turn).state["logits"], engine.caches.store.find(turn.astype(np.int64), "")
    found = {}
    for parts in (hit.entry.sections, hit.entry.open, hit.entry.rows) if hit else ():
        for name, part in parts.items():
            zeros = np.zeros(part.shape, part.dtype)
            parts[name] = jax.device_put(zeros, part.sharding) if isinstance(part, jax.Array) else zeros
            try:
                found[f"{name} of a snapshot zeroed"] = differing_bits(ask_of(engine, "store", turn, keep=False).state["logits"], want)
            finally:
                parts[name] = part
    return found


def measured(source: str, cold: Answer, warm: Answer, level: str) -> Check:
    """All bits at the prompt's end; of a session resume at level grid the greedy tokens."""
    if warm.record.exact:
        return Check(f"resumed from {source}", 1, compare(cold.state, warm.state), level, hit=True)
    gate = greedy_gate(cold.tokens, cold.logits, warm.tokens)
    bits = 0 if gate.failed is None else differing_bits(*(np.array(answer[gate.failed], np.int32) for answer in (cold.tokens, warm.tokens)))
    return Check(f"resumed from {source}, greedy tokens", gate.tokens, bits, GRID, hit=True, near_ties=int(gate.near_tie is not None))


def ask_of(engine: Engine, source: str, tokens: np.ndarray, keep: bool = True) -> Answer:
    """A request whose state must come from a source."""
    got = ask(engine, tokens, keep)
    if got.record.source != source:
        raise RuntimeError(f"expected a hit of {source!r}, found {got.record.source!r}")
    return got


def ask(engine: Engine, tokens: np.ndarray, keep: bool = True) -> Answer:
    """A prompt through the caches, and an answer. keep: else what was taken is given back, and the request leaves nothing."""
    request = engine.caches.begin(tokens)
    done = engine.run_prompt(tokens, request=request)
    if not keep:
        request.fail()
    return _answer(engine, done, request if keep else None, request.record)


def answered_cold(engine: Engine, tokens: np.ndarray) -> Answer:
    return _answer(engine, engine.run_prompt(tokens), None, None)


def _answer(engine: Engine, done: Prefilled, request, record: Record | None) -> Answer:
    slot, logits = done.slot, done.logits
    try:
        state = {"logits": logits[None], **leaves(engine, slot.freeze())}
        tokens, rows = [], []
        for _ in range(ANSWER):
            tokens.append(int(logits.argmax()))
            rows.append(logits)
            engine.make_room(slot)
            logits = slot.step(tokens[-1:])[0]
            slot.accept(tokens[-1:])
        end = slot.freeze()
        if request:
            request.finish(end, logits)
        return Answer(state, tokens, np.array(rows), end.tokens, record)
    finally:
        slot.close()
