"""Copies of one answer, as clients make them: which tokens are served, and why where they are not the rows'."""

import pytest

from qjax.serving.align import Parted, Why
from tests.serving.copies import ASKED, CLOSING, NEXT, NEXT_USER, OFF, THOUGHT, USER, ask, expect_rows, expect_sent, said
from tests.serving.talk import PHRASE, SPECIAL, TOKENIZER, Server, call, rows, says, spell, thoughts


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


def test_arguments_that_nobody_reads():
    """Brackets 900 deep are JSON to the parser; what a client could send back is not compared with them."""
    server = Server()
    record, message = ask(server, "\n</think>\n\n" + call("look", {"n": "[" * 900 + "]" * 900}))
    assert record.calls[0][0] == "look"
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


def test_tags_that_the_model_spells_out():
    """As text they part an answer all the same, and come back as the template's own tags."""
    server = Server()
    spelled = [*TOKENIZER.encode("One.\n</think>\n\nTwo.")]
    assert SPECIAL["</think>"] not in spelled
    record, message = server.answer(server.align([USER]), spelled)
    assert message["content"] == "Two."
    expect_rows(server, said(message), [*rows(record), *CLOSING, *NEXT_USER, *ASKED])


def test_reasoning_that_the_model_opens_itself():
    server = Server()
    record, message = ask(server, " <think>\n One.\n</think>\n\nTwo.", kwargs=OFF)
    assert (record.said, message["reasoning_content"].strip()) == (("One.",), "One.")
    expect_rows(server, said(message), [*rows(record), *CLOSING, *NEXT_USER], kwargs=OFF)
    broken = [*rows(record)[: record.prompt.size], *spell(" <think>\n On"), *THOUGHT, *NEXT_USER]
    expect_rows(server, said(message, content="", reasoning_content="On"), broken, kwargs=OFF)


def test_a_call_whose_last_tag_never_came():
    """The parser takes it for a call; the rows have no end of it, which the template writes."""
    server, first = Server(), call("look", {"s": "a"})
    text = "\n</think>\n\n" + first + "\n" + call("run", {"s": "b"}).removesuffix("\n</tool_call>")
    record, message = ask(server, text, chops=(2,))
    assert len(message["tool_calls"]) == 2
    expect_sent(server, said(message), Why.ANSWER)
    only = [*rows(record)[: record.prompt.size], *spell("\n</think>\n\n" + first, (2,)), *CLOSING, *NEXT_USER]
    expect_rows(server, said(message, tool_calls=message["tool_calls"][:1]), only)


def test_reasoning_that_was_left_out_once_and_is_sent_later():
    """It is what the rows have, not what an earlier copy said."""
    server = Server()
    _, one = ask(server, "One.\n</think>\n\nTwo.", chops=(2,))
    bare = {**one, "reasoning_content": ""}
    record, two = server.answer(server.align(said(bare)), spell("Three.\n</think>\n\nFour.", (2,)))
    for first in (one, bare):
        expect_rows(server, [*said(first), two, NEXT], [*rows(record), *CLOSING], at=3)
    expect_sent(server, [*said({**one, "reasoning_content": "Other."}), two, NEXT], Why.REASONING)


def test_an_id_selects_what_was_generated_under_it_last():
    """Four answers, two and two alike: the same tokens come back under another id."""
    server = Server()
    texts = [f"{thought}\n</think>\n\n" + call("look", {"s": "a"}) for thought in ("One.", "Two.")]
    answers = [ask(server, text, chops=(2,)) for text in texts * 2]
    for record, message in answers:
        expect_rows(server, said(message, reasoning_content=""), [*rows(record), *CLOSING])
