"""What copies are not aligned, however alike: other tenants and tools, other histories, flags, templates that the rows cannot go on from."""

import json

import numpy as np

from qjax.model.template import Template
from qjax.serving.align import Answer, Parted, Why
from qjax.serving.parse import Span
from qjax.serving.records import LOOKED
from tests.serving.copies import CLOSING, NEXT, OFF, USER, ask, expect_rows, expect_sent, said
from tests.serving.talk import MODEL, PHRASE, TOKENIZER, TOOLS, Server, call, rows, says, spell


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
    # a question that is as long as what is dropped
    _, message = ask(server, "A\n</think>\n\nYes.", kwargs=kwargs)
    short = [USER, message, {"role": "user", "content": "B"}]
    assert len(server.sent([USER, message], kwargs, ask=False)) == len(server.sent(short, kwargs, ask=False))
    expect_sent(server, [*short, NEXT], Why.TEMPLATE, kwargs=kwargs)


def test_a_template_that_counts_its_messages():
    """What it writes after an answer depends on how many there were before."""
    source = MODEL.template.source.replace("<|im_start|>user\\n' ~", "<|im_start|>user\\n' ~ loop.index0 ~")
    server = Server(template=Template(source, TOKENIZER))
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
    """One that trims nothing and writes ids: a text's edges and an id count."""
    source = MODEL.template.source.replace(" | trim", "").replace("~ call.name ~", "~ call.name ~ (entry.id or '') ~")
    server = Server(template=Template(source, TOKENIZER))
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


def test_a_template_whose_answers_have_no_end():
    for end in ("", "{{- '\\n###\\n' }}"):
        source = MODEL.template.source.replace("{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'", end + "{%- elif message.role == 'tool'")
        assert source != MODEL.template.source
        for text in ("One.\n</think>\n\nTwo.", "One."):
            server = Server(template=Template(source, TOKENIZER))
            _, message = ask(server, text)
            expect_sent(server, said(message), Why.TEMPLATE)
        server = Server(template=Template(source, TOKENIZER), align=False)
        _, message = ask(server, "One.\n</think>\n\nTwo.")
        expect_sent(server, said(message, reasoning_content="One.\n"), Why.OFF)
    source = MODEL.template.source.replace(
        "<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'", "' ~ ('' if tools else '<|im_end|>\\n') }}\n    {%- elif message.role == 'tool'"
    )
    server = Server(template=Template(source, TOKENIZER))  # only where there are tools: that shows at the place alone
    _, message = ask(server, "One.\n</think>\n\nTwo.")
    expect_sent(server, said(message), Why.TEMPLATE)


def test_one_of_many_answers_to_one_prompt():
    server = Server()
    records = [ask(server, f"One.\n</think>\n\nNumber {n}.", chops=(2,)) for n in range(LOOKED + 3)]
    record, message = records[0]
    expect_rows(server, said(message), [*rows(record), *CLOSING])
    expect_sent(server, said(message, content="Number 0"), Why.ANSWER)  # a beginning is looked for among the newest only


def test_nothing_is_kept_of_nothing():
    server = Server()
    prompt = server.align([USER])
    assert server.answer(prompt, [])[0] is None
    other = Answer(np.array(spell("One.")), [Span("content", "Two.")])  # spans of another text
    assert server.aligner.keep(prompt, other) is None
    assert len(server.records) == 0
