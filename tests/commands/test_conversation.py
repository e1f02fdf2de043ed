"""Turns go on from the longest state that fits, answers come back as the template wrote them, and no page is lost."""

import contextlib
import dataclasses
import itertools
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.commands.conversation import KEPT, Conversation, Thinking
from qjax.engine import ContextOverflow
from qjax.purity import compare, leaves

LONG = "The worker reads the file. " * 60


@pytest.fixture
def conversation(engine):
    with contextlib.closing(Conversation(engine, system="You answer briefly.", max_tokens=40)) as made:
        yield made


def drain(turn):
    for _ in turn:
        pass
    return turn


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("It is 4.\n</think>\n\nFour.", True, "It is 4.\n", "\n\nFour."),
        ("<think>It is 4.</think>Four.", False, "It is 4.", "Four."),
        (" \n<think>x</think>y</think>", False, "x", "y</think>"),
        ("Four.", False, "", "Four."),
        ("Is <think>this</think> so?", False, "", "Is <think>this</think> so?"),
        ("Not done </thin", True, "Not done </thin", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
@given(cuts=st.lists(st.integers(0, 40)))
def test_reasoning_and_content_part_alike_however_the_text_is_cut(text, opened, reasoning, content, cuts):
    thinking = Thinking(opened)
    edges = sorted({0, *(cut for cut in cuts if cut < len(text))})
    pieces = [thinking.feed(text[a:b]) for a, b in itertools.pairwise([*edges, len(text)])] + [thinking.flush()]
    assert ("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)) == (reasoning, content)


@pytest.mark.parametrize("thinks", [True, False])
def test_the_next_turn_goes_on_from_the_end_of_the_last(engine, answers, thinks):
    answers("The user asks.\n</think>\n\nIt is 4417." if thinks else "It is 4417.", "Yes.")
    with contextlib.closing(Conversation(engine, thinking=thinks)) as conversation:
        first = drain(conversation.say("What is it?"))
        assert (first.start, first.finish, first.content.strip()) == (0, "stop", "It is 4417.")
        answer = {"role": "assistant", "content": "It is 4417."}
        assert conversation.messages[-1] == answer | ({"reasoning_content": "The user asks."} if thinks else {})
        second = drain(conversation.say("Is it?"))
        assert second.start == first.prompt.size + len(first.tokens)
        assert second.rewritten is None
        assert second.read == second.prompt.size - second.start < 30
        assert second.first_token_seconds > 0


def test_an_answer_that_the_template_writes_otherwise_goes_on_from_the_boundary(conversation, answers):
    answers("A thought.\n</think>\n\nIt is 4417.  \n ", "A thought.\n</think>\n\nYes.")
    first = drain(conversation.say(LONG))
    second = drain(conversation.say("Is it?"))
    without = conversation.engine.model.template.render(conversation.messages[:2], add_generation_prompt=False)
    assert second.start == len(without) < first.prompt.size
    assert second.prompt[: second.start].tolist() == without
    assert first.prompt.size < second.rewritten < first.prompt.size + len(first.tokens)


def test_the_state_gone_on_from_is_the_cold_one(conversation, answers):
    answers("A thought.\n</think>\n\nIt is 4417.", "A thought.\n</think>\n\nYes.")
    engine = conversation.engine
    drain(conversation.say(LONG))
    prompt = conversation.render([*conversation.messages, {"role": "user", "content": "Is it?"}])
    warm = conversation.best(prompt)
    assert warm.tokens.size > 256
    broken = warm.replace(sections=warm.sections | {"gdn.conv": np.zeros_like(warm.sections["gdn.conv"])})
    outcomes = []
    for start in (warm, broken, None):
        sequence, logits = engine.prefill(prompt, start)
        outcomes.append({"logits": logits[None]} | leaves(engine, sequence))
        engine.release(sequence)
    assert compare(outcomes[0], outcomes[2]) == 0
    assert compare(outcomes[1], outcomes[2]) > 0


def test_leaving_the_loop_stops_the_answer_and_keeps_what_there_is(conversation, answers):
    answers("One thought.\n</think>\n\nOne two three four five six.", "x</think>Yes.")
    turn = conversation.say("Count.")
    for _ in turn:
        if "three" in turn.content:
            break
    turn.close()
    assert turn.finish == "cancelled"
    assert conversation.messages[-1] == {"role": "assistant", "content": "One two three", "reasoning_content": "One thought."}
    second = drain(conversation.say("Go on."))
    assert second.start >= turn.prompt.size
    assert second.rewritten is None


def test_a_stopped_reading_takes_the_question_back_and_is_not_lost(conversation, answers):
    before = list(conversation.messages)
    calls = iter([False, False, True])
    turn = drain(conversation.say(LONG, cancel=lambda: next(calls)))
    assert (turn.finish, turn.tokens) == ("cancelled", [])
    assert conversation.messages == before
    answers("x</think>Yes.")
    seen = []
    again = drain(conversation.say(LONG, progress=seen.append))
    assert again.start == 256
    assert (seen[0].done, seen[0].start, seen[-1].done) == (256, 256, again.prompt.size)


def test_the_limit_of_tokens_ends_an_answer(conversation, answers):
    answers("word " * 60 + "...")
    turn = drain(conversation.say("Go."))
    assert (turn.finish, len(turn.tokens), turn.content) == ("length", 40, "")
    assert conversation.messages[-1]["reasoning_content"] == turn.reasoning


def test_what_cannot_be_answered_leaves_the_conversation_as_it_was(conversation, answers, monkeypatch):
    answers("x</think>Yes.")
    drain(conversation.say("Hello."))
    messages, free = list(conversation.messages), conversation.engine.pool.free
    with pytest.raises(ContextOverflow, match="1,536"):
        conversation.say(LONG * 5)
    with pytest.raises(ValueError, match="the system message must come first"):
        conversation.say([{"role": "system", "content": "Late."}])

    def fail(*arguments):
        raise ValueError("2 of 3 logits are NaN")

    monkeypatch.setattr("qjax.generation.sample", fail)
    with pytest.raises(ValueError, match="NaN"):
        drain(conversation.say("Well?"))
    assert conversation.messages == messages
    conversation.close()
    assert conversation.engine.pool.free >= free


def test_kept_states_give_way_to_a_turn_that_needs_their_pages(conversation, answers):
    pool = conversation.engine.pool
    answers(*["x</think>Yes."] * 12)
    for number in range(12):
        if number % 3 == 0:
            conversation.clear()
        turn = drain(conversation.say(f"{number} {LONG}"))
        assert len(conversation.kept) <= KEPT
    held = [pool.take() for _ in range(pool.free)]
    answers("x</think>Yes.")
    try:
        again = drain(conversation.say("Still there?"))
    finally:
        pool.release(held)
    assert again.finish == "stop"
    assert again.start > turn.start


def test_back_and_clear(conversation, answers):
    answers(*["x\n</think>\n\nYes."] * 3)
    first = drain(conversation.say("One."))
    drain(conversation.say("Two."))
    assert conversation.back()
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    third = drain(conversation.say("Three."))
    assert third.start == first.prompt.size + len(first.tokens)
    assert third.rewritten is None
    assert [conversation.back(), conversation.back(), conversation.back()] == [True, True, False]
    conversation.clear()
    assert (conversation.messages, conversation.kept) == ([{"role": "system", "content": "You answer briefly."}], [])


def test_a_model_without_a_template_is_refused(engine):
    bare = types.SimpleNamespace(model=dataclasses.replace(engine.model, template=None, name="plain"))
    with pytest.raises(ValueError, match="plain has no chat template; `qjax generate` continues plain text"):
        Conversation(bare)
