"""Tokens between two threads: joined while a stream pauses, none lost, and an end that ends everything."""

import asyncio
import threading

import pytest

from qjax.generation import Token
from qjax.serving import arrivals
from qjax.serving.arrivals import Arrivals


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def tell(there: Arrivals, *tokens: Token | None) -> None:
    """From another thread, as the engine does."""
    thread = threading.Thread(target=lambda: [there.listen(None, token) for token in tokens])
    thread.start()
    thread.join()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


A, B, C = (Token(i, text) for i, text in enumerate("abc"))


def test_a_pause_lasts_though_the_loop_was_woken_and_the_end_ends_it(monkeypatch):
    monkeypatch.setattr(arrivals, "GAP", 1000)

    async def test():
        there = Arrivals()
        batches = there.batches()
        first = asyncio.ensure_future(anext(batches))
        await turns()
        tell(there, A)
        assert await first == [A]
        pause = asyncio.ensure_future(there.pause())
        tell(there, B, C)
        await turns()
        assert not pause.done()
        tell(there, None)
        await pause
        assert [batch async for batch in batches] == [[B, C]]
        await there.pause()  # nothing comes any more

    run(test())


@pytest.mark.parametrize("left", [1, 2])
def test_a_loop_that_was_left_can_be_gone_on_with(left):
    """Also where it had seen the end: whoever waits for the rest must not wait for ever."""

    async def test():
        there = Arrivals()
        tell(there, A, B, *[None] * (left - 1))
        batches = there.batches()
        assert await anext(batches) == [A, B]
        await batches.aclose()
        if left == 1:
            tell(there, C, None)
        assert [batch async for batch in there.batches()] == ([[C]] if left == 1 else [])

    run(test())
