"""The compiled programs: a listed set, no full-size temporaries, donation that takes place, and no compile once the engine is up."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import monitoring

from qjax.bench.plain import plain_programs
from qjax.model import weights
from qjax.model.qwen3_5 import layout, scratch_specs
from qjax.programs import Programs, Shapes
from qjax.sampling import Sampling
from tests.models import prompt, tiny_config
from tests.runs import decode, prefill

STEPS = {(kind, rows) for kind in ("embed", "attention", "gdn step", "logits") for rows in (2, 4, 8, 16)}
CHUNKS = ("embed", "attention", "gdn chunk", "norm", "head")
OTHERS = {"close", "place", "reopen", "sections", "inputs", "caught", "copy_page"}


def test_the_set_is_the_listed_one(embedded_engine, tiny_engine):
    assert set(embedded_engine.programs.compiled) == STEPS | OTHERS | {(kind, rows) for kind in CHUNKS for rows in (64, 128)}
    assert set(tiny_engine.programs.compiled) == STEPS | OTHERS | {(kind, 64) for kind in CHUNKS}


@pytest.mark.parametrize(("grid", "chunks"), [(64, (64,)), (128, (64, 128)), (256, (64, 256)), (512, (64, 256, 512)), (1024, (64, 256, 1024))])
def test_prefill_shapes(grid, chunks):
    shapes = Shapes(tiny_config(), layout(tiny_config(), grid), 4, 2)
    assert shapes.chunks == chunks
    assert [shapes.aligned(rows) for rows in chunks] == [rows == grid > 64 for rows in chunks]


class Compiles:
    """Counts traces and compiles of this process while it is entered."""

    EVENTS = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration")

    def __enter__(self):
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(self, *_):
        monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event, seconds, **_):
        self.count += event in self.EVENTS


def test_serving_compiles_nothing(engine):
    with Compiles() as control:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert control.count > 1  # the counter hears a trace and a compile
    jax.clear_caches()  # as in a process that has served nothing yet; the engine holds its programs itself
    with Compiles() as found:
        for length in (1, 2, 17, 63, 64, 65, 90, 127, 128, 129, 300, 517):
            sequence, _ = engine.prefill(prompt(length))
            engine.release(sequence)
        kept = [engine.prefill(prompt(517))[0]]
        slot, other = engine.open(kept[0]), engine.open(kept[0])
        for rows in range(1, 17):
            rows = min(rows, slot.verify_room())
            slot.step([1] * rows)
            slot.accept([1] * (rows // 2))
        decode(slot, [1] * 70)  # closes a block
        pages = list(other.pages)
        decode(other, [2])
        assert other.pages != pages  # a page was copied
        kept.append(engine.hold(slot.freeze()))
        other.prefill(prompt(60), 64, [576])  # from 518 to 578: it catches the state inside
        other.close()
        slot.close()
        run = engine.generate(prompt(600), kept[0], sampling=Sampling(temperature=1.0), max_tokens=20)
        list(run)
        for sequence in (*kept, run.sequence):
            engine.release(sequence)
    assert found.count == 0


def test_nothing_else_is_called_while_serving(engine):
    """What runs is the listed set; every program of it is used."""
    used = set()

    class Watched(dict):
        def __getitem__(self, key):
            used.add(key)
            return super().__getitem__(key)

    watched, compiled = Watched(engine.programs.compiled), engine.programs.compiled
    engine.programs.compiled = watched
    try:
        engine.release(engine.prefill(prompt(128))[0])
        sequence, _ = engine.prefill(prompt(128 + 40))
        one, two = engine.open(sequence), engine.open(sequence)
        for rows in (2, 4, 8, 16):
            one.step([1] * rows)
            one.accept([])
        decode(one, [1] * 24)
        two.prefill(prompt(40), 64, [192])
        one.close()
        two.close()
        engine.release(sequence)
    finally:
        engine.programs.compiled = compiled
    assert used == set(compiled)


def test_donation_takes_place(engine):
    """The pool is written where it lies: the old handles are gone, the memory is the same; sections are not donated."""
    slot = engine.open()
    addresses = {name: view.unsafe_buffer_pointer() for name, view in engine.pool.views.items()}

    def moved(act):
        old = dict(engine.pool.views)
        act()
        assert all(view.is_deleted() for view in old.values())
        assert {name: view.unsafe_buffer_pointer() for name, view in engine.pool.views.items()} == addresses

    first = slot.freeze()
    moved(lambda: prefill(slot, prompt(128)))
    moved(lambda: prefill(slot, prompt(50)))
    moved(lambda: decode(slot, prompt(3)))
    second = engine.hold(slot.freeze())
    other = engine.open(second)
    moved(lambda: decode(slot, [1]))
    moved(lambda: decode(other, [2]))  # with a copy of the page
    for sequence in (first, second):
        assert not any(a.is_deleted() for a in jax.tree.leaves((sequence.sections, sequence.open)))
    slot.close()
    other.close()
    engine.release(second)


def test_a_host_view_of_the_pool_is_seen(engine):
    """Control: while numpy looks into the pool's memory, jax cannot donate it and copies; nothing in the engine may do that."""
    slot = engine.open()
    prefill(slot, prompt(3))
    view = engine.pool.views["K"]
    address = view.unsafe_buffer_pointer()
    looking = np.asarray(view)
    decode(slot, [1])
    assert engine.pool.views["K"].unsafe_buffer_pointer() != address
    assert looking.size
    slot.close()


def nbytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


LARGE = dataclasses.replace(tiny_config().with_layers(24), hidden=256, intermediate=1024, key_dim=64, value_dim=64)


@pytest.fixture(scope="module")
def large(compile_cache):
    """Programs for a pool of 512 MiB and 24 layers; lowered from shapes, so none of it is allocated."""
    spec = layout(LARGE, 64)
    return Programs(Shapes(LARGE, spec, 2**29 // spec.page_bytes, 32))


def test_no_program_has_a_temporary_of_the_size_of_what_it_reads(large):
    """G6: not of the pool, not of the stacked weights, not of the states; a temporary is a layer's or a few rows'."""
    spec = large.shapes.layout
    pool = large.shapes.pool_pages * spec.page_bytes
    stacks = weights.spec(LARGE)
    stacked = nbytes((stacks["gdn"], stacks["attention"]))
    sizes = {key: program.memory_analysis().temp_size_in_bytes for key, program in large.compiled.items()}
    assert pool > 2**28
    assert stacked > 2**23
    for key, size in sizes.items():
        assert size < pool / 16, key
        assert size < stacked / 4, key


def test_no_step_copies_a_layers_weights(large):
    """A forward within a block reads each matrix where it lies: its temporaries are a small part of one layer's weights."""
    read = {"attention": weights.layer_spec(LARGE, "attention"), "gdn step": weights.layer_spec(LARGE, "gdn"), "logits": weights.spec(LARGE)["head"]}
    for kind, leaves in read.items():
        for rows in (2, 4, 8, 16):
            assert large.compiled[kind, rows].memory_analysis().temp_size_in_bytes < nbytes(leaves) / 8, (kind, rows)


def test_what_is_donated_is_written_in_place(large):
    """The pool by attention and by the copy of a page, a layer's scratch by the layer, and the rows by both."""
    pool = large.shapes.pool_pages * large.shapes.layout.page_bytes
    specs = scratch_specs(LARGE)
    scratch, inputs = nbytes(specs), nbytes([specs[name] for name in ("u", "b", "a")])  # a chunk makes the rest anew
    assert scratch > 2**17
    for key, program in large.compiled.items():
        kind = key if isinstance(key, str) else key[0]
        rows = 0 if isinstance(key, str) else 2 * key[1] * LARGE.hidden
        wanted = {"attention": pool + rows, "gdn step": scratch + rows, "gdn chunk": inputs + rows, "close": scratch, "copy_page": pool}.get(kind, 0)
        assert program.memory_analysis().alias_size_in_bytes == wanted, key


def copies_of_a_state(compiled) -> int:
    """Copies of one layer's S in a program's loops; what is not in the text's last part, the entry, is in a loop or in a fusion."""
    shape = re.escape(f"f32[{LARGE.value_heads},{LARGE.key_dim},{LARGE.value_dim}]")
    loops, _ = compiled.as_text().split("\nENTRY ")
    return len(re.findall(rf" = {shape}\S* copy\(", loops))


def test_a_block_without_a_mark_copies_no_state(large):
    """Control: what is caught before S moves on is copied at every block, marked or not."""

    def states(S, marked, before):
        def block(carry, mark):
            S, caught = carry
            new = S * 0.5 + jnp.sin(S)
            return (new, jax.lax.cond(mark, lambda: S if before else new, lambda: caught)), None

        return jax.lax.scan(block, (S, S), marked)[0]

    S = jax.ShapeDtypeStruct((LARGE.value_heads, LARGE.key_dim, LARGE.value_dim), np.float32)
    marked = jax.ShapeDtypeStruct((8,), np.bool_)
    late, early = (copies_of_a_state(jax.jit(partial(states, before=before)).lower(S, marked).compile()) for before in (False, True))
    assert early > late
    assert copies_of_a_state(large.compiled["gdn chunk", 64]) == 0


def test_the_plain_baseline_is_not_slowed_down_by_copies(large):
    """`qjax bench engine` compares with it: pool and state are written in place there too, and no layer's weights are copied."""
    pool = {view.name: jax.ShapeDtypeStruct((large.shapes.pool_pages, *view.page_shape(64)), np.uint16) for view in large.shapes.layout.views}
    state = large.shapes.layout.section_bytes // LARGE.gdn_layers
    table = jax.ShapeDtypeStruct((large.shapes.sequence_pages,), np.int32)
    for width in (2, 16):
        found = {key: program.memory_analysis() for key, program in plain_programs(LARGE, pool, table, width).items()}
        rows = 2 * width * LARGE.hidden
        wanted = {"embed": 0, "gdn": state + rows, "attention": nbytes(pool) + rows, "logits": 0}
        assert {key: memory.alias_size_in_bytes for key, memory in found.items()} == wanted
        assert max(memory.temp_size_in_bytes for memory in found.values()) < 2**18


def test_the_bound_on_temporaries_would_notice(large):
    """Control: a program that reads the pool again after it has written to it keeps the whole of it aside."""

    def late(view, at):
        new = jax.lax.dynamic_update_slice_in_dim(view, jnp.ones_like(view[:1]), at, axis=0)
        return new, jnp.sum(jax.lax.dynamic_slice_in_dim(view, at, 1, axis=0))

    shape = (large.shapes.pool_pages, *large.shapes.layout.views[0].page_shape(64))
    specs = jax.ShapeDtypeStruct(shape, np.uint16), jax.ShapeDtypeStruct((), np.int32)
    compiled = jax.jit(late, donate_argnums=0).lower(*specs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 2 * np.prod(shape, dtype=np.int64)
