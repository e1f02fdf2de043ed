"""A thought that was closed for the model: the client's copy lacks the phrase, and the next turn goes on where the generation ended."""

import numpy as np
import pytest

from qjax.caches.lookup import Caches
from qjax.config import CacheConfig
from qjax.pages import PagePool
from qjax.serving.align import Answer
from qjax.serving.parse import parse_whole
from qjax.serving.spelling import Spelling
from qjax.thought import PHRASE, Thought
from tests.serving.talk import TOKENIZER, Server, spell

ANSWER = "It is 4417, as before."
WORDS = "one two three four five six seven eight nine ten eleven twelve"
CHARACTER = [next(i for i in range(TOKENIZER.size) if TOKENIZER.token_bytes(i) == bytes([byte])) for byte in "日".encode()]


@pytest.fixture
def engine(embedded_engine):
    embedded_engine.pool = PagePool(embedded_engine.layout, embedded_engine.pool.pages)
    embedded_engine.caches = Caches(embedded_engine.pool, CacheConfig(), embedded_engine.level, TOKENIZER.decode)
    yield embedded_engine
    embedded_engine.caches.clear()
    embedded_engine.caches = None
    assert embedded_engine.pool.free == embedded_engine.pool.pages


def turn(engine, server, messages, monkeypatch, thought: list[int], *, keep=True) -> tuple[int, object]:
    """An answer whose reasoning is cut after these tokens: the cached tokens of its prompt, and the generation.

    The message that the client makes of what it gets is added to the messages.
    """
    prompt = server.align(messages)
    budget = len(thought)
    bound = Thought.of(TOKENIZER, budget, True)
    drawn = [*thought, *bound.phrase, *bound.close, *spell(ANSWER), TOKENIZER.stop_ids[0]]
    monkeypatch.setattr("qjax.generation.sample", lambda logits, sampling, history, draw, allowed: drawn[draw])
    generation = engine.generate(prompt.tokens, max_tokens=200, thought=bound)
    got = "".join(token.text for token in generation)
    monkeypatch.undo()
    engine.release(generation.sequence)
    assert (generation.finish, generation.hidden) == ("stop", [(budget, budget + len(bound.phrase))])
    assert PHRASE in generation.raw
    assert got == generation.text == generation.raw.replace(f"\n\n{PHRASE}\n", "")
    theirs, whole = (parse_whole(text, True, None, str) for text in (got, generation.raw))
    assert theirs.content == ANSWER
    if keep:
        assert server.aligner.keep(prompt, Answer(np.array(generation.tokens, np.int32), whole.spans, whole.calls, generation.hidden))
    messages.append({"role": "assistant", "content": theirs.content, "reasoning_content": theirs.reasoning})
    return engine.caches.ledger.records[-1].start, generation


def talk(engine, monkeypatch, thought, change=lambda message: message, **more) -> list[tuple[int, int]]:
    """Of each turn after the first: the tokens that it was given, and the rows that the last one left."""
    server, messages, found, rows = Server(tools=None), [], [], 0
    for text in ("Which file was read?", "And after that?", "What is left?"):
        messages.append({"role": "user", "content": text})
        start, generation = turn(engine, server, messages, monkeypatch, thought, **more)
        messages[-1] = change(messages[-1])
        found.append((start, rows))
        rows = generation.prompt_tokens + len(generation.tokens)
    return found[1:]


COPIES = {
    "kept": lambda message: message,
    "no reasoning": lambda message: {k: v for k, v in message.items() if k != "reasoning_content"},
    "trimmed": lambda message: message | {"reasoning_content": message["reasoning_content"].strip()},
}


@pytest.mark.parametrize("change", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_the_next_turn_goes_on_at_the_end(engine, monkeypatch, cut, change):
    """Bytes of a character that the phrase cut off are U+FFFD for the client, in its copy and in the record."""
    found = talk(engine, monkeypatch, [*spell(WORDS), *CHARACTER[:cut]], change)
    assert all(start == rows > 0 for start, rows in found), found


@pytest.mark.parametrize("cut", [1, 2])
def test_what_the_client_got_of_a_character_that_was_cut(cut):
    """Before the phrase, and after one that is cut itself."""
    tokens, phrase = np.array([*spell("A"), *CHARACTER[:cut], *spell(PHRASE), *CHARACTER[:cut], *spell("B")], np.int32), len(spell(PHRASE))
    spelling = Spelling(TOKENIZER, tokens, [(1 + cut, 1 + cut + phrase + cut)])
    assert spelling.text == TOKENIZER.decode(tokens) == f"A�{PHRASE}�B"
    assert spelling.visible(0, len(spelling.text)) == "A�B"
    assert spelling.cut(2) == (1 + cut, "")
    assert Spelling(TOKENIZER, tokens).text == spelling.text


def test_control_without_a_record_it_does_not(engine, monkeypatch):
    assert all(start < rows for start, rows in talk(engine, monkeypatch, spell(WORDS), keep=False))
