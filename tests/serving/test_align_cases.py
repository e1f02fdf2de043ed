"""Copies one by one: which tokens are served, and the reason where they are not the rows'."""

import json

import pytest

from qjax.model.template import Template
from qjax.serving.align import Parted, Why
from tests.serving.talk import MODEL, PHRASE, SPECIAL, TOKENIZER, TOOLS, Server, call, rows, says, spell, thoughts

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


@pytest.mark.parametrize(
    "fields", [{}, {"reasoning_content": ""}, {"reasoning_content": None}, {"reasoning_content": "A thought.", "content": " An answer."}]
)
def test_the_copies_of_clients(fields):
    """Kept, emptied, left out, trimmed: the rows, the template's closing, the next question."""
    server = Server()
    record, message = ask(server, "A thought.\n\n</think>\n\nAn answer.\n\n", chops=(3,))
    expect_rows(server, said(message, **fields), [*rows(record), *CLOSING, *NEXT_USER, *ASKED])


@pytest.mark.parametrize(
    ("content", "whole", "rest"),
    [
        ("Then an", "Then", " an"),  # ends inside the token " answer"
        (" Then\n", "Then", ""),  # a client's own white space is none of the answer's
        ("Then answer 🙂 ", "Then answer 🙂", ""),  # a character of several tokens
    ],
)
def test_a_copy_that_ends_before_the_answer(content, whole, rest):
    server = Server()
    head, body = spell("So.\n</think>\n\n"), spell("Then answer 🙂 two", (3, 1, 7, 2))
    record, message = server.answer(server.align([USER]), [*head, *body])
    assert message["content"] == "Then answer 🙂 two"
    kept = next(body[:n] for n in range(len(body)) if TOKENIZER.decode(body[:n]) == whole)
    expected = [*rows(record)[: record.prompt.size + len(head)], *kept, *TOKENIZER.encode(rest), *CLOSING, *NEXT_USER, *ASKED]
    expect_rows(server, said(message, content=content, reasoning_content=""), expected)


@pytest.mark.parametrize("ended", [True, False])
def test_a_copy_that_ends_in_the_reasoning(ended):
    """What is left of a token's text is written anew, then what the template closes reasoning with. The next copy may leave it all out."""
    server = Server()
    record, message = ask(server, "One two three." + ("\n</think>\n\nFour." if ended else ""), chops=(2,))
    given = {"content": "", "reasoning_content": "One two t"}
    expected = [*record.prompt.tolist(), *spell("One two ", (2,)), *TOKENIZER.encode("t"), *THOUGHT, *NEXT_USER, *ASKED]
    assert len(TOKENIZER.encode("th")) == 1
    expect_rows(server, said(message, **given), expected)
    record, message = server.answer(server.align(said(message, **given)), spell("\n</think>\n\nYes.", (2,)))
    for first in (given, {"content": ""}):
        messages = [USER, {"role": "assistant", **first}, NEXT, {**message, "reasoning_content": ""}, NEXT]
        expect_rows(server, messages, [*rows(record), *CLOSING, *NEXT_USER, *ASKED], at=3)
    messages[1] = {"role": "assistant", "content": "", "reasoning_content": "One two"}  # now it ends earlier
    prompt = server.align(messages)
    assert (prompt.matched, prompt.parted) == (1, Parted(3, Why.REASONING))


def test_reasoning_whose_end_is_not_sent_back_with_a_whole_answer():
    server = Server()
    _, message = ask(server, "One two.\n</think>\n\nThree.")
    expect_sent(server, said(message, reasoning_content="One"), Why.REASONING)
    expect_sent(server, said(message, reasoning_content="One two. More."), Why.REASONING)


def test_hidden_tokens_are_put_back():
    server = Server()
    thought, phrase = spell("Long\nthought", (3,)), spell(f"\n{PHRASE}\n</think>\n\n")
    spelled, hidden = [*thought, *phrase, *spell("Short.")], [(len(thought), len(thought) + len(phrase))]
    record, message = server.answer(server.align([USER]), spelled, hidden)
    assert (record.reasoning, message["reasoning_content"]) == ("Long\nthought", "Long\nthought\n\n")
    for reasoning in ("Long\nthought", "Long\nthought\n\n", ""):
        expect_rows(server, said(message, reasoning_content=reasoning), [*rows(record), *CLOSING, *NEXT_USER, *ASKED])
    expect_sent(server, said(message, reasoning_content=f"Long\nthought\n{PHRASE}"), Why.REASONING)
    expect_rows(
        server, said(message, reasoning_content="Long\nth", content=""), [*record.prompt.tolist(), *spell("Long\nt", (3,)), *spell("h"), *THOUGHT]
    )


@pytest.mark.parametrize(("stop", "kept"), [("STOP", "One. "), (" STOP", "One."), ("e. STOP", "On")])
def test_what_stands_from_a_stop_string_on_is_not_served(stop, kept):
    server = Server()
    spelled = [*spell("So.\n</think>\n\n"), *TOKENIZER.encode("One. STOP"), *TOKENIZER.encode(" two")]
    record, message = server.answer(server.align([USER]), spelled, stop=stop)
    assert message["content"] == kept
    prompt = server.align(said(message, reasoning_content=""))
    assert prompt.matched == 1
    assert says(prompt.tokens) == says(server.sent(said(message)))
    assert "STOP" not in TOKENIZER.decode(prompt.tokens)
    assert thoughts(prompt.tokens)[0] == "So."
    assert prompt.tokens[: record.prompt.size + 4].tolist() == rows(record)[: record.prompt.size + 4]


@pytest.mark.parametrize(
    "arguments",
    ['{"n": 1.0, "s": "a b"}', '{"s":"a b","n":1}', {"s": "a b", "n": 1}, {"n": 1.0, "s": "a b"}, ' {\n"n": 1e0,\n"s": "\\u0061 b"}'],
)
def test_arguments_that_were_written_again(arguments):
    server = Server()
    record, message = ask(server, "\n</think>\n\n" + call("look", {"n": 1.0, "s": "a b"}), chops=(2,))
    message["tool_calls"][0]["function"]["arguments"] = arguments
    expect_rows(server, said(message), [*rows(record), *CLOSING, *NEXT_USER, *ASKED])


@pytest.mark.parametrize("arguments", ['{"n": 2, "s": "a b"}', '{"n": "1", "s": "a b"}', '{"s": "a b"}', '{"n": true, "s": "a b"}', "a b", "[1]"])
def test_other_arguments(arguments):
    server = Server()
    _, message = ask(server, "\n</think>\n\n" + call("look", {"n": 1, "s": "a b"}))
    message["tool_calls"][0]["function"]["arguments"] = arguments
    expect_sent(server, said(message), Why.ANSWER)


def test_ids_select_the_record_and_other_ids_do_not_matter():
    """Two answers make the same call after different thoughts: an id tells them apart, another than the server's tells nothing."""
    server = Server()
    (first, one), (second, two) = (ask(server, f"{thought}\n</think>\n\n" + call("look", {"s": "a"})) for thought in ("One.", "Two."))
    assert one["tool_calls"] != two["tool_calls"]
    theirs = {**one["tool_calls"][0], "id": "theirs"}
    for record, message, fields in [(first, one, {}), (second, two, {}), (second, one, {"tool_calls": [theirs]})]:
        expect_rows(server, said(message, **fields, reasoning_content=""), [*rows(record), *CLOSING])
    # what was thought goes before an id
    prompt = server.align(said(two, reasoning_content="One."))
    assert prompt.tokens[: len(rows(first))].tolist() == rows(first)


def test_the_newest_of_two_answers_and_the_one_that_was_thought():
    server = Server()
    (first, one), (second, _) = (ask(server, f"{thought}\n</think>\n\nYes.", chops=(2,)) for thought in ("One.", "Two."))
    expect_rows(server, said(one, reasoning_content=""), [*rows(second), *CLOSING])
    expect_rows(server, said(one), [*rows(first), *CLOSING])
    assert ask(server, "One.\n</think>\n\nYes.", chops=(2,))[0] is first  # generated again: the newest now
    expect_rows(server, said(one, reasoning_content=""), [*rows(first), *CLOSING])


def test_who_asks_and_with_what():
    server = Server()
    record, message = ask(server, "One.\n</think>\n\nTwo.", tenant="a", chops=(2,))
    messages = said(message)
    expect_rows(server, messages, [*rows(record), *CLOSING], tenant="a")
    expect_sent(server, messages, Why.UNKNOWN, tenant="b")
    expect_sent(server, messages, Why.UNKNOWN)
    expect_sent(server, messages, Why.UNKNOWN, tenant="a", kwargs=OFF)
    expect_sent(server, messages, Why.UNKNOWN, tenant="a", kwargs={"reasoning_effort": "low"})
    for tools in (TOOLS[::-1], TOOLS[:1]):
        prompt = server.align(messages, tenant="a", tools=tools)
        assert prompt.tokens.tolist() == MODEL.template.render(messages, tools)
        assert prompt.parted == Parted(1, Why.UNKNOWN)
    again = [json.loads(json.dumps(tool, sort_keys=True)) for tool in TOOLS]  # the same schemas, their keys in another order
    assert list(again[0]) != list(TOOLS[0])
    assert server.align(messages, tenant="a", tools=again).base is record


def test_results_and_calls_in_another_order():
    server = Server()
    record, message = ask(server, "\n</think>\n\n" + call("look", {"s": "a"}) + "\n" + call("run", {"s": "b"}), chops=(2,))
    results = [{"role": "tool", "tool_call_id": c["id"], "content": c["id"]} for c in message["tool_calls"]]
    prompt = server.align([USER, message, *results])
    assert prompt.base is record
    record, answer = server.answer(prompt, spell("Then.\n</think>\n\nDone.", (2,)))
    expect_rows(server, [USER, message, *results, answer, NEXT], [*rows(record), *CLOSING], at=4)
    other = server.align([USER, message, *results[::-1], answer, NEXT])
    assert (other.matched, other.parted) == (1, Parted(4, Why.UNKNOWN))
    expect_sent(server, [USER, {**message, "tool_calls": message["tool_calls"][::-1]}, *results, answer, NEXT], Why.ANSWER)


def test_a_reminder_that_moves():
    """A client adds a text to its last question and takes it away again: what is older goes on from the rows."""
    server = Server()
    first, one = ask(server, "One.\n</think>\n\nTwo.", chops=(2,))
    marked = [*said(one)[:2], {"role": "user", "content": "And? (remember)"}]
    _, two = server.answer(server.align(marked), spell("Three.\n</think>\n\nFour.", (2,)))
    messages = [*said(one), two, USER]
    prompt = server.align(messages)
    assert (prompt.base, prompt.matched, prompt.parted) == (first, 1, Parted(3, Why.UNKNOWN))
    assert says(prompt.tokens) == says(server.sent(messages))


def test_what_is_not_to_be_aligned():
    exact = "One.\n</think>\n\nTwo."
    server = Server(align=False)
    record, message = ask(server, exact, chops=(2,))
    expect_rows(server, said(message, reasoning_content="One.\n"), [*rows(record), *CLOSING])
    expect_rows(server, said(message, reasoning_content=""), [*rows(record), *CLOSING])
    for fields in ({"content": "Two. "}, {"reasoning_content": "One."}, {"content": "Tw"}, {"content": "", "reasoning_content": "On"}):
        expect_sent(server, said(message, **fields), Why.OFF)
    for text in ("One.\n\n</think>\n\nTwo.", "One.\n</think>\n\nTwo.\n", "One.\n</think>\n\n\nTwo.", "One."):
        server = Server(align=False)
        _, message = ask(server, text)
        expect_sent(server, said(message), Why.OFF)
    for thought, why in (("One.\n", None), ("One.", Why.OFF)):
        server = Server(align=False)
        thought, phrase = spell(thought), spell(PHRASE + "\n</think>\n\n")
        record, message = server.answer(server.align([USER]), [*thought, *phrase, *spell("Two.")], [(len(thought), len(thought) + len(phrase))])
        message |= {"reasoning_content": record.reasoning}
        if why:
            expect_sent(server, said(message), why)
        else:
            expect_rows(server, said(message), [*rows(record), *CLOSING])


def test_reasoning_that_is_not_to_be_put_back():
    server = Server(reasoning=False)
    record, message = ask(server, "One.\n\n</think>\n\nTwo.\n", chops=(2,))
    expect_rows(server, said(message), [*rows(record), *CLOSING])
    expect_sent(server, said(message, reasoning_content=""), Why.OFF)
    record, message = ask(server, "Two.", kwargs=OFF, chops=(2,))  # there was none
    expect_rows(server, said(message), [*rows(record), *CLOSING], kwargs=OFF)


def test_a_template_that_drops_old_reasoning():
    """Within a turn it writes what it wrote before; with the next question it writes every answer before it anew."""
    server, kwargs = Server(), {"preserve_thinking": False}
    record, message = ask(server, "One.\n</think>\n\n" + call("look", {"s": "a"}), kwargs=kwargs, chops=(2,))
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "b"}
    expect_rows(server, [USER, message, result], [*rows(record), *CLOSING], kwargs=kwargs)
    expect_sent(server, [USER, message, result, NEXT], Why.TEMPLATE, kwargs=kwargs)


def test_a_template_that_counts_its_messages():
    """What it writes after an answer depends on how many there were before."""
    source = MODEL.template.source.replace("<|im_start|>user\\n' ~", "<|im_start|>user\\n' ~ loop.index0 ~")
    server = Server(render=Template(source, TOKENIZER).render)
    record, message = ask(server, "One.\n</think>\n\nTwo.", chops=(2,))
    expect_rows(server, said(message), [*rows(record), *CLOSING])  # one message, as where it is told from
    system = {"role": "system", "content": "Be brief."}
    _, message = server.answer(server.align([system, USER]), spell("One.\n</think>\n\nTwo."))
    expect_sent(server, [system, *said(message)], Why.TEMPLATE, at=2)


def test_a_prompt_that_would_be_too_long():
    server = Server()
    record, message = ask(server, "One two three four.\n</think>\n\nFive.", chops=(2,))
    messages = said(message, reasoning_content="")
    size = server.align(messages).tokens.size
    assert size > len(server.sent(messages))
    expect_rows(server, messages, [*rows(record), *CLOSING], limit=size)
    expect_sent(server, messages, Why.LONG, limit=size - 1)


def test_a_template_of_another_kind():
    """One that trims nothing and writes ids: a text's edges and an id count. One whose answers have no end of their own is left alone."""
    source = MODEL.template.source.replace(" | trim", "").replace("~ call.name ~", "~ call.name ~ (entry.id or '') ~")
    server = Server(render=Template(source, TOKENIZER).render)
    record, message = ask(server, "One.\n</think>\n\n" + call("look", {"s": "a"}), chops=(2,))
    result = {"role": "tool", "tool_call_id": "x", "content": "b"}
    prompt = server.align([USER, message, result])
    assert prompt.base is record
    record, answer = server.answer(prompt, spell("\n</think>\n\nDone.", (2,)))
    messages = [USER, message, result, answer, NEXT]
    assert server.align(messages).base is record
    for other in ({**result, "content": "b "}, {**result, "tool_call_id": "y"}):
        assert server.align([USER, message, other, answer, NEXT]).parted == Parted(3, Why.UNKNOWN)
    theirs = [{**message["tool_calls"][0], "id": "theirs"}]
    assert server.align([USER, {**message, "tool_calls": theirs}, result, answer, NEXT]).matched is None
    endless = Template(
        MODEL.template.source.replace("{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'", "{%- elif message.role == 'tool'"), TOKENIZER
    )
    server = Server(render=endless.render)
    _, message = ask(server, "One.\n</think>\n\nTwo.")
    expect_sent(server, said(message), Why.TEMPLATE)


def test_tags_that_the_model_spells_out():
    """As text they part an answer all the same, and come back as the template's own tags."""
    server = Server()
    spelled = [*TOKENIZER.encode("One.\n</think>\n\nTwo.")]
    assert SPECIAL["</think>"] not in spelled
    record, message = server.answer(server.align([USER]), spelled)
    assert message["content"] == "Two."
    expect_rows(server, said(message), [*rows(record), *CLOSING, *NEXT_USER, *ASKED])


def test_nothing_is_kept_of_nothing():
    server = Server()
    assert server.answer(server.align([USER]), [])[0] is None
    assert len(server.records) == 0
