"""Prefill and resume: the last row's logits and the state have the bits of a cold run, wherever a prompt was cut or broken off."""

import signal
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.engine import ContextOverflow
from qjax.generation import Cancelled, Progress
from qjax.pages import PagePool, PoolFull
from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import cold, decode, kept, new_pool, prefill, run

EDGES = [g * 128 + more for g in (0, 1, 2) for more in (0, 1, 2, 63, 64, 65, 127)][1:]


@pytest.mark.parametrize("length", EDGES)
def test_the_first_logits_at_every_edge(engine, length):
    """A12, A11: around block and grid lines, in one go, token by token and in odd pieces."""
    tokens = prompt(length)
    expected, logits = run(engine, tokens)
    assert np.isfinite(logits).all()
    assert logits.shape == (engine.model.config.vocab,)
    assert logits.dtype == np.float32
    slot = engine.open()
    assert_bits_equal(decode(slot, tokens)[-1], logits)
    assert_bits_equal(kept(engine.pool, slot.freeze()), expected)
    slot.close()
    slot = engine.open()
    for start in range(0, length, 37):
        last = prefill(slot, tokens[start : start + 37])
    assert_bits_equal(last, logits)
    assert_bits_equal(kept(engine.pool, slot.freeze()), expected)
    slot.close()
    assert not np.array_equal(run(engine, [*tokens[:-1], (tokens[-1] + 1) % 1000])[1], logits)  # control: the tokens count


def test_a_prompt_is_read_in_the_forwards_that_were_planned(engine, monkeypatch):
    """300 tokens on a grid of 128: two whole chunks, then the tail, of which nothing is read twice."""
    seen = []
    slot = engine.open()
    monkeypatch.setattr(type(slot), "prefill", _counting(type(slot).prefill, seen, "prefill"))
    monkeypatch.setattr(type(slot), "step", _counting(type(slot).step, seen, "step"))
    slot.close()
    run(engine, prompt(300))
    assert seen == [("prefill", 128), ("prefill", 128), ("prefill", 44)]
    seen.clear()
    run(engine, prompt(270))
    assert seen == [("prefill", 128), ("prefill", 128), ("step", 14)]
    seen.clear()
    run(engine, prompt(280))
    assert seen == [("prefill", 128), ("prefill", 128), ("step", 16), ("step", 8)]


def _counting(method, seen, name):
    def counted(self, tokens, *more, **named):
        seen.append((name, len(tokens)))
        return method(self, tokens, *more, **named)

    return counted


@pytest.mark.parametrize("start", [1, 40, 64, 127, 128, 129, 200, 256, 299])
def test_going_on_equals_a_cold_run(engine, start):
    """From a block line, a grid line, off both, and one token before the end (D2); the start is not read again and stays as it is."""
    tokens = prompt(300)
    expected, logits = run(engine, tokens)
    head, _ = engine.prefill(tokens[:start])
    before, reports = kept(engine.pool, head), []
    found, warm = run(engine, tokens, head, progress=reports.append)
    assert (reports[0].done, reports[0].start, reports[-1].done) == (start, start, 300)
    assert_bits_equal(warm, logits)
    assert_bits_equal(found, expected)
    assert_bits_equal(kept(engine.pool, head), before)
    engine.release(head)


def zeroed(engine, head, leaf):
    """The sequence with one leaf's bits, or one page of a view, zeroed."""
    if leaf in engine.pool.views:
        view = engine.pool.views[leaf]
        engine.pool.views = engine.pool.views | {leaf: view.at[int(head.pages[0])].set(0)}
        return head
    kind = "sections" if leaf in head.sections else "open"
    arrays = getattr(head, kind)
    return head.replace(**{kind: arrays | {leaf: jnp.zeros_like(arrays[leaf])}})


@pytest.mark.parametrize("leaf", ["gdn.S", "gdn.conv", "gdn.u", "gdn.b", "gdn.a", "K", "V"])
@pytest.mark.parametrize("which", ["embedded_engine", "tiny_engine"])
def test_every_leaf_of_a_sequence_counts(request, which, leaf):
    """Control of all that is exact here: one leaf zeroed, the answer changes."""
    engine = request.getfixturevalue(which)
    tokens = prompt(170)
    head, _ = engine.prefill(tokens[:130])  # two rows past a line, so that the convolution still reads what stood before it
    _, logits = run(engine, tokens, head)
    end, broken = engine.prefill(tokens, zeroed(engine, head, leaf))
    assert not np.array_equal(broken, logits)
    engine.release(end)
    engine.release(head)
    engine.pool = new_pool(engine)


def test_an_anchor_keeps_its_bytes_while_others_decode(engine):
    """A14: frozen, then 64 tokens with donation in the same slot, and another 64 in a second one."""
    slot = engine.open()
    prefill(slot, prompt(100))
    anchor = engine.hold(slot.freeze())
    before = kept(engine.pool, anchor)
    other = engine.open(anchor)
    old = engine.pool.views["K"]
    decode(slot, prompt(64, seed=1))
    assert old.is_deleted()  # the pool was donated, so the anchor's rows survived in place
    decode(other, prompt(64, seed=2))
    assert slot.length == other.length == 164
    assert_bits_equal(kept(engine.pool, anchor), before)
    assert not np.array_equal(kept(engine.pool, slot.freeze())["sections"]["gdn.S"], before["sections"]["gdn.S"])
    slot.close()
    other.close()
    assert_bits_equal(kept(engine.pool, anchor), before)
    engine.release(anchor)


def test_nothing_of_a_broken_run_reaches_a_fresh_one(engine):
    """A5: state, scratch and every page full of NaN, then a fresh sequence on the same pages."""
    expected = cold(engine, prompt(200))
    nan = engine.empty()
    nan = nan.replace(sections=nan.sections | {"gdn.S": jnp.full_like(nan.sections["gdn.S"], jnp.nan)})
    slot = engine.open(nan)
    assert np.isnan(prefill(slot, prompt(200))).all()
    slot.close()
    engine.pool.views = {name: jnp.full_like(view, 0x7FC1) for name, view in engine.pool.views.items()}
    found, logits = run(engine, prompt(200))
    assert np.isfinite(logits).all()
    assert_bits_equal(found, expected)
    slot = engine.open()
    assert_bits_equal(decode(slot, prompt(200))[-1], logits)
    slot.close()


@pytest.mark.parametrize("length", [1, 2, 17, 63, 64, 65, 100, 129])
def test_nan_in_free_pages_is_read_by_nobody(small, length):
    """A5: not by padding rows either, from which it would spread to real ones in sums over rows."""
    expected = cold(small, prompt(length))
    small.pool.views = {name: jnp.full_like(view, 0x7FC1) for name, view in small.pool.views.items()}
    found, logits = run(small, prompt(length))
    assert np.isfinite(logits).all()
    assert_bits_equal(found, expected)


@pytest.mark.parametrize("after", range(5))
def test_a_cancelled_prefill_goes_on_where_it_ended(engine, after):
    """A4: at every forward of 517 tokens (four chunks and a tail), the retry reads only the rest and equals a cold run."""
    tokens = prompt(517)
    expected, logits = run(engine, tokens)
    asked = iter([False] * after + [True])
    with pytest.raises(Cancelled, match=f"cancelled after {128 * after} tokens") as broken:
        engine.prefill(tokens, cancel=lambda: next(asked))
    sequence = broken.value.sequence
    assert (int(sequence.length), list(sequence.tokens)) == (128 * after, list(tokens[: 128 * after]))
    assert_bits_equal(kept(engine.pool, sequence), cold(engine, sequence.tokens))
    reports = []
    found, warm = run(engine, tokens, sequence, progress=reports.append)
    assert reports[0].start == 128 * after
    assert_bits_equal(warm, logits)
    assert_bits_equal(found, expected)
    engine.release(sequence)
    assert_bits_equal(run(engine, tokens)[1], logits)  # and so does one that starts anew


def test_a_cancel_that_comes_too_late_changes_nothing(engine):
    asked = iter([False] * 3 + [True] * 9)  # a chunk, 64 rows, 8 rows
    sequence, _ = engine.prefill(prompt(200), cancel=lambda: next(asked))
    assert int(sequence.length) == 200
    engine.release(sequence)


def test_progress_reports_every_forward(engine):
    reports = []
    run(engine, prompt(300), progress=reports.append)
    assert [(r.done, r.total, r.start) for r in reports] == [(n, 300, 0) for n in (0, 128, 256, 300)]
    assert all(a.seconds <= b.seconds for a, b in pairwise(reports))
    assert Progress(30, 50, 10, 2.0).rate == 10
    assert Progress(0, 50, 0, 0.0).rate == 0


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_callback_that_fails_leaves_no_page_held(engine, fail_at):
    calls = []

    def progress(report):
        calls.append(report)
        if len(calls) > fail_at:
            raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="terminal"):
        engine.prefill(prompt(300), progress=progress)
    assert engine.pool.free == engine.pool.pages


def test_a_prompt_that_is_too_long_is_refused_before_any_work(engine):
    """G3: the message has both numbers, no page was taken, no forward ran; the longest one that leaves room for a token works."""
    before = dict(engine.pool.views)
    with pytest.raises(ContextOverflow, match=r"the prompt has 1,024 tokens; this engine's limit is 1,024 .*--context-tokens") as error:
        engine.prefill(prompt(1024))
    assert (error.value.tokens, error.value.limit) == (1024, engine.limit)
    with pytest.raises(ContextOverflow):
        engine.generate(prompt(3000))
    assert all(engine.pool.views[name] is view for name, view in before.items())
    assert engine.pool.free == engine.pool.pages
    sequence, logits = engine.prefill(prompt(1023))
    assert np.isfinite(logits).all()
    engine.release(sequence)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "the prompt is empty: it needs at least one token"),
        (np.zeros((2, 3), np.int32), r"a list of token ids, found int32 \[2, 3\]"),
        ([0.5, 1.0], "a list of token ids, found float64"),
        ([True, False], "a list of token ids, found bool"),
        (["a"], "a list of token ids"),
        ([5, -1, 3], r"token ids are 0 to 1023: found -1 at 1"),
        ([5, 6, 7, 1024], r"token ids are 0 to 1023: found 1024 at 3"),
        ([2**40], r"token ids are 0 to 1023: found 1099511627776 at 0"),
    ],
)
@pytest.mark.parametrize("call", ["prefill", "generate"])
def test_prompts_that_are_none(engine, tokens, message, call):
    assert engine.model.config.vocab == 1024
    with pytest.raises(ValueError, match=message):
        getattr(engine, call)(tokens)
    assert engine.pool.free == engine.pool.pages


def test_a_sequence_must_be_a_proper_prefix(engine):
    tokens = prompt(150)
    sequence, _ = engine.prefill(tokens)
    other = tokens.copy()
    other[70] = (other[70] + 1) % 1000
    with pytest.raises(ValueError, match=f"no prefix of the prompt: at 70 it has token {tokens[70]}, the prompt {other[70]}"):
        engine.prefill([*other, 5], sequence)
    with pytest.raises(ValueError, match=r"the sequence has 150 tokens and the prompt 150: the prompt's last token must be forwarded"):
        engine.prefill(tokens, sequence)  # D2: no stale logits, no crash
    with pytest.raises(ValueError, match=r"the sequence has 150 tokens and the prompt 90"):
        engine.prefill(tokens[:90], sequence)
    with pytest.raises(ValueError, match=r"at 2 it has"):
        engine.prefill([tokens[0], tokens[1], (tokens[2] + 1) % 1000], sequence)
    engine.release(sequence)


def test_a_sequence_of_another_layout_is_refused_by_name(engine, tiny_engine):
    with pytest.raises(ValueError, match=r"section gdn\.S: expected float32"):
        engine.prefill(prompt(10), tiny_engine.empty())
    with pytest.raises(ValueError, match=r"a sequence of 0 tokens has 0 pages: found length 5"):
        engine.open(engine.empty().replace(length=np.int32(5)))


def test_equal_calls_have_equal_bits(engine):
    """In one process, on pages that lie elsewhere the second time; a backend that reports otherwise would show here."""
    first, logits = run(engine, prompt(400))
    engine.pool.take()
    for _ in range(3):
        again, found = run(engine, prompt(400))
        assert_bits_equal(found, logits)
        assert_bits_equal(again, first)
    engine.pool = new_pool(engine)


def test_turns_keep_no_arrays(engine):
    """G4: a chat of many turns, each from the state before, holds one state's arrays at its end, however long it was."""
    sequence, tokens, live = engine.empty(), [], []
    for turn in range(30):
        tokens = [*tokens, *prompt(20, seed=turn)]
        longer, _ = engine.prefill(tokens, sequence)
        engine.release(sequence)
        sequence = longer
        live.append(len(jax.live_arrays()))
    assert len(tokens) == 600
    assert live[-1] == live[2]
    assert engine.pool.free == engine.pool.pages - 5
    engine.release(sequence)


def test_a_step_takes_the_rows_of_its_block_only(engine):
    slot = engine.open()
    prefill(slot, prompt(60))
    for rows in (0, 5, 17):
        with pytest.raises(ValueError, match=f"a step at 60 takes 1 to 4 rows, found {rows}"):
            slot.step([1] * rows)
    assert slot.step([1] * 4).shape == (4, 1024)
    slot.accept([])
    slot.close()


def test_a_full_pool_ends_a_prefill_and_keeps_nothing(engine):
    others = [engine.pool.take() for _ in range(engine.pool.pages - 2)]
    with pytest.raises(PoolFull, match="18 pages of 128 tokens"):
        engine.prefill(prompt(300))
    assert engine.pool.free == 2
    sequence, _ = engine.prefill(prompt(256))
    engine.release(sequence)
    engine.pool.release(others)


def test_a_released_sequence_is_refused(engine):
    """Its page may be another sequence's by now: going on from it gave wrong bits, and releasing it again freed the other's page."""
    first, _ = engine.prefill(prompt(40))
    engine.release(first)
    second, logits = engine.prefill(prompt(40, seed=1))
    assert second.pages[0] == first.pages[0]
    for misuse in (engine.release, engine.hold, engine.open, lambda s: engine.prefill(prompt(50), s)):
        with pytest.raises(ValueError, match="released before"):
            misuse(first)
    again, found = engine.prefill(prompt(40, seed=1))
    assert_bits_equal(found, logits)
    engine.release(again)
    engine.release(second)


def test_a_sequence_of_another_engine_is_refused(engine):
    sequence, _ = engine.prefill(prompt(40))
    other = PagePool(engine.layout, 4)
    other.take()
    with pytest.raises(ValueError, match="not this engine's"):
        other.check(sequence)
    engine.release(sequence)


def test_an_interrupt_in_a_forward_waits_for_its_end(engine, monkeypatch):
    """Ctrl-C between two layers: KeyboardInterrupt comes, and every page is still there."""
    kept, _ = engine.prefill(prompt(130))
    forward = engine.forward
    for name in ("chunk", "step"):
        real = getattr(forward, name)

        def pressed(*arguments, real=real):
            done = real(*arguments)  # by now the pool's arrays are taken over
            signal.raise_signal(signal.SIGINT)
            return done

        monkeypatch.setattr(forward, name, pressed)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.prefill(prompt(200, seed=2) if name == "chunk" else prompt(131), None if name == "chunk" else kept)
        finally:
            signal.signal(signal.SIGINT, before)
        monkeypatch.undo()
        assert np.isfinite(run(engine, prompt(130))[1]).all()
    engine.release(kept)
