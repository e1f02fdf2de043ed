"""Tokens with a memory of encoded text are the tokens without; what a tenant sent shows to no other; and the memory stays within its limit."""

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.serving.pieces import EACH, Pieces
from tests.serving.talk import MODEL, TOKENIZER, TOOLS

TEMPLATE = MODEL.template
NAMES = ("a", "b", "c")


class Encoding:
    """The tokenizer, and every text that it encoded."""

    def __init__(self):
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return TOKENIZER.encode(text)

    def take(self) -> list[str]:
        """The texts since it was last asked."""
        texts, self.texts = self.texts, []
        return texts


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def weigh(*texts: str) -> int:
    """The bytes that conversations of a user's message each take, of one tenant."""
    pieces = Pieces(TEMPLATE, TOKENIZER, 10**9)
    render(pieces, texts, "")
    return pieces.size


def render(pieces: Pieces, texts: Iterable[str], tenant: str) -> None:
    for text in texts:
        pieces.render([user(text)], None, {}, tenant=tenant)


word = st.sampled_from(["<|im_start|>", "<|im_end|>\n", "<think>", "</tool_call>", "<", "\ufdd0", "\\ufdd0", "é漢🙂", " ", "\n", "so"]) | st.text(
    max_size=6
)
text = st.lists(word, max_size=4).map("".join)
message = st.one_of(
    st.builds(user, text),
    st.builds(lambda text, thought: {"role": "assistant", "content": text, "reasoning_content": thought}, text, text),
    st.builds(lambda name, value: {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": {"s": value}}]}, text, text),
    st.builds(lambda text: {"role": "tool", "content": text}, text),
)
request = st.tuples(
    st.sampled_from(NAMES),
    st.lists(message, max_size=4),
    st.booleans(),
    st.sampled_from([{}, {"enable_thinking": False}, {"reasoning_effort": "low", "preserve_thinking": False}]),
    st.booleans(),
)


@given(st.lists(request, min_size=1, max_size=8), st.sampled_from([0, 2000, 10**6]))
def test_the_tokens_are_the_templates(requests, limit):
    pieces = Pieces(TEMPLATE, TOKENIZER, limit)
    for tenant, messages, tools, variables, ask in requests * 2:
        messages, tools = [user("Go on."), *messages], TOOLS if tools else None
        found = pieces.render(messages, tools, variables, ask=ask, tenant=tenant)
        assert found.dtype == "int32"
        assert found.tolist() == TEMPLATE.render(messages, tools, add_generation_prompt=ask, **variables)
        assert pieces.size <= limit


def test_what_was_encoded_is_taken_as_it_was():
    """The control: a memory that holds other tokens shows at once."""
    pieces = Pieces(TEMPLATE, TOKENIZER, 10**6)
    pieces.render([user("One.")], None, {})
    pieces._used[""]["user\nOne."] = b"\0\0\0\0"
    assert pieces.render([user("One.")], None, {}).tolist() != TEMPLATE.render([user("One.")])
    assert pieces.render([user("One.")], None, {}, tenant="a").tolist() == TEMPLATE.render([user("One.")])
    pieces.clear()
    assert pieces.render([user("One.")], None, {}).tolist() == TEMPLATE.render([user("One.")])


def test_only_new_text_is_encoded():
    encoding = Encoding()
    pieces = Pieces(TEMPLATE, encoding, 10**6)
    messages = [user("One."), {"role": "assistant", "content": "Two.", "reasoning_content": "So."}, user("Three.")]
    pieces.render(messages, TOOLS, {})
    assert len(encoding.take()) > 4
    pieces.render([*messages, {"role": "assistant", "content": "Four.", "reasoning_content": "So."}, user("Five.")], TOOLS, {})
    assert encoding.take() == ["\n\nFour.", "user\nFive."]
    pieces.render([user("<|im_end|>")], TOOLS, {})  # as text: no special token's place
    assert encoding.take() == ["user\n<|im_end|>"]


def test_no_tenant_finds_what_another_sent():
    encoding = Encoding()
    pieces = Pieces(TEMPLATE, encoding, 10**6)
    messages = [user("A secret."), {"role": "assistant", "content": "Two."}, user("Three.")]
    pieces.render(messages, TOOLS, {}, tenant="a")
    first = encoding.take()
    for tenant in ("b", ""):
        pieces.render(messages, TOOLS, {}, tenant=tenant)
        assert encoding.take() == first
    pieces.render(messages, TOOLS, {}, tenant="a")
    assert encoding.take() == []  # the control: its own it does find


def test_no_tenant_drives_out_what_another_sent():
    few, encoding = ["One.", "Two."], Encoding()
    pieces = Pieces(TEMPLATE, encoding, 4 * weigh(*few))
    render(pieces, few, "few")
    encoding.take()
    render(pieces, map(str, range(200)), "many")
    assert pieces.limit // 2 < pieces.size <= pieces.limit
    encoding.take()
    render(pieces, few, "few")
    assert encoding.take() == []
    render(pieces, ["0"], "many")
    assert encoding.take() == ["user\n0"]  # the control: of the one that has most, what it used least recently is gone
    render(pieces, ["199"], "many")
    assert encoding.take() == []


def test_what_is_used_stays():
    encoding = Encoding()
    pieces = Pieces(TEMPLATE, encoding, weigh(*map(str, range(40))))
    for number in range(200):
        render(pieces, ["again", str(number)], "")
    assert encoding.take().count("user\nagain") == 1


def test_many_tenants_share_the_room():
    pieces = Pieces(TEMPLATE, TOKENIZER, 20 * EACH)
    for number in range(100):
        render(pieces, ["One."], str(number))
        assert pieces.size <= pieces.limit
    assert set(pieces._used) == set(pieces._held)
    assert len(pieces._used) <= 20
    render(pieces, ["x" * 20 * EACH], "0")  # larger than all the room
    assert pieces.size <= pieces.limit
    assert pieces.render([user("One.")], None, {}, tenant="0").tolist() == TEMPLATE.render([user("One.")])


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_two_threads_that_encode_the_same():
    """One is done while the other encodes."""

    class Slow(Encoding):
        def encode(self, text: str) -> list[int]:
            if len(self.texts) == 0:
                self.texts.append(text)
                render(pieces, ["One."], "")
            return TOKENIZER.encode(text)

    pieces = Pieces(TEMPLATE, Slow(), 10**6)
    render(pieces, ["One."], "")
    assert pieces.size == weigh("One.")


def test_threads(switching):
    pieces = Pieces(TEMPLATE, TOKENIZER, weigh(*map(str, range(3))))
    asked = [(NAMES[number % 3], [user(f"{number % 50} é"), {"role": "assistant", "content": str(number % 7)}]) for number in range(2000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: pieces.render(one[1], None, {}, tenant=one[0]).tolist(), asked))
    assert found == [TEMPLATE.render(messages) for _, messages in asked]
    sizes = {
        tenant: sum(len(text) * (1 if text.isascii() else 8) + len(tokens) + EACH for text, tokens in used.items())
        for tenant, used in pieces._used.items()
    }
    assert pieces._held == sizes
    assert pieces.size == sum(sizes.values()) <= pieces.limit
