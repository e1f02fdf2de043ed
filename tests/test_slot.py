"""A slot refuses what does not fit it before a page is taken, and opens at a block line without computing anything."""

import numpy as np
import pytest

from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import cold, decode, kept, prefill


def unchanged(engine, slot):
    return kept(engine.pool, slot.freeze()), list(slot.pages), engine.pool.free, engine.pool.fill.tolist(), engine.pool.holders.tolist()


@pytest.mark.parametrize("how", ["step", "prefill"])
def test_the_longest_sequence_takes_no_row_more(small, how):
    """All 7 pages of 64 are full: the error has both numbers, and no page was taken."""
    slot = small.open()
    prefill(slot, prompt(448))
    before = unchanged(small, slot)
    with pytest.raises(ValueError, match="expected at most 448 tokens in a sequence, found 448 and 1 more"):
        slot.step([1]) if how == "step" else slot.prefill([1], 64)
    assert_bits_equal(unchanged(small, slot), before)
    slot.accept([])
    assert_bits_equal(before[0], cold(small, prompt(448)))
    slot.close()


@pytest.mark.parametrize(
    ("start", "n", "shape", "message"),
    [
        (0, 0, 64, "a prefill at 0 of shape 64 takes 1 to 64 rows, found 0"),
        (0, 65, 64, "a prefill at 0 of shape 64 takes 1 to 64 rows, found 65"),
        (100, 29, 64, "a prefill at 100 of shape 64 takes 1 to 28 rows, found 29"),  # 28 rows are left of the page
        (0, 20, 65, r"a prefill at 0 has the shape of one of \(64, 128\), the last one at a page's first row only: found 65"),
        (64, 64, 128, r"a prefill at 64 has the shape of one of \(64, 128\), the last one at a page's first row only: found 128"),
    ],
)
def test_a_prefill_that_does_not_fit_is_refused(engine, start, n, shape, message):
    slot = engine.open()
    if start:
        prefill(slot, prompt(start))
    before = unchanged(engine, slot)
    with pytest.raises(ValueError, match=message):
        slot.prefill(prompt(start + n)[start:], shape)
    assert_bits_equal(unchanged(engine, slot), before)
    slot.close()


@pytest.mark.parametrize("length", [100, 128])
def test_a_closed_slot_is_done(engine, length):
    """Its pages may be another's by now: it writes none, and gives none away."""
    slot = engine.open()
    prefill(slot, prompt(length))
    slot.step([1, 2])
    slot.close()
    slot.close()
    before = {name: np.asarray(view).copy() for name, view in engine.pool.views.items()}
    for act in (slot.freeze, lambda: slot.step([1]), lambda: slot.prefill([1], 64)):
        with pytest.raises(RuntimeError, match=f"the slot of {length} tokens is closed"):
            act()
    with pytest.raises(ValueError, match="found 1 tokens"):
        slot.accept([1])
    assert engine.pool.free == engine.pool.pages
    assert_bits_equal(dict(engine.pool.views), before)


class Called(dict):
    """A set of programs that says which were called."""

    def __init__(self, compiled):
        super().__init__(compiled)
        self.keys_used = []

    def __getitem__(self, key):
        self.keys_used.append(key)
        return super().__getitem__(key)


@pytest.mark.parametrize(("length", "programs"), [(128, ["place", "sections"]), (192, ["place", "sections"]), (200, ["place", "inputs", "sections"])])
def test_an_open_block_is_computed_for_a_step_only_and_at_a_line_not_copied(engine, monkeypatch, length, programs):
    sequence, _ = engine.prefill(prompt(length))
    called = Called(engine.programs.compiled)
    monkeypatch.setattr(engine.programs, "compiled", called)
    slot = engine.open(sequence)
    again = slot.freeze()
    assert called.keys_used == programs
    assert_bits_equal(kept(engine.pool, again), kept(engine.pool, sequence))
    assert all(again.open[name] is sequence.open[name] for name in again.open) == (length % 64 == 0)
    assert any(np.asarray(a).any() for a in again.open.values()) == (length % 64 > 0)
    called.keys_used.clear()
    slot.prefill(prompt(20, seed=1), 64)
    assert "reopen" not in called.keys_used
    slot.close()
    slot = engine.open(sequence)
    slot.step([1])
    assert ("reopen" in called.keys_used) == (length % 64 > 0)
    slot.close()
    engine.release(sequence)


@pytest.mark.parametrize("length", [64, 128, 192])
def test_a_sequence_cut_to_its_line_goes_on_as_one_that_ended_there(engine, length):
    """What the open inputs hold past the length is never read, at a line as little as elsewhere."""
    whole, _ = engine.prefill(prompt(length + 40))
    cut = whole.cut(length, engine.layout.grid)
    assert np.asarray(cut.open["gdn.b"]).any()
    slot = engine.open(cut)
    decode(slot, prompt(70, seed=4))
    assert_bits_equal(kept(engine.pool, slot.freeze()), cold(engine, [*prompt(length), *prompt(70, seed=4)]))
    slot.close()
    engine.release(whole)
