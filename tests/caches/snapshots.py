"""Made up sequences of a small layout, and what the tests of the state store do with them."""

import jax
import numpy as np

from qjax.state import BLOCK, Layout, Section, Sequence, View, held
from tests.models import prompt

PLENTY = 1 << 30
LAYOUT = Layout(
    sections=(Section("S", (2, 4), "float32"), Section("tail", (3,), "bfloat16")),
    open=(Section("u", (BLOCK, 2), "bfloat16"),),
    views=(View("K", 2, 3, 8, "bfloat16"), View("V", 2, 3, 4, "float32")),
    grid=64,
)


def ids(tokens) -> np.ndarray:
    return np.asarray(tokens, np.int64)


def other(length, seed) -> np.ndarray:
    return prompt(length, seed=seed)


def made(pool, tokens) -> Sequence:
    """A held sequence with random contents."""
    rng = np.random.default_rng(len(tokens))
    rows = {v.name: rng.integers(1, 99, (v.layers, v.heads, len(tokens), v.dim)).astype(held(v.dtype)) for v in pool.layout.views}
    sections, opened = (
        {s.name: jax.device_put(rng.integers(1, 99, s.shape).astype(held(s.dtype))) for s in some}
        for some in (pool.layout.sections, pool.layout.open)
    )
    pages = pool.copy_in(rows, len(tokens))
    return Sequence(np.asarray(tokens, np.int32), np.array(pages, np.int32), np.int32(len(tokens)), sections, opened)


def put(store, tokens, tenant="", logits=None, use="session") -> bool:
    """Offers a made up sequence of these tokens."""
    pool = store._pool
    sequence = made(pool, tokens)
    try:
        return store.offer(ids(tokens), tenant, sequence, logits, use)
    finally:
        pool.release(sequence.pages)


def lengths(store) -> list[int]:
    return [e.length for e in store._entries]


def has(store, tokens, tenant="") -> bool:
    return any(e.tenant == tenant and np.array_equal(e.keys, tokens) for e in store._entries)


def fetch(store, tokens, tenant="") -> int:
    """Takes what there is for a prompt that goes on from these tokens, and gives it back: its start."""
    hit = store.find(ids([*tokens, 7777]), tenant)
    if hit is None:
        return 0
    store._pool.release(store.take(hit).sequence.pages)
    return hit.start
