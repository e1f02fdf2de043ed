"""What a request sees: tokens, text, the end, and a state to go on from, exact at whichever token it ended."""

import copy
import dataclasses

import numpy as np
import pytest

from qjax.forward import Forward
from qjax.generation import Token
from qjax.pages import PoolFull
from qjax.sampling import Sampling, sample
from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import cold, decode, kept, prefill

PROMPT = prompt(70)
WARM = Sampling(temperature=0.8, top_k=50, seed=3)


def finished(engine, tokens=PROMPT, sequence=None, **more):
    """A generation run to its end, and the tokens that it yielded. Its end state is held."""
    run = engine.generate(tokens, sequence, **more)
    return run, list(run)


def check_end(engine, run, tokens):
    """The end state is that of a cold prefill of these tokens, bit for bit; released afterwards."""
    assert list(run.sequence.tokens) == [int(t) for t in tokens]
    assert_bits_equal(kept(engine.pool, run.sequence), cold(engine, run.sequence.tokens))
    engine.release(run.sequence)


@pytest.fixture(autouse=True)
def no_stop_tokens(small, monkeypatch):
    """A random model says its stop tokens at random; the tests say which it has."""
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", ())


@pytest.fixture
def answer(small):
    """40 greedy tokens after PROMPT."""
    run, _ = finished(small, max_tokens=40)
    small.release(run.sequence)
    assert len(set(run.tokens)) > 20  # no model that says one word for ever: its ends would all look alike
    return run


def test_greedy_takes_the_largest_logit(small, answer):
    slot = small.open()
    logits, size = prefill(slot, PROMPT), small.model.tokenizer.size
    for token in answer.tokens:
        assert token == int(np.argmax(logits[:size]))
        logits = decode(slot, [token])[0]
    slot.close()
    assert (answer.finish, len(answer.tokens), answer.text) == ("length", 40, small.model.tokenizer.decode(answer.tokens))


def test_a_tokens_draw_is_its_place_in_the_answer(small):
    """By hand: token i is drawn as number i, penalties see the prompt and what was said so far."""
    sampling = Sampling(temperature=1.0, seed=5, presence_penalty=1.5, repetition_penalty=1.3)
    run, _ = finished(small, sampling=sampling, max_tokens=20)
    slot = small.open()
    logits, history = prefill(slot, PROMPT), list(PROMPT)
    for i, token in enumerate(run.tokens):
        assert token == sample(logits, sampling, np.array(history), i, small.model.tokenizer.size)
        history.append(token)
        logits = decode(slot, [token])[0]
    slot.close()
    small.release(run.sequence)


def test_greedy_twice_is_the_same(small, answer):
    run, pieces = finished(small, max_tokens=40)
    assert run.tokens == answer.tokens == [p.id for p in pieces if p.id is not None]
    assert "".join(p.text for p in pieces) == run.text == answer.text
    check_end(small, run, [*PROMPT, *run.tokens[:-1]])  # the last token was not forwarded


@pytest.mark.parametrize("sampling", [Sampling(), WARM, Sampling(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.2)])
def test_a_warm_start_says_what_a_cold_one_says(small, sampling):
    """One token before the prompt's end, off the lines, at a line, and a whole earlier generation."""
    expected, _ = finished(small, sampling=sampling, max_tokens=30)
    for start in (69, 40, 64):
        head, _ = small.prefill(PROMPT[:start])
        run, _ = finished(small, sequence=head, sampling=sampling, max_tokens=30)
        assert (run.start, run.prompt_tokens) == (start, 70)
        assert run.tokens == expected.tokens
        check_end(small, run, expected.sequence.tokens)
        small.release(head)
    longer = [*PROMPT, *expected.tokens, *prompt(9, seed=4)]
    warm, _ = finished(small, longer, expected.sequence, sampling=sampling, max_tokens=10)
    assert warm.start == 70 + 29
    again, _ = finished(small, longer, sampling=sampling, max_tokens=10)
    assert warm.tokens == again.tokens
    for run in (expected, warm, again):
        check_end(small, run, run.sequence.tokens)


def test_the_seed_decides(small):
    runs = [finished(small, sampling=dataclasses.replace(WARM, seed=seed), max_tokens=30)[0] for seed in (3, 3, 4)]
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens
    for run in runs:
        small.release(run.sequence)


@pytest.mark.parametrize("count", [1, 2, 17, 39])
def test_a_generation_goes_on_from_where_it_ended(small, answer, count):
    """Greedy: what was said becomes part of the prompt, and the rest is said as if nothing had come between."""
    first, _ = finished(small, max_tokens=count)
    rest, _ = finished(small, [*PROMPT, *first.tokens], first.sequence, max_tokens=40 - count)
    assert rest.start == 70 + count - 1
    assert first.tokens + rest.tokens == answer.tokens
    check_end(small, first, [*PROMPT, *answer.tokens[: count - 1]])
    check_end(small, rest, [*PROMPT, *answer.tokens[:-1]])


def test_a_stop_token_ends_it(small, answer, monkeypatch):
    stop = next(t for i, t in enumerate(answer.tokens) if i > 5 and t not in answer.tokens[:i])
    at = answer.tokens.index(stop)
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", (stop,))
    run, pieces = finished(small, max_tokens=40)
    assert (run.finish, run.tokens) == ("stop", answer.tokens[:at])
    assert "".join(p.text for p in pieces) == run.text == small.model.tokenizer.decode(answer.tokens[:at])
    check_end(small, run, [*PROMPT, *answer.tokens[:at]])  # all that was said is in the state, the stop token is not


def test_a_stop_token_at_once(small, answer, monkeypatch):
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", (answer.tokens[0],))
    run, pieces = finished(small, max_tokens=40)
    assert (run.finish, run.tokens, run.text, pieces) == ("stop", [], "", [])
    check_end(small, run, PROMPT)


def test_a_stop_string_over_the_edges_of_tokens(small, answer):
    """The text ends before it, what may be its beginning is not shown early, and the tokens that made it are counted."""
    decode_ids = small.model.tokenizer.decode
    tried = 0
    for at in range(4, 30):
        one, two = decode_ids([answer.tokens[at]]), decode_ids([answer.tokens[at + 1]])
        stop = one[-2:] + two[:2]
        if "�" in stop:
            continue
        end = answer.text.find(stop)
        assert end >= 0
        run, pieces = finished(small, max_tokens=40, stop=["never said", stop])
        assert (run.finish, run.text) == ("stop", answer.text[:end])
        assert "".join(p.text for p in pieces) == run.text
        ended = next(n for n in range(1, 41) if stop in decode_ids(answer.tokens[:n]))
        assert run.tokens == answer.tokens[:ended]
        check_end(small, run, [*PROMPT, *answer.tokens[: ended - 1]])
        tried += 1
    assert tried >= 5


def test_text_that_only_begins_like_a_stop_string_is_shown_at_the_end(small, answer):
    run, pieces = finished(small, max_tokens=40, stop=[answer.text[-3:] + "and never this"])
    assert (run.finish, run.text) == ("length", answer.text)
    assert pieces[-1].id is None
    assert pieces[-1].text.endswith(answer.text[-3:])
    assert "".join(p.text for p in pieces) == answer.text
    small.release(run.sequence)


def test_an_unfinished_character_is_shown_at_the_end(small, monkeypatch):
    """The first byte of a two-byte character, and nothing after it."""
    tokenizer = small.model.tokenizer
    half = next(t for t in range(tokenizer.size) if tokenizer.token_bytes(t) == b"\xc3")
    monkeypatch.setattr("qjax.generation.sample", lambda *a: half)
    run, pieces = finished(small, max_tokens=1)
    assert pieces == [Token(half, ""), Token(None, "�")]
    assert run.text == "�" == tokenizer.decode([half])
    small.release(run.sequence)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens(small, answer, count):
    run, pieces = finished(small, max_tokens=count)
    assert (run.finish, run.tokens) == ("length", answer.tokens[:count])
    assert [p.id for p in pieces][:count] == run.tokens
    check_end(small, run, [*PROMPT, *answer.tokens[: count - 1]])


def test_max_tokens_below_one_is_refused(small):
    with pytest.raises(ValueError, match="max_tokens must be a whole number, at least 1, found 0"):
        small.generate(PROMPT, max_tokens=0)


def test_the_context_ends_it(small):
    """G3: at the engine's limit of 448 tokens, prompt and answer together."""
    run, _ = finished(small, prompt(440), max_tokens=100)
    assert (run.finish, len(run.tokens)) == ("length", 8)
    check_end(small, run, [*prompt(440), *run.tokens[:-1]])
    run, _ = finished(small, prompt(447), max_tokens=100)
    assert len(run.tokens) == 1
    check_end(small, run, prompt(447))


@pytest.mark.parametrize("after", [0, 1, 2, 7])
def test_a_cancelled_generation_can_be_gone_on_with(small, answer, after):
    """A4: at every step; PROMPT takes two forwards, before each of which cancel is asked."""
    asked = iter([False] * (2 + after) + [True])
    run, pieces = finished(small, max_tokens=40, cancel=lambda: next(asked))
    assert (run.finish, run.tokens) == ("cancelled", answer.tokens[: after + 1])
    assert "".join(p.text for p in pieces) == run.text
    rest, _ = finished(small, [*PROMPT, *run.tokens], run.sequence, max_tokens=40 - after - 1)
    assert run.tokens + rest.tokens == answer.tokens
    check_end(small, run, [*PROMPT, *answer.tokens[:after]])
    small.release(rest.sequence)


@pytest.mark.parametrize("after", [0, 1])
def test_a_generation_cancelled_while_it_reads(small, answer, after):
    asked = iter([False] * after + [True])
    run, pieces = finished(small, max_tokens=40, cancel=lambda: next(asked))
    assert (run.finish, run.tokens, pieces) == ("cancelled", [], [])
    assert int(run.sequence.length) == 64 * after
    again, _ = finished(small, PROMPT, run.sequence, max_tokens=40)
    assert again.tokens == answer.tokens
    check_end(small, run, PROMPT[: 64 * after])
    small.release(again.sequence)


def test_closed_early_it_can_be_gone_on_with(small, answer):
    run = small.generate(PROMPT, max_tokens=40)
    steps = iter(run)
    for _ in range(6):
        next(steps)
    run.close()
    assert (run.finish, run.tokens) == ("cancelled", answer.tokens[:6])
    rest, _ = finished(small, [*PROMPT, *run.tokens], run.sequence, max_tokens=34)
    assert run.tokens + rest.tokens == answer.tokens
    check_end(small, run, [*PROMPT, *answer.tokens[:5]])
    small.release(rest.sequence)


def test_leaving_the_loop_ends_it(small, answer):
    run = small.generate(PROMPT, max_tokens=40)
    for _ in run:
        if len(run.tokens) == 3:
            break
    left = run.sequence
    run.close()  # whatever it did, the slot is closed now
    small.release(run.sequence)
    assert left is not None, "the generation is still running"
    assert (run.finish, run.tokens) == ("cancelled", answer.tokens[:3])
    assert list(left.tokens) == [*PROMPT, *answer.tokens[:2]]


def test_a_second_loop_gives_nothing(small, answer):
    run = small.generate(PROMPT, max_tokens=3)
    assert [token.id for token in run if token.id is not None] == answer.tokens[:3]
    assert list(run) == []
    assert (run.finish, run.tokens) == ("length", answer.tokens[:3])
    small.release(run.sequence)


def test_closed_before_its_loop_it_does_nothing(small):
    run = small.generate(PROMPT, max_tokens=3)
    run.close()
    assert list(run) == []
    assert (run.finish, run.sequence) == ("cancelled", None)


def test_ids_without_a_text_are_never_sampled(small):
    """The model's vocabulary is larger than the tokenizer's, and here its surplus rows have the largest logits by far."""
    engine, size = copy.copy(small), small.model.tokenizer.size
    assert engine.model.config.vocab == size + 64
    head = engine.model.params["head"]
    head = head.at[size:].set(head[size:] * np.array(8, head.dtype))
    engine.model = dataclasses.replace(engine.model, params=engine.model.params | {"head": head})
    engine.forward = Forward(engine.programs, engine.model.params)
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=1)):
        run, _ = finished(engine, sampling=sampling, max_tokens=40)
        assert max(run.tokens) < size
        small.release(run.sequence)
        slot = engine.open()
        logits = np.concatenate([[prefill(slot, PROMPT)], decode(slot, run.tokens)])
        assert (logits.argmax(-1) >= size).sum() > 20  # control: unrestricted, they would have won
        slot.close()


def test_a_full_pool_in_the_middle_keeps_what_was_said(small, answer):
    """70 + 40 tokens stay on two pages; from 128 on a third is needed, and there is none."""
    others = [small.pool.take() for _ in range(small.pool.pages - 2)]
    run = small.generate(PROMPT, max_tokens=100)
    with pytest.raises(PoolFull):
        list(run)
    assert run.tokens[:40] == answer.tokens
    check_end(small, run, [*PROMPT, *run.tokens[:58]])
    small.pool.release(others)


def test_times_and_counts(small):
    run = small.generate(PROMPT, max_tokens=5)
    assert (run.finish, run.sequence, run.tokens, run.prompt_tokens) == (None, None, [], 70)
    list(run)
    assert run.start == 0
    assert 0 < run.prefill_seconds <= run.first_token_seconds
    assert run.decode_seconds > 0
    small.release(run.sequence)
