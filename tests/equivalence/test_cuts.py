"""Row purity: 0 differing bits in every row's logits, in the sections, the K and V rows and the open block, however a prompt is cut."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qjax.config import EngineConfig
from qjax.engine import Engine
from tests.bits import assert_bits_equal
from tests.models import prompt, random_model, wide_config
from tests.runs import block_room, chunk_shapes, decode, kept, new_pool, new_slot, prefill, row_logits


def pieces(least_step, least_chunk):
    """Cuts at random, at least one forward among them."""
    step = st.tuples(st.just("step"), st.integers(least_step, 16), st.integers(0, 15))  # right rows, wrong ones drafted behind them
    chunk = st.tuples(st.just("chunk"), st.integers(least_chunk, 300), st.integers(0, 2))  # rows, which of the shapes that hold them
    resume = st.tuples(st.just("resume"), st.just(0), st.just(0))  # freeze, close, open again: the open block is made from its inputs
    return st.lists(st.one_of(step, chunk, resume), min_size=1, max_size=10).filter(lambda some: any(kind != "resume" for kind, _, _ in some))


SINGLE, BLOCKS = [("step", 1, 0)], [("step", n, 0) for n in range(2, 17)]
DRAFTED = [("step", 5, 11), ("step", 1, 15), ("step", 15, 1), ("resume", 0, 0)]
ODD = [("chunk", 13, 0), ("chunk", 64, 1), ("chunk", 3, 2), ("chunk", 111, 0), ("resume", 0, 0), ("step", 7, 0)]


def drive(engine, tokens, cut, broken=None):
    """Forwards the tokens in the pieces of a cut, in turn until all are read: (logits [N, V], what the sequence keeps, how often each came up).

    broken: a leaf of the first resumed sequence that is zeroed.
    """
    pool = new_pool(engine)
    slot = new_slot(engine, pool)
    rows, count, turn = [], {"step": 0, "chunk": 0, "resume": 0, "rejected": 0, "block crossed": 0}, 0
    while slot.length < len(tokens):
        kind, n, more = cut[turn % len(cut)]
        turn += 1
        rest = tokens[slot.length :]
        if kind == "resume":
            sequence = slot.freeze()
            pool.hold(sequence.pages)
            slot.close()
            if broken and not count["resume"]:
                sequence = zeroed(pool, sequence, broken)
            slot = new_slot(engine, pool, sequence)
            pool.release(sequence.pages)
        elif kind == "step":
            right = rest[: min(n, slot.verify_room())]
            wrong = (prompt(16, seed=9) + 1)[: min(more, slot.verify_room() - len(right))]
            rows.append(slot.step([*right, *wrong])[: len(right)])
            slot.accept(right)
            count["rejected"] += len(wrong) > 0
        else:
            right = rest[: min(n, slot.room(), chunk_shapes(slot)[-1])]
            count["block crossed"] += len(right) > block_room(slot)
            shapes = [s for s in chunk_shapes(slot) if s >= len(right)]
            shape = shapes[more % len(shapes)]
            rows.append(row_logits(slot, slot.prefill(right, shape)[0], len(right)))
        count[kind] += 1
    return np.concatenate(rows), kept(pool, slot.freeze()), count


def zeroed(pool, sequence, leaf):
    if leaf in pool.views:
        pool.views = pool.views | {leaf: pool.views[leaf].at[int(sequence.pages[0])].set(0)}
        return sequence
    kind = "sections" if leaf in sequence.sections else "open"
    arrays = getattr(sequence, kind)
    return sequence.replace(**{kind: arrays | {leaf: jnp.zeros_like(arrays[leaf])}})


def in_one_go(engine, length):
    """The reference: the forwards that the engine itself plans, with every row's logits."""
    tokens, pool = prompt(length), new_pool(engine)
    slot, rows = new_slot(engine, pool), []
    while slot.length < length:
        n, shape = slot.plan(length - slot.length)
        rows.append(row_logits(slot, slot.prefill(tokens[slot.length : slot.length + n], shape)[0], n))
    return tokens, np.concatenate(rows), kept(pool, slot.freeze())


@pytest.fixture(scope="module")
def embedded_reference(embedded_engine):
    return embedded_engine, *in_one_go(embedded_engine, 330)


@pytest.fixture(scope="module")
def tiny_reference(tiny_engine):
    return tiny_engine, *in_one_go(tiny_engine, 230)


@pytest.fixture(scope="module")
def wide_reference(compile_cache):
    """The widths of the 0.8B model in four layers; a grid of 256, so that a chunk holds four blocks."""
    engine = Engine(random_model(wide_config()), EngineConfig(grid=256, context_tokens=512, compile_cache=compile_cache))
    return engine, *in_one_go(engine, 400)


def check(reference, cut):
    engine, tokens, logits, end = reference
    found, state, count = drive(engine, tokens, cut)
    assert len(found) == len(tokens)
    assert_bits_equal(found, logits)
    assert_bits_equal(state, end)
    return count


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(cut=pieces(1, 1))
@example(cut=SINGLE)
@example(cut=BLOCKS)
@example(cut=DRAFTED)
@example(cut=ODD)
def test_embedded_model(embedded_reference, cut):
    check(embedded_reference, cut)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(cut=pieces(1, 1))
@example(cut=SINGLE)
@example(cut=BLOCKS)
@example(cut=DRAFTED)
@example(cut=ODD)
def test_random_model(tiny_reference, cut):
    check(tiny_reference, cut)


@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow])
@given(cut=pieces(3, 60))
@example(cut=SINGLE + BLOCKS)
@example(cut=DRAFTED + ODD)
def test_wide_model(wide_reference, cut):
    check(wide_reference, cut)


def test_the_cuts_are_what_they_claim(tiny_reference, embedded_reference):
    assert check(tiny_reference, SINGLE) == {"step": 230, "chunk": 0, "resume": 0, "rejected": 0, "block crossed": 0}
    assert check(tiny_reference, DRAFTED)["rejected"] > 20
    count = check(embedded_reference, ODD)
    assert min(count[what] for what in ("chunk", "resume", "step", "block crossed")) > 0


@pytest.mark.parametrize("leaf", ["gdn.S", "gdn.conv", "gdn.u", "gdn.b", "gdn.a", "K", "V"])
@pytest.mark.parametrize("reference", ["embedded_reference", "tiny_reference", "wide_reference"])
def test_a_wrong_state_shows_to_the_last_row(request, reference, leaf):
    """Control: one leaf zeroed at a resume two rows past a line, and the rows after it differ, also the last."""
    engine, tokens, logits, _ = request.getfixturevalue(reference)
    cut = [("chunk", 64, 0), ("step", 2, 0), ("resume", 0, 0), *[("chunk", 64, 0)] * 10]
    found, _, count = drive(engine, tokens[:220], cut, broken=leaf)
    assert count["resume"] == 1
    assert_bits_equal(found[:66], logits[:66])
    assert not np.array_equal(found[66], logits[66])
    assert not np.array_equal(found[-1], logits[219])


class Plain:
    """Plain decoding of PROMPT + ANSWER, a row at a time: the state at every length and the logits after it."""

    def __init__(self, engine, start, rows):
        pool = new_pool(engine)
        slot = new_slot(engine, pool)
        self.engine, self.start, self.answer = engine, start, []
        self.logits, self.states = [prefill(slot, prompt(start))], [kept(pool, slot.freeze())]
        for _ in range(rows):
            self.answer.append(int(self.logits[-1].argmax()))
            self.logits.append(decode(slot, self.answer[-1:])[0])
            self.states.append(kept(pool, slot.freeze()))

    def state(self, length):
        return self.states[length - self.start]


@pytest.fixture(scope="module")
def plain(tiny_engine):
    """From three rows before a block line over two more, 150 greedy tokens."""
    return Plain(tiny_engine, 125, 150)


def speculate(plain, width, right, rounds=1000):
    """Greedy decoding with drafts, `right` of them right in each round: what the verify blocks accept decides.

    After each round the state is that of plain decoding at the same length, bit for bit. Returns the lengths at which rounds ended.
    """
    engine, pool = plain.engine, new_pool(plain.engine)
    slot = new_slot(engine, pool)
    logits, done, ends = prefill(slot, prompt(plain.start)), 0, []
    assert_bits_equal(logits, plain.logits[0])
    while done + width <= len(plain.answer) and len(ends) < rounds:
        drafts = [t if i < right(len(ends)) else (t + 1) % 1000 for i, t in enumerate(plain.answer[done + 1 : done + width])]
        rows = [int(logits.argmax()), *drafts][: slot.verify_room()]
        found = slot.step(rows)
        taken = 1
        while taken < len(rows) and rows[taken] == int(found[taken - 1].argmax()):
            taken += 1
        assert taken == min(1 + right(len(ends)), len(rows))  # what was meant to be rejected was, and no more
        assert rows[:taken] == plain.answer[done : done + taken]
        slot.accept(rows[:taken])
        done, logits = done + taken, found[taken - 1]
        assert_bits_equal(found[:taken], np.stack(plain.logits[done - taken + 1 : done + 1]))
        assert_bits_equal(kept(pool, slot.freeze()), plain.state(slot.length))
        ends.append(slot.length)
    return ends


@pytest.mark.parametrize("width", range(1, 17))
def test_right_and_half_right_drafts(plain, width):
    """A16, A2: at every width; half right means another number in each round, so that blocks are ended at many offsets."""
    assert len(speculate(plain, width, lambda turn: width)) >= 134 // width
    ends = speculate(plain, width, lambda turn: turn * 7 % width)
    assert len(ends) > (134 // width if width > 1 else 100)


@pytest.mark.parametrize("width", [2, 5, 8, 16])
def test_wrong_drafts(plain, width):
    """A16: every draft wrong, then right, then half; the rounds end at every offset of a block."""
    ends = speculate(plain, width, lambda turn: 0)
    assert {end % 64 for end in ends} == set(range(64))
    mixed = speculate(plain, width, lambda turn: (0, width, width // 2)[turn % 3])
    assert len(mixed) > 134 // width


def test_a_rejected_row_that_was_taken_would_show(plain):
    """Control: the state after one wrong token more is another state."""
    pool = new_pool(plain.engine)
    slot = new_slot(plain.engine, pool)
    prefill(slot, prompt(plain.start))
    slot.step([plain.answer[0], 7])
    slot.accept([plain.answer[0]])
    assert_bits_equal(kept(pool, slot.freeze()), plain.state(126))
    slot.step([plain.answer[1] + 1])
    slot.accept([plain.answer[1]])  # a token that was not the one forwarded
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bits_equal(kept(pool, slot.freeze()), plain.state(127))
