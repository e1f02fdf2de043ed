"""Answers parted as they stream: alike for every way of cutting them, nothing lost, and what the chat template wrote comes back."""

import itertools
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qjax.model.source import load
from qjax.serving import parse
from qjax.serving.parse import Arguments, CallBegin, CallEnd, Content, Parser, Reasoning, parse_whole

NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PARAMETERS = {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "u": NULLABLE}}
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": PARAMETERS}}, {"type": "function", "function": {"name": "bare"}}]


def written(name, **values):
    """A call as the template writes it."""
    parameters = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


CALL = written("w", s="a", n=12)
BEGUN = "<tool_call>\n<function=w>\n<parameter=s>\n"
ENDED = "\n</parameter>\n</function>\n</tool_call>"
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=w>", "</function>", "<parameter=s>", "<parameter=n>", "<parameter=u>", "<parameter=k>"),
    *("</parameter>", "<think>", "</think>", "\n", "\n\n", " ", "<", "</", "x", '"', "\\", "é", "12", "[1, 2]", "null", CALL, BEGUN, ENDED),
]
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 300), max_size=6)


def pieces(text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def stream(fed, opened=False, tools=TOOLS):
    """(events, those of one kind that follow each other joined, spans) of an answer that comes in such pieces."""
    parser, events = Parser(opened, tools, "id-{}".format), []
    for event in [*itertools.chain.from_iterable(map(parser.feed, fed)), *parser.flush()]:
        text = getattr(event, "text", None)
        assert text != ""
        if text and events and type(events[-1]) is type(event):
            text = events.pop().text + text
        at = (event.index,) if isinstance(event, Arguments) else ()
        events.append(event if text is None else type(event)(*at, text))
    assert parser.flush() == []
    return events, parser.spans


def call(name, arguments, index=0, complete=True):
    events = [CallBegin(index, f"id-{index}", name), *([Arguments(index, arguments)] if arguments else [])]
    return [*events, CallEnd(index)] if complete else events


@given(TEXT, CUTS, st.booleans())
@example(BEGUN + CALL + ENDED, [200], False)
@example(BEGUN + BEGUN + ENDED, [10], False)
def test_pieces_do_not_matter_and_nothing_is_lost(text, cuts, opened):
    events, spans = stream([text], opened)
    assert stream(list(text), opened) == stream(pieces(text, cuts), opened) == (events, spans)
    assert "".join(span.raw for span in spans) == text
    parts = {part: "".join(span.raw for span in spans if span.part == part) for part in ("reasoning", "content")}
    assert parts["content"] == "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    before = "" if opened else r"(\s*<think>)?"
    assert re.fullmatch(f"{before}{re.escape(reasoning)}(</think>\n{{0,2}})?", parts["reasoning"])
    raws = [span.raw for span in spans if span.part == "call"]
    answer = parse_whole(text, opened, TOOLS, "id-{}".format)
    assert answer.spans == spans
    assert (answer.reasoning, answer.content) == (reasoning, parts["content"])
    assert list(itertools.chain(*(call(c.name, c.arguments, i, c.complete) for i, c in enumerate(answer.calls)))) == [
        event for event in events if not isinstance(event, Reasoning | Content)
    ]
    for raw, found in zip(raws, answer.calls, strict=True):
        assert bare(raw) in rewritten(found)


def bare(text):
    return re.sub(r"\s", "", text)


def rewritten(found):
    """What a model may have written for a call, without white space."""
    begin, arguments = f"<tool_call><function={found.name}>", found.arguments
    if found.complete:
        pairs = json.loads(arguments, object_pairs_hook=list)
        whole = bare(begin + "".join(map(parameter, pairs)) + "</function></tool_call>")
        return whole, whole.removesuffix("</tool_call>")  # the answer's end stands for it
    try:
        *pairs, (key, text) = json.loads(arguments + '"}', object_pairs_hook=list)
    except ValueError:  # an unfinished value that is no string stands as it is
        before, text = arguments.rsplit('"n": ', 1)
        pairs, key = json.loads(before + '"n": 0}', object_pairs_hook=list)[:-1], "n"
    return (bare(begin + "".join(map(parameter, pairs)) + f"<parameter={key}>{text}"),)


def parameter(pair):
    key, text = pair
    return f"<parameter={key}>{text if isinstance(text, str) else json.dumps(text)}</parameter>"


def test_control_a_parser_that_holds_nothing_back_is_found_out(monkeypatch):
    forms = [form for form in vars(parse).values() if isinstance(form, parse._Form)]
    assert len(forms) == 7
    assert stream([BEGUN, "x" + ENDED]) == stream(list(BEGUN + "x" + ENDED))
    for form in forms:
        monkeypatch.setattr(form, "begun", re.compile("(?!)"))
    assert stream([BEGUN, "x" + ENDED]) != stream(list(BEGUN + "x" + ENDED))


def takes(text):
    """A call with that value."""
    return call("w", json.dumps({"s": text}))


ANSWERS = {
    "reasoning, content, two calls, line ends": (
        f"It is.\n</think>\n\nI look.  \n\n{CALL}\n{written('bare')}\n",
        True,
        [Reasoning("It is.\n"), Content("I look.  "), *call("w", '{"s": "a", "n": 12}'), *call("bare", "{}", 1), Content("\n")],
    ),
    "content's own line ends": ("a\n\n\n" + CALL + "\n\n\nb", False, [Content("a\n"), *call("w", '{"s": "a", "n": 12}'), Content("\n\n\nb")]),
    "a tool that was not offered": (written("other", k="[1]"), False, call("other", '{"k": [1]}')),
    "tags on one line": (re.sub(r"\n", "", CALL), False, call("w", '{"s": "a", "n": 12}')),
    "a call in the reasoning": (f"I call {CALL}</think>", True, [Reasoning(f"I call {CALL}")]),
    "a call without function": ("<tool_call>\n<parameter=s>\nx", False, [Content("<tool_call>\n<parameter=s>\nx")]),
    "a call in JSON": ('<tool_call>\n{"name": "w"}\n</tool_call>', False, [Content('<tool_call>\n{"name": "w"}\n</tool_call>')]),
    "text in a call": ("<tool_call>\n<function=w>\nx" + ENDED, False, [Content("<tool_call>\n<function=w>\nx" + ENDED)]),
    "a function without call": ("<function=w>\n</function>", False, [Content("<function=w>\n</function>")]),
    "cut before the first value": ("<tool_call>\n<function=w>\n<param", False, [Content("<tool_call>\n<function=w>\n<param")]),
    "cut after the key": (BEGUN, False, call("w", '{"s": "', complete=False)),
    "cut in a value": (BEGUN + 'say "x', False, call("w", '{"s": "say \\"x', complete=False)),
    "cut in a value's end": (BEGUN + "x\n</para", False, call("w", '{"s": "x\\n</para', complete=False)),
    "cut between two values": (BEGUN + "x\n</parameter>\n<par", False, call("w", '{"s": "x\\n</parameter>\\n<par', complete=False)),
    "cut in a number": (CALL[: CALL.index("2\n")], False, call("w", '{"s": "a", "n": 1', complete=False)),
    "cut in what may be null": (BEGUN.replace("=s", "=u") + "nu", False, call("w", '{"u": "nu', complete=False)),
    "cut in the last tag": (CALL[:-4], False, [*call("w", '{"s": "a", "n": 12}'), Content("\n</tool_c")]),
    "a value's end that no tag follows": (f"{BEGUN}a\n</parameter>\nb{ENDED}", False, takes("a\n</parameter>\nb")),
    "a function's end that no call's end follows": (
        f"{BEGUN}<function>\n<parameter>a</parameter>\n</function>\nb{ENDED}",
        False,
        takes("<function>\n<parameter>a</parameter>\n</function>\nb"),
    ),
    "a call quoted": (BEGUN + CALL + ENDED, False, takes(CALL)),
    "two calls quoted, in one another": (
        f"{BEGUN}{BEGUN}{CALL}{ENDED}.{ENDED}",
        False,
        takes(BEGUN + CALL + ENDED + "."),
    ),
    "a call without parameters quoted": (f"{BEGUN}{written('bare')} .{ENDED}", False, takes(written("bare") + " .")),
    "a quoted call that never ends": (f"{BEGUN}{BEGUN}x{ENDED}", False, takes(BEGUN + "x")),
    "a call's begin named": (f"{BEGUN}<tool_call> x{ENDED}", False, takes("<tool_call> x")),
    "an empty value": (BEGUN + ENDED, False, takes("")),
    "an empty value without its line": (BEGUN + ENDED[1:], False, takes("")),
    "line ends in a value": (f"{BEGUN}\n\n x\r\n\n{ENDED}", False, takes("\n\n x\r\n\n")),
    "one key twice": (f"{BEGUN}a\n</parameter>\n<parameter=s>\nb{ENDED}", False, call("w", '{"s": "a", "s": "b"}')),
}


@pytest.mark.parametrize("case", ANSWERS)
@given(CUTS)
def test_answers(case, cuts):
    text, opened, events = ANSWERS[case]
    assert stream(pieces(text, cuts), opened)[0] == events


def test_each_call_is_a_span_of_its_own():
    parts = [("reasoning", "a\n</think>\n\n"), ("content", "b"), ("call", "\n\n" + CALL), ("call", CALL), ("call", "\n" + BEGUN), ("content", "x")]
    assert stream(raw for _, raw in parts[:-1])[1] == [("content", "a\n</think>\n\nb"), *parts[2:-1]]
    assert stream([raw for _, raw in parts[:4] + parts[-1:]], opened=True)[1] == parts[:4] + parts[-1:]


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_a_call_is_content(tools):
    assert stream(["a\n\n", CALL], tools=tools)[0] == [Content("a\n\n" + CALL)]


def test_a_string_streams_and_a_value_of_another_type_comes_whole():
    parser = Parser(False, TOOLS, str)
    parser.feed(BEGUN)
    assert [parser.feed(c) for c in 'say "é" '] == [[Arguments(0, t)] for t in ("s", "a", "y", " ", '\\"', "é", '\\"', " ")]
    assert parser.feed("\n") == parser.feed("<") == parser.feed("/p") == []
    assert parser.feed("a\n") == [Arguments(0, r"\n</pa")]
    assert parser.feed("</parameter>\n<parameter=n>\n1") == [Arguments(0, '", "n": ')]
    assert parser.feed("2") == []
    assert parser.feed("\n</parameter>\n</function>\n</tool_call>") == [Arguments(0, "12}"), CallEnd(0)]


@pytest.mark.parametrize("begin", ["", BEGUN, BEGUN + BEGUN])
@pytest.mark.parametrize(
    "text",
    [
        *(
            "\n" * 999,
            "<" * 99,
            "<tool_call>" + " " * 999,
            "<tool_call><function=" + "x" * 999,
            ("<tool_call>" + " " * 64 + "<function=" + "x" * 256) * 3,
        ),
        *("</parameter>" + "\n" * 999, "</parameter><parameter=" + "x" * 999, "</function>" + "\t" * 999),
    ],
)
def test_what_is_held_back_is_bounded(begin, text):
    parser, fed = Parser(False, TOOLS, str), ""
    for c in "x" + begin + text:
        parser.feed(c)
        fed += c
        assert len(fed) - sum(len(span.raw) for span in parser.spans) <= 700


def test_an_id_is_made_once_for_each_call():
    made = []
    parse_whole(CALL + CALL + "<tool_call>\n<function=w>\n", False, TOOLS, lambda index: made.append(index) or f"{index}")
    assert made == [0, 1]


WORDS = st.text('ab1 \n\t\r"\\é語😀{}[]:,=/>', max_size=12)
QUOTED = st.lists(
    st.sampled_from(["", "</parameter>\n.", "<parameter=s>.", "</function>.", "<tool_call>.", "</tool_call>.", "<", CALL, written("bare")]),
    max_size=3,
)
STRINGS = st.builds(lambda words, quoted: words + "".join(f"{text}{words}" for text in quoted), WORDS, QUOTED)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False), lambda v: st.lists(v) | st.dictionaries(WORDS, v)
)
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"s": STRINGS, "n": st.integers(), "u": st.none() | STRINGS.filter(lambda s: s.strip() != "null"), "k": FREE, "a key": FREE}
)
CALLS = st.lists(st.tuples(st.sampled_from(["w", "other.tool", "bare"]), ARGUMENTS), max_size=3)


@pytest.fixture(scope="module")
def rendered():
    """The text that the embedded model's template makes of messages."""
    model = load("embedded")
    return lambda messages, **variables: model.tokenizer.decode(model.template.render(messages, TOOLS, **variables))


@given(thinks=st.booleans(), reasoning=WORDS.map(str.strip), content=WORDS.map(str.strip), calls=CALLS, cuts=CUTS)
def test_what_the_template_writes_comes_back(rendered, thinks, reasoning, content, calls, cuts):
    calls = [(name, {key: v for key, v in arguments.items() if name == "w" or not isinstance(v, str)}) for name, arguments in calls]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning if thinks else ""}
    answer["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    ask = [{"role": "user", "content": "?"}]
    prompt = rendered(ask, enable_thinking=thinks)
    whole = rendered([*ask, answer], add_generation_prompt=False)
    assert whole.startswith(prompt)
    text = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    found = parse_whole(text, prompt.endswith("<think>\n"), TOOLS, str)
    assert (found.reasoning.strip(), found.content) == (reasoning if thinks else "", content)
    assert [(c.name, json.loads(c.arguments), c.complete) for c in found.calls] == [(name, arguments, True) for name, arguments in calls]
    assert stream(pieces(text, cuts), thinks) == stream([text], thinks)
