"""The page pool: who holds which page, and that no writer disturbs another's rows."""

import numpy as np
import pytest

from qjax.pages import PagePool, PoolFull
from qjax.state import Layout, View, held
from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import cold, decode, kept, prefill

LAYOUT = Layout(sections=(), open=(), views=(View("K", 2, 3, 8, "bfloat16"), View("V", 2, 3, 4, "float32")), grid=64)


def test_the_pool_is_one_array_a_view_and_begins_with_zeros():
    pool = PagePool(LAYOUT, 5)
    assert {name: (a.shape, a.dtype) for name, a in pool.views.items()} == {
        "K": ((5, 2, 3, 64, 8), np.uint16),
        "V": ((5, 2, 3, 64, 4), np.float32),
    }
    assert not any(np.asarray(a).any() for a in pool.views.values())
    assert pool.nbytes == sum(a.nbytes for a in pool.views.values()) == 5 * LAYOUT.page_bytes
    assert pool.free == 5


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match=r"at least one page of 12,288 bytes, found 0"):
        PagePool(LAYOUT, 0)


def test_pages_are_counted():
    pool = PagePool(LAYOUT, 3)
    a, b = pool.take(), pool.take()
    assert a != b
    assert pool.free == 1
    pool.hold([a])
    pool.hold([a, b])
    pool.release([a])
    assert list(pool.holders[[a, b]]) == [2, 2]
    pool.release([a, b])
    pool.release([a, b])
    assert pool.free == 3
    assert not pool.holders.any()


def test_a_full_pool_says_so():
    pool = PagePool(LAYOUT, 2)
    taken = [pool.take(), pool.take()]
    with pytest.raises(PoolFull, match=r"all 2 pages of 64 tokens are held: .*--kv-gb"):
        pool.take()
    pool.release(taken[:1])
    assert pool.take() == taken[0]


@pytest.mark.parametrize("act", ["hold", "release"])
def test_a_page_that_nobody_holds_is_neither_held_nor_released(act):
    pool = PagePool(LAYOUT, 2)
    page = pool.take()
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is"):
        getattr(pool, act)([page])
    assert pool.free == 2
    assert not pool.holders.any()


@pytest.mark.parametrize("act", ["hold", "release"])
def test_a_refused_call_changes_no_page(act):
    """The first page is somebody else's by now: a sequence released twice must not take their hold away."""
    pool = PagePool(LAYOUT, 3)
    shared, gone = pool.take(), pool.take()
    pool.release([gone])
    with pytest.raises(ValueError, match=f"page {gone} is"):
        getattr(pool, act)([shared, gone])
    assert pool.holders[shared] == 1
    assert pool.free == 2


def test_rows_are_those_of_the_pages_in_order():
    pool = PagePool(LAYOUT, 4)
    views = {name: np.random.default_rng(1).integers(0, 100, a.shape).astype(a.dtype) for name, a in pool.views.items()}
    pool.views = dict(views)
    for name in ("K", "V"):
        for length in (1, 63, 64, 65, 130):
            pages = [2, 0, 3][: -(-length // 64)]
            expected = np.stack([views[name][pages[i // 64], :, :, i % 64] for i in range(length)], axis=2)
            assert_bits_equal(pool.rows(name, pages, length), expected)


def test_rows_of_an_empty_sequence_are_none_of_the_views_dtype():
    rows = PagePool(LAYOUT, 1).rows("K", [], 0)
    assert (rows.shape, rows.dtype) == ((2, 3, 0, 8), held("bfloat16"))


def begun(engine, length):
    """A held sequence of that many tokens, nobody else at work."""
    sequence, _ = engine.prefill(prompt(length))
    return sequence


@pytest.mark.parametrize("length", [100, 127, 128, 129, 192, 256])
@pytest.mark.parametrize("how", ["step", "prefill"])
def test_two_continuations_disturb_neither_each_other_nor_the_original(engine, length, how):
    """In a block, at its line, at a page's line and next to it; the second writer gets a copy where the page is partly filled."""
    first = begun(engine, length)
    before = kept(engine.pool, first)
    one, two = engine.open(first), engine.open(first)
    tails = prompt(40, seed=1), prompt(40, seed=2)
    for at in range(0, 40, 20):  # in turns
        for slot, tail in ((one, tails[0]), (two, tails[1])):
            (decode if how == "step" else prefill)(slot, tail[at : at + 20])
    shared = length // 128
    assert one.pages[:shared] == two.pages[:shared] == list(first.pages[:shared])
    assert set(one.pages[shared:]).isdisjoint(two.pages[shared:])
    assert (one.pages[shared] == first.pages[-1]) == (length % 128 > 0)  # the first writer went on in place
    assert_bits_equal(kept(engine.pool, first), before)
    for slot, tail in ((one, tails[0]), (two, tails[1])):
        assert_bits_equal(kept(engine.pool, slot.freeze()), cold(engine, np.concatenate([prompt(length), tail])))
        slot.close()
    assert_bits_equal(kept(engine.pool, first), before)
    engine.release(first)


def test_a_sole_holder_writes_in_place(engine):
    """Where the original was released, going on from a shorter length costs no page."""
    slot = engine.open()
    prefill(slot, prompt(70))
    first = slot.freeze()
    decode(slot, prompt(5, seed=1))
    again = engine.open(first)
    slot.close()
    pages, free = list(again.pages), engine.pool.free
    decode(again, prompt(9, seed=2))
    assert (again.pages, engine.pool.free) == (pages, free)
    assert_bits_equal(kept(engine.pool, again.freeze()), cold(engine, np.concatenate([prompt(70), prompt(9, seed=2)])))
    again.close()


def test_a_rejected_draft_lowers_the_mark(engine):
    """Nobody kept the rejected rows, so another may write where they are; but not while they wait for the answer."""
    first = begun(engine, 70)
    page, free = first.pages[-1], engine.pool.free
    one, two = engine.open(first), engine.open(first)
    one.step([8, 8])
    one.accept([])  # all of it
    assert engine.pool.fill[page] == 70
    one.step([1, 2, 3, 4, 5])
    assert engine.pool.fill[page] == 75
    one.accept([1])
    assert engine.pool.fill[page] == 71
    second = engine.hold(one.freeze())
    three = engine.open(second)
    decode(three, [9, 9])  # at the mark: in place, over the rejected rows
    assert (three.pages, engine.pool.free) == ([page], free)
    decode(one, [2, 3])  # no longer at the mark
    decode(two, [7])
    assert len({one.pages[0], two.pages[0], page}) == 3
    for slot, tail in ((one, [1, 2, 3]), (two, [7]), (three, [1, 9, 9])):
        assert_bits_equal(kept(engine.pool, slot.freeze()), cold(engine, [*prompt(70), *tail]))
        slot.close()
    assert_bits_equal(kept(engine.pool, second), cold(engine, [*prompt(70), 1]))
    engine.release(first)
    engine.release(second)


def test_accepting_nothing_without_a_step_lowers_no_mark(engine):
    """As after a step that failed for want of a page: the rows past this length may be another's, who keeps them."""
    first = begun(engine, 70)
    one, two = engine.open(first), engine.open(first)
    decode(one, [1, 2])
    second = engine.hold(one.freeze())
    before = kept(engine.pool, second)
    two.accept([])
    decode(two, [9])
    found = kept(engine.pool, second)
    for slot in (one, two):
        slot.close()
    for sequence in (first, second):
        engine.release(sequence)
    assert_bits_equal(found, before)


def test_no_more_rows_are_taken_than_were_forwarded(engine):
    slot = engine.open()
    prefill(slot, prompt(70))
    for _ in range(2):
        with pytest.raises(ValueError, match="forwarded 0 rows that are not taken, found 1 tokens"):
            slot.accept([1])
        slot.step([1, 2])
        with pytest.raises(ValueError, match="forwarded 2 rows that are not taken, found 3 tokens"):
            slot.accept([1, 2, 3])
        slot.accept([1])
    assert slot.length == 72
    slot.close()


def test_a_draft_rejected_at_a_grid_line_leaves_no_page_behind(engine):
    """The page taken for it stays the slot's own for its next row, is not in a sequence, and is free when the slot closes."""
    slot = engine.open()
    prefill(slot, prompt(128))
    slot.step([1, 2, 3])
    slot.accept([])
    assert len(slot.freeze().pages) == 1
    decode(slot, [4])
    assert len(slot.pages) == 2
    assert_bits_equal(kept(engine.pool, slot.freeze()), cold(engine, [*prompt(128), 4]))
    slot.step([1])
    slot.accept([])
    slot.close()


def test_a_sequence_released_twice_is_refused(engine):
    sequence = begun(engine, 200)
    engine.release(sequence)
    with pytest.raises(ValueError, match="released more often than it was held"):
        engine.release(sequence)
    with pytest.raises(ValueError, match="held by nobody"):
        engine.open(sequence)
    assert engine.pool.free == engine.pool.pages


def test_a_full_pool_refuses_and_everything_else_goes_on(engine):
    sequence = begun(engine, 100)
    before = kept(engine.pool, sequence)
    others = [engine.pool.take() for _ in range(engine.pool.free)]
    one, two = engine.open(sequence), engine.open(sequence)
    decode(one, [1])
    with pytest.raises(PoolFull):
        two.step([2])  # needs a copy
    with pytest.raises(PoolFull):
        engine.prefill(prompt(300), sequence)
    assert engine.pool.free == 0
    engine.pool.release(others)
    decode(two, [2])
    assert_bits_equal(kept(engine.pool, one.freeze()), cold(engine, [*prompt(100), 1]))
    assert_bits_equal(kept(engine.pool, two.freeze()), cold(engine, [*prompt(100), 2]))
    assert_bits_equal(kept(engine.pool, sequence), before)
    one.close()
    two.close()
    engine.release(sequence)
