"""The state store: what is taken back goes on with a cold run's bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.caches.store import StateStore
from qjax.pages import PagePool, _copies
from qjax.state import BLOCK, held
from tests.bits import assert_bits_equal
from tests.caches.snapshots import LAYOUT, PLENTY, ids
from tests.models import prompt
from tests.runs import cold, decode, kept, new_pool, new_slot, prefill
from tests.test_programs import Compiles


def begun(engine, pool, tokens, sequence=None):
    """A held sequence of these tokens, begun where `sequence` ends, and the last row's logits."""
    slot = new_slot(engine, pool, sequence)
    logits = prefill(slot, tokens[slot.length :])
    end = slot.freeze()
    pool.hold(end.pages)
    slot.close()
    return end, logits


def spoil(pool) -> None:
    """Writes 32.0 over all pages, of which nobody may hold one: what is taken back has to come from the store."""
    assert pool.free == pool.pages
    pool.views = {name: jnp.full(view.shape, 0x4200 if view.dtype == np.uint16 else 32, view.dtype) for name, view in pool.views.items()}


def stored(engine, tokens, logits=True):
    """A store with one snapshot of these tokens over a spoilt pool: (pool, store, what the sequence kept, its logits)."""
    pool = new_pool(engine)
    store = StateStore(pool, PLENTY, PLENTY)
    sequence, last = begun(engine, pool, tokens)
    before = kept(pool, sequence)
    assert store.offer(ids(tokens), "", sequence, last if logits else None)
    pool.release(sequence.pages)
    spoil(pool)
    return pool, store, before, last


def assert_goes_on_as_cold(engine, pool, restored, tokens) -> None:
    """The rest of the prompt, forwarded from a restored sequence, equals a cold run."""
    end, logits = begun(engine, pool, tokens, restored.sequence)
    other = new_pool(engine)
    assert_bits_equal(logits, begun(engine, other, tokens)[1])
    assert_bits_equal(kept(pool, end), cold(engine, tokens))
    pool.release(end.pages)


LENGTHS = [("tiny_engine", n) for n in (1, 63, 64, 65, 127, 128, 129, 200)] + [("embedded_engine", n) for n in (64, 65, 127, 128, 129, 191, 256)]


@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_a_snapshot_goes_on_as_a_cold_run_does(request, name, length):
    """At blocks' and pages' lines and next to them, out of a pool that was written over."""
    engine = request.getfixturevalue(name)
    tokens = prompt(length + 75)
    pool, store, before, _ = stored(engine, tokens[:length])
    hit = store.find(ids(tokens), "")
    assert (hit.start, hit.source, hit.whole, hit.tier) == (length, "store", False, store)
    restored = store.take(hit)
    assert store.stats()["hits"] == 1
    assert restored.logits is None
    assert_bits_equal(kept(pool, restored.sequence), before)
    whole = len(restored.sequence.pages) * pool.layout.grid
    for view in pool.layout.views:
        assert not pool.rows(view.name, restored.sequence.pages, whole)[:, :, length:].any()
    assert_goes_on_as_cold(engine, pool, restored, tokens)
    pool.release(restored.sequence.pages)
    assert pool.free == pool.pages


@pytest.mark.parametrize("part", ["gdn.S", "gdn.conv", "gdn.u", "K", "V"])
def test_a_part_that_is_not_restored_shows(tiny_engine, part):
    """Control: each part of a snapshot enters the answer."""
    tokens = prompt(180)
    pool, store, _, _ = stored(tiny_engine, tokens[:100])
    sequence = store.take(store.find(ids(tokens), "")).sequence
    if part in pool.views:
        pool.views = pool.views | {part: jnp.zeros_like(pool.views[part])}
    else:
        kind = "sections" if part in sequence.sections else "open"
        arrays = getattr(sequence, kind)
        sequence = sequence.replace(**{kind: arrays | {part: jnp.zeros_like(arrays[part])}})
    _, logits = begun(tiny_engine, pool, tokens, sequence)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bits_equal(logits, begun(tiny_engine, new_pool(tiny_engine), tokens)[1])


@pytest.mark.parametrize("length", [64, 65, 100, 128])
def test_a_whole_prompt_needs_its_logits(tiny_engine, length):
    """D2: the very prompt again forwards nothing where its logits are known, else its last token, else nothing helps."""
    tokens = prompt(length)
    pool, store, before, logits = stored(tiny_engine, tokens)
    hit = store.find(ids(tokens), "")
    assert (hit.start, hit.whole) == (length, True)
    restored = store.take(hit)
    assert_bits_equal(restored.logits, logits)
    assert_bits_equal(kept(pool, restored.sequence), before)

    pool, store, _, _ = stored(tiny_engine, tokens, logits=False)
    hit = store.find(ids(tokens), "")
    if length % BLOCK == 0:
        assert hit is None
        return
    assert (hit.start, hit.whole) == (length - 1, False)
    assert_goes_on_as_cold(tiny_engine, pool, store.take(hit), tokens)


@pytest.mark.parametrize(("agrees", "start"), [(63, None), (64, 64), (65, 65), (80, 80), (99, 99)])
def test_a_snapshot_is_cut_inside_its_open_block(tiny_engine, agrees, start):
    tokens = prompt(180)
    other = np.concatenate([tokens[:agrees], (tokens[agrees:] + 1) % 1000])
    pool, store, _, _ = stored(tiny_engine, tokens[:100])
    hit = store.find(ids(other), "")
    if start is None:
        assert hit is None
        return
    assert (hit.start, hit.whole) == (start, False)
    restored = store.take(hit)
    assert len(restored.sequence.pages) == -(-start // 64)
    assert_bits_equal(kept(pool, restored.sequence)["rows"], cold(tiny_engine, tokens[:start])["rows"])
    assert_goes_on_as_cold(tiny_engine, pool, restored, other)
    with pytest.raises(AssertionError):  # control: the prompt that was stored has another answer
        assert_bits_equal(begun(tiny_engine, pool, other, restored.sequence)[1], begun(tiny_engine, new_pool(tiny_engine), tokens)[1])


def test_a_prompt_that_ends_inside_a_snapshots_open_block_is_served(tiny_engine):
    tokens = prompt(100)
    pool, store, _, _ = stored(tiny_engine, tokens)
    hit = store.find(ids(tokens[:90]), "")
    assert (hit.start, hit.whole) == (89, False)
    assert_goes_on_as_cold(tiny_engine, pool, store.take(hit), tokens[:90])


def test_what_runs_on_changes_no_snapshot(tiny_engine):
    """A14: neither the sequence that was stored, nor one that was taken, nor two of them in turns."""
    tokens = prompt(100)
    pool = new_pool(tiny_engine)
    store = StateStore(pool, PLENTY, PLENTY)
    slot = new_slot(tiny_engine, pool)
    prefill(slot, tokens)
    frozen = slot.freeze()
    before = kept(pool, frozen)
    assert store.offer(ids(tokens), "", frozen)
    decode(slot, prompt(70, seed=1))
    slot.close()
    spoil(pool)
    hit = store.find(ids(prompt(200)), "")
    first, second = (store.take(hit).sequence for _ in range(2))
    assert set(first.pages).isdisjoint(second.pages)
    slots = [new_slot(tiny_engine, pool, sequence) for sequence in (first, second, first)]
    tails = [prompt(70, seed=seed) for seed in (1, 2, 3)]
    for at in (0, 35):
        for one, tail in zip(slots, tails, strict=True):
            decode(one, tail[at : at + 35])
    assert slots[0].pages[1] == first.pages[1]  # went on in place: the page's mark is the snapshot's end
    assert slots[2].pages[1] != first.pages[1]  # in a copy
    for one, tail in zip(slots, tails, strict=True):
        assert_bits_equal(kept(pool, one.freeze()), cold(tiny_engine, np.concatenate([tokens, tail])))
        one.close()
    for sequence in (first, second):
        assert_bits_equal(kept(pool, sequence), before)
    assert_bits_equal(kept(pool, store.take(hit).sequence), before)


def test_the_copies_write_in_place_and_compile_nothing(tiny_engine):
    """G6: the pool is donated to the write, without a temporary of its size."""
    tokens = prompt(130)
    pool, store, _, _ = stored(tiny_engine, tokens)
    read, write = _copies(pool.layout, pool.pages)
    assert write.memory_analysis().alias_size_in_bytes >= pool.nbytes
    assert max(one.memory_analysis().temp_size_in_bytes for one in (read, write)) < pool.layout.page_bytes
    addresses = {name: view.unsafe_buffer_pointer() for name, view in pool.views.items()}
    old = pool.views
    jax.clear_caches()  # as in a process that has served nothing yet
    with Compiles() as found:
        for length in (130, 129, 128):
            sequence = store.take(store.find(ids([*tokens[:length], 1001]), "")).sequence
            assert store.offer(ids(tokens[:length]), "another", sequence)
    assert found.count == 0
    assert all(view.is_deleted() for view in old.values())
    assert {name: view.unsafe_buffer_pointer() for name, view in pool.views.items()} == addresses


def test_copies_keep_every_row():
    pool = PagePool(LAYOUT, 5)
    rng = np.random.default_rng(0)
    for length in (1, 63, 64, 65, 128, 200):
        rows = {v.name: rng.integers(0, 9999, (v.layers, v.heads, length, v.dim)).astype(held(v.dtype)) for v in LAYOUT.views}
        pages = pool.copy_in(rows, length)
        assert_bits_equal(pool.copy_out(pages, length), rows)
        assert_bits_equal({name: pool.rows(name, pages, length) for name in rows}, rows)
        assert [int(pool.fill[p]) for p in pages] == [min(64, length - first) for first in range(0, length, 64)]
        shorter = pool.copy_in(rows, min(length, 40))
        assert_bits_equal(pool.copy_out(shorter, min(length, 40)), {name: a[:, :, :40] for name, a in rows.items()})
        pool.release([*pages, *shorter])
    assert pool.free == 5
