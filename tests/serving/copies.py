"""One answer and a client's copy of it: which tokens are served."""

from qjax.serving.align import Parted, Why
from tests.serving.talk import SPECIAL, TOKENIZER, Server, spell

OFF = {"enable_thinking": False}
USER, NEXT = {"role": "user", "content": "Go on."}, {"role": "user", "content": "And?"}
CLOSING = [SPECIAL["<|im_end|>"], *TOKENIZER.encode("\n")]
ASKED = [SPECIAL["<|im_start|>"], *TOKENIZER.encode("assistant\n"), SPECIAL["<think>"], *TOKENIZER.encode("\n")]
THOUGHT = [*TOKENIZER.encode("\n"), SPECIAL["</think>"], *TOKENIZER.encode("\n\n"), *CLOSING]
NEXT_USER = [SPECIAL["<|im_start|>"], *TOKENIZER.encode("user\nAnd?"), *CLOSING]


def said(message: dict, **fields) -> list[dict]:
    """A conversation that goes on from a client's copy of one answer."""
    return [USER, {**message, **fields}, NEXT]


def ask(server: Server, text: str, *, hidden=(), kwargs=None, chops=(1000,), **asked):
    """One answer to USER: its record and the message that the client gets."""
    return server.answer(server.align([USER], kwargs, **asked), spell(text, chops), hidden)


def expect_sent(server: Server, messages: list[dict], why: Why, at: int = 1, kwargs: dict | None = None, **asked) -> None:
    prompt = server.align(messages, kwargs, **asked)
    assert prompt.tokens.tolist() == server.sent(messages, kwargs)
    assert (prompt.matched, prompt.parted) == (None, Parted(at, why))


def expect_rows(server: Server, messages: list[dict], expected: list[int], at: int = 1, kwargs: dict | None = None, **asked) -> None:
    """And that these are not the tokens that the template makes of the copy: else nothing was aligned."""
    prompt = server.align(messages, kwargs, **asked)
    assert prompt.tokens[: len(expected)].tolist() == expected
    assert server.sent(messages, kwargs)[: len(expected)] != expected
    assert (prompt.matched, prompt.parted) == (at, None)
