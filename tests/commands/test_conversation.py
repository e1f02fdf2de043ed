"""Turns go on from the longest state that the caches have, answers come back as the template wrote them, and no page is lost."""

import dataclasses
import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from qjax.caches.keys import common
from qjax.commands.conversation import Conversation
from qjax.engine import ContextOverflow
from qjax.purity import Outcome, compare, leaves
from qjax.state import BLOCK

LONG = "The worker reads the file. " * 60


@pytest.fixture
def conversation(engine):
    return Conversation(engine, system="You answer briefly.", max_tokens=40)


def drain(turn):
    for _ in turn:
        pass
    return turn


@pytest.mark.parametrize("thinks", [True, False])
def test_the_next_turn_goes_on_from_the_end_of_the_last(engine, answers, thinks):
    answers("The user asks.\n</think>\n\nIt is 4417." if thinks else "It is 4417.", "Yes.")
    conversation = Conversation(engine, thinking=thinks)
    first = drain(conversation.say("What is it?"))
    assert (first.source, first.start, first.finish, first.content.strip()) == ("cold", 0, "stop", "It is 4417.")
    answer = {"role": "assistant", "content": "It is 4417."}
    assert conversation.messages[-1] == answer | ({"reasoning_content": "The user asks."} if thinks else {})
    second = drain(conversation.say("Is it?"))
    assert (second.source, second.start, second.read_again) == ("end", first.prompt.size + len(first.tokens), 0)
    assert second.rewritten is None
    assert second.read == second.prompt.size - second.start < 30
    assert second.first_token_seconds > 0


def test_an_answer_that_the_template_writes_otherwise_goes_on_from_the_prompt(conversation, answers):
    answers("A thought.\n</think>\n\nIt is 4417.  \n ", "A thought.\n</think>\n\nYes.")
    first = drain(conversation.say(LONG))
    second = drain(conversation.say("Is it?"))
    without = conversation.engine.model.template.render(conversation.messages[:2], add_generation_prompt=False)
    assert second.prompt[: len(without)].tolist() == without
    assert len(without) < first.prompt.size <= second.start <= second.rewritten
    assert first.prompt.size < second.rewritten < first.prompt.size + len(first.tokens)


@pytest.mark.parametrize("words", range(0, 13, 3))
def test_reasoning_that_the_template_leaves_out_goes_on_from_the_boundary(engine, answers, words):
    """The answer's beginning is rewritten too: at most a block before the boundary is read again, wherever that lies."""
    conversation = Conversation(engine)
    answers("A thought.\n</think>\n\nIt is 4417.", "Yes.")
    first = drain(conversation.say(LONG + "and " * words))
    conversation.messages[-1].pop("reasoning_content")
    boundary = conversation.render(conversation.messages[:1], ask=False).size
    second = drain(conversation.say("Is it?"))
    assert boundary <= second.rewritten <= first.prompt.size + 1
    assert boundary // BLOCK * BLOCK <= second.start <= second.rewritten
    assert second.read_again < BLOCK


def test_the_caches_are_told_where_prompts_part(conversation, monkeypatch):
    told = []
    monkeypatch.setattr(conversation.engine, "generate", lambda prompt, **options: told.append((prompt, options)))
    conversation.messages += [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes.", "reasoning_content": "A thought."}]
    tools = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I look."}, {"role": "user", "content": "Then?"}]
    for new in ("Is it?", tools):
        conversation.say(new)
    for (prompt, options), new in zip(told, (1, 3), strict=True):
        messages = [*conversation.messages, *(tools if new == 3 else [{"role": "user", "content": "Is it?"}])]
        assert options["history"] == conversation.render(messages, ask=False).size < prompt.size
        # up to the message itself, which a message of other words has in common
        other = conversation.render([*messages[:-1], {"role": "user", "content": "No."}])
        assert options["user"] < common(prompt, other) < options["user"] + 5


def test_a_template_that_cannot_be_asked_tells_no_boundary(engine, answers, monkeypatch):
    render = engine.model.template.render

    def with_system(messages, *more, **options):
        if messages[0]["role"] != "system":
            raise ValueError("a conversation begins with a system message")
        return render(messages, *more, **options)

    monkeypatch.setattr(engine.model.template, "render", with_system)
    conversation = Conversation(engine, system="You answer briefly.")
    answers("x</think>Yes.", "x</think>Yes.")
    prompt = drain(conversation.say("Hello.")).prompt
    assert (conversation.boundaries.history(prompt), conversation.boundaries.user(conversation.messages, prompt)) == (None, None)
    assert drain(conversation.say("Well?")).start > 0


def outcome(engine, prompt, sequence) -> Outcome:
    end, logits = engine.prefill(prompt, sequence)
    engine.release(end)
    return {"logits": logits[None]} | leaves(engine, end)


def test_the_state_gone_on_from_is_the_cold_one(conversation, answers):
    answers("A thought.\n</think>\n\nIt is 4417.", "A thought.\n</think>\n\nYes.")
    engine = conversation.engine
    drain(conversation.say(LONG))
    prompt = conversation.render([*conversation.messages, {"role": "user", "content": "Is it?"}])
    (hit,) = engine.caches.find(prompt.astype(np.int64), "")
    warm = hit.tier.take(hit).sequence
    assert warm.tokens.size > 256
    turn = drain(conversation.say("Is it?"))
    assert (turn.source, turn.start) == ("end", warm.tokens.size)
    cold = outcome(engine, prompt, None)
    assert compare(outcome(engine, prompt, warm), cold) == 0
    for name, section in warm.sections.items():
        broken = warm.replace(sections=warm.sections | {name: jnp.zeros_like(section)})
        assert compare(outcome(engine, prompt, broken), cold) > 0, name
    engine.release(warm)


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
    messages = list(conversation.messages)
    with pytest.raises(ContextOverflow, match="3,072"):
        conversation.say(LONG * 14)
    with pytest.raises(ValueError, match="the system message must come first"):
        conversation.say([{"role": "system", "content": "Late."}])

    def fail(*arguments):
        raise ValueError("2 of 3 logits are NaN")

    monkeypatch.setattr("qjax.generation.sample", fail)
    with pytest.raises(ValueError, match="NaN"):
        drain(conversation.say("Well?"))
    assert conversation.messages == messages
    conversation.engine.caches.clear()
    assert conversation.engine.pool.free == conversation.engine.pool.pages


def test_conversations_give_way_to_a_turn_that_needs_their_pages(conversation, answers):
    """24 pages of a longest sequence, 50 in the pool: twelve conversations of nine pages do not fit."""
    engine = conversation.engine
    answers(*["x</think>Yes."] * 25)
    for number in range(12):
        conversation.clear()
        first = drain(conversation.say(f"{number} {LONG * 3}"))
        second = drain(conversation.say("Is it?"))
        assert second.start > first.prompt.size - BLOCK
    assert engine.caches.stats()["resident"]["dropped_pool"] > 0
    held = [engine.pool.take() for _ in range(engine.pool.free)]
    try:
        again = drain(conversation.say("Still there? " * 30))
    finally:
        engine.pool.release(held)
    assert again.finish == "stop"
    assert again.start > second.prompt.size - BLOCK


def test_two_conversations_in_turn_read_only_what_is_new(engine, answers):
    answers(*["x\n</think>\n\nYes."] * 6)
    one, other = Conversation(engine), Conversation(engine)
    turns = [drain(conversation.say(LONG + str(number))) for number, conversation in enumerate([one, other] * 3)]
    for before, turn in itertools.pairwise(turns[::2]):
        assert (turn.source, turn.start) == ("parked", before.prompt.size + len(before.tokens))
    for before, turn in itertools.pairwise(turns[1::2]):
        assert (turn.source, turn.start) == ("parked", before.prompt.size + len(before.tokens))


def test_back_and_clear(conversation, answers):
    answers(*["x\n</think>\n\nYes."] * 4)
    first = drain(conversation.say(LONG))
    drain(conversation.say("Two."))
    assert conversation.back()
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    third = drain(conversation.say("Three."))
    assert third.start >= first.prompt.size + len(first.tokens)
    assert third.rewritten is None
    assert [conversation.back(), conversation.back(), conversation.back()] == [True, True, False]
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "You answer briefly."}]
    again = drain(conversation.say(LONG))
    assert (again.start, again.prompt.size) == (first.prompt.size, first.prompt.size)


def test_a_model_without_a_template_is_refused(engine):
    bare = types.SimpleNamespace(model=dataclasses.replace(engine.model, template=None, name="plain"))
    with pytest.raises(ValueError, match="plain has no chat template; `qjax generate` continues plain text"):
        Conversation(bare)
