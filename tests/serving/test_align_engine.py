"""Through the engine: a conversation whose client changes its copies goes on where the last generation ended."""

import pytest

from qjax.caches.lookup import Caches
from qjax.config import CacheConfig
from qjax.pages import PagePool
from tests.serving.talk import MODEL, Server

TURNS = ("Which file was read?", "And after that?", "Thank you. What is left?")


@pytest.fixture
def engine(embedded_engine):
    embedded_engine.pool = PagePool(embedded_engine.layout, embedded_engine.pool.pages)
    embedded_engine.caches = Caches(embedded_engine.pool, CacheConfig(), embedded_engine.level, MODEL.tokenizer.decode)
    yield embedded_engine
    embedded_engine.caches.clear()
    embedded_engine.caches = None
    assert embedded_engine.pool.free == embedded_engine.pool.pages


def cached(engine, change, *, aligned=True, most=96) -> list[tuple[str, int]]:
    """Of each turn where the engine went on from and how many tokens that gave, less those of the last prompt and answer."""
    server, messages, found, before = Server(tools=None), [], [], 0
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        prompt = server.align(messages)
        tokens = prompt.tokens if aligned else server.sent(messages)
        generation = engine.generate(tokens, max_tokens=most)
        list(generation)
        engine.release(generation.sequence)
        record = engine.caches.ledger.records[-1]
        found.append((record.source, record.start - before))
        before = record.prompt_tokens + len(generation.tokens) - (generation.finish == "length")  # the last one was not forwarded
        _, message = server.answer(prompt, generation.tokens)
        assert message["reasoning_content"]
        messages.append(change(message))
    return found


CHANGES = {
    "kept": lambda message: message,
    "no reasoning": lambda message: {k: v for k, v in message.items() if k != "reasoning_content"},
    "empty": lambda message: message | {"reasoning_content": ""},
    "trimmed": lambda message: message | {"content": message["content"].strip(), "reasoning_content": message["reasoning_content"].strip()},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_turn_goes_on_where_the_last_one_ended(engine, change):
    assert cached(engine, change) == [("cold", 0), ("end", 0), ("end", 0)]


def test_a_copy_without_reasoning_that_is_served_as_sent_does_not(engine):
    assert "end" not in [source for source, _ in cached(engine, CHANGES["no reasoning"], aligned=False)]


def test_an_answer_cut_off_in_its_reasoning_goes_on_there_too(engine):
    assert cached(engine, CHANGES["no reasoning"], most=6) == [("cold", 0), ("end", 0), ("end", 0)]
