"""The state caught at block lines inside a prefill forward: it has the bits of a run that ended there, and keeps them."""

from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qjax.config import EngineConfig
from qjax.engine import Engine
from tests.bits import assert_bits_equal
from tests.models import prompt, random_model, tiny_config
from tests.runs import chunk_shapes, cold, decode, kept, new_pool, new_slot, prefill, row_logits

LENGTH = 1000


@pytest.fixture(scope="module")
def engine(compile_cache):
    """Two pages of 512 a sequence, so that a forward passes up to eight block lines: aligned with 512 rows, unaligned with 64 and 256."""
    return Engine(random_model(tiny_config()), EngineConfig(grid=512, context_tokens=1024, compile_cache=compile_cache))


@pytest.fixture(scope="module")
def ended(engine):
    """mark -> what a run keeps whose prefill ended there."""
    return {mark: cold(engine, prompt(mark)) for mark in range(64, LENGTH, 64) if mark % 512}


@pytest.fixture(scope="module")
def logits(engine):
    """Every row's logits of one run."""
    slot, rows = new_slot(engine, new_pool(engine)), []
    while slot.length < LENGTH:
        n, shape = slot.plan(LENGTH - slot.length)
        rows.append(row_logits(slot, slot.prefill(prompt(LENGTH)[slot.length : slot.length + n], shape)[0], n))
    return np.concatenate(rows)


def begun(engine, start):
    pool = new_pool(engine)
    slot = new_slot(engine, pool)
    if start:
        prefill(slot, prompt(start))
    return pool, slot


def catching(engine, start, n, shape, marks):
    """A slot that has read n rows from `start` in one forward: (pool, slot, hidden, what it caught)."""
    pool, slot = begun(engine, start)
    return pool, slot, *slot.prefill(prompt(LENGTH)[start : start + n], shape, marks)


@pytest.mark.parametrize(
    ("start", "n", "shape", "marks"),
    [
        (0, 512, 512, (64, 448)),  # the first line inside a grid chunk and the last
        (0, 512, 512, (256,)),
        (0, 512, 512, (64, 128)),
        (0, 449, 512, (448,)),  # one row past the mark
        (0, 65, 512, (64,)),
        (512, 450, 512, (576, 960)),  # in the second page, with padding
        (0, 256, 256, (64, 192)),  # an unaligned forward at a page's first row
        (64, 256, 256, (128, 256)),  # at a line
        (100, 256, 256, (128, 320)),  # off a line
        (63, 256, 256, (64, 256)),
        (65, 256, 256, (128, 320)),  # one row past the last mark
        (300, 200, 256, (448,)),
        (700, 256, 256, (704, 896)),
        (100, 64, 64, (128,)),
        (127, 64, 64, (128,)),
        (65, 64, 64, (128,)),
        (127, 2, 64, (128,)),
    ],
)
def test_a_caught_state_is_that_of_a_run_which_ended_there(engine, ended, start, n, shape, marks):
    pool, slot, hidden, found = catching(engine, start, n, shape, marks)
    assert [int(one.length) for one in found] == list(marks)
    for mark, one in zip(marks, found, strict=True):
        assert_bits_equal(kept(pool, one), ended[mark])
        assert list(one.pages) == slot.pages[: mark // 512 + 1]
        for other in set(marks) - {mark}:  # control: the next line's state is another one
            with pytest.raises(AssertionError, match=r"gdn\.S.*\n.*gdn\.conv"):
                assert_bits_equal(kept(pool, one)["sections"], ended[other]["sections"])
    other_pool, without, plain, none = catching(engine, start, n, shape, ())
    assert none == []
    assert_bits_equal(hidden, plain)
    assert_bits_equal(kept(pool, slot.freeze()), kept(other_pool, without.freeze()))


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_at_any_marks_of_any_forward(engine, ended, data):
    start = data.draw(st.integers(0, 950), "start")
    pool, slot = begun(engine, start)
    shape = data.draw(st.sampled_from(chunk_shapes(slot)), "shape")
    n = data.draw(st.integers(1, min(shape, slot.room(), LENGTH - start)), "rows")
    lines = range(start // 64 * 64 + 64, start + n, 64)
    marks = data.draw(st.sampled_from([(), *combinations(lines, 1), *combinations(lines, 2)]), "marks")
    _, found = slot.prefill(prompt(LENGTH)[start : start + n], shape, marks)
    assert len(found) == len(marks)
    for mark, one in zip(marks, found, strict=True):
        assert_bits_equal(kept(pool, one), ended[mark])


@pytest.mark.parametrize(("start", "n", "shape", "mark"), [(0, 512, 512, 192), (100, 256, 256, 320), (100, 64, 64, 128)])
@pytest.mark.parametrize("maker", ["at work", "closed"])
def test_going_on_from_a_caught_state_equals_one_run(engine, logits, start, n, shape, mark, maker):
    """Every row's logits; the slot that made it may have written on in the page, and then whoever goes on from there takes a copy."""
    pool, slot, _, (caught,) = catching(engine, start, n, shape, (mark,))
    pool.hold(caught.pages)
    if maker == "closed":
        slot.close()
    again = new_slot(engine, pool, caught)
    rows = decode(again, prompt(LENGTH)[mark : mark + 3])
    assert again.pages != list(caught.pages)
    assert_bits_equal(rows, logits[mark : mark + 3])
    while again.length < LENGTH:
        n, shape = again.plan(LENGTH - again.length)
        at = again.length
        assert_bits_equal(row_logits(again, again.prefill(prompt(LENGTH)[at : at + n], shape)[0], n), logits[at : at + n])
    assert_bits_equal(kept(pool, again.freeze()), cold(engine, prompt(LENGTH)))


@pytest.mark.parametrize("leaf", ["gdn.S", "gdn.conv"])
def test_each_caught_section_counts(engine, logits, leaf):
    """Control: one of them zeroed, and the rows after it are others."""
    pool, _, _, (caught,) = catching(engine, 0, 512, 512, (192,))
    pool.hold(caught.pages)
    broken = caught.replace(sections=caught.sections | {leaf: jnp.zeros_like(caught.sections[leaf])})
    assert_bits_equal(prefill(new_slot(engine, pool, caught), prompt(512)[192:]), logits[511])
    assert not np.array_equal(prefill(new_slot(engine, pool, broken), prompt(512)[192:]), logits[511])


def test_a_caught_state_keeps_its_bytes(engine, ended):
    """A14: while the slot that made it decodes 64 tokens with donation, while two others go on from it in turns, and when all are closed."""
    pool, slot, _, found = catching(engine, 100, 256, 256, (128, 320))
    for one in found:
        pool.hold(one.pages)
    one, two = new_slot(engine, pool, found[0]), new_slot(engine, pool, found[0])
    old, before = pool.views["K"], kept(pool, slot.freeze())
    tails = [prompt(64, seed=seed) for seed in (1, 2, 3)]
    for at in range(0, 64, 16):
        for writer, tail in zip((slot, one, two), tails, strict=True):
            decode(writer, tail[at : at + 16])
    assert old.is_deleted()  # the pool was donated, so the caught rows survived in place
    assert slot.length == 356 + 64
    assert_bits_equal([kept(pool, caught) for caught in found], [ended[128], ended[320]])
    with pytest.raises(AssertionError, match=r"gdn\.S"):  # control: the slot's own state did change
        assert_bits_equal(kept(pool, slot.freeze())["sections"], before["sections"])
    for writer, length, tail in ((slot, 356, tails[0]), (one, 128, tails[1]), (two, 128, tails[2])):
        assert_bits_equal(kept(pool, writer.freeze()), cold(engine, [*prompt(length), *tail]))
        writer.close()
    assert_bits_equal([kept(pool, caught) for caught in found], [ended[128], ended[320]])
    for caught in found:
        pool.release(caught.pages)
    assert pool.free == pool.pages


def test_what_is_caught_shares_nothing_with_the_slot(engine):
    """The caller may keep and change the host arrays; the open inputs are one set of zeros for every sequence that ends on a line."""
    _, slot, _, (one, two) = catching(engine, 0, 512, 512, (64, 192))
    frozen = slot.freeze()
    for name, array in frozen.open.items():
        assert one.open[name] is two.open[name] is array
        assert not np.asarray(array).any()
    one.tokens[:] = 0
    one.pages[:] = -1
    one.open.clear()
    assert_bits_equal(slot.freeze().tokens, prompt(512))
    assert_bits_equal(two.tokens, prompt(192))
    assert slot.pages == list(two.pages)
    assert set(two.open) == set(slot.freeze().open) == set(frozen.open)


@pytest.mark.parametrize("marks", [(100,), (64,), (120,), (320,), (384,), (-64,), (128, 192, 256), (192, 128), (128, 128), (128, 130)])
def test_marks_that_do_not_fit_are_refused(engine, marks):
    """From 64 to 320; nothing has changed by then."""
    pool, slot = begun(engine, 64)
    before, free = kept(pool, slot.freeze()), pool.free
    with pytest.raises(ValueError, match=r"from 64 to 320 has at most 2 marks, ascending multiples of 64 between the two, found \["):
        slot.prefill(prompt(320)[64:], 256, marks)
    assert (slot.length, pool.free) == (64, free)
    assert_bits_equal(kept(pool, slot.freeze()), before)
    _, found = slot.prefill(prompt(320)[64:], 256, (128, 256))
    assert len(found) == 2
