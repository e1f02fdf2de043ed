"""Client messages become the prompt that the template would make of tidy ones, and the boundaries lie where later prompts part."""

import json
import types

import hypothesis.strategies as st
import pytest
from hypothesis import given

from qjax.model.source import EMBEDDED
from qjax.model.template import Template
from qjax.model.tokenizer import Tokenizer
from qjax.serving.errors import BadRequest
from qjax.serving.prompts import Prompts
from qjax.serving.render import EFFORTS, arguments_of, messages_of, variables_of
from qjax.serving.schema import Chat
from qjax.serving.validation import validated

TOKENIZER = Tokenizer.from_directory(EMBEDDED)
TEMPLATE = Template((EMBEDDED / "chat_template.jinja").read_text(), TOKENIZER)
PROMPTS = Prompts(types.SimpleNamespace(name="tiny", template=TEMPLATE, tokenizer=TOKENIZER))
USER = {"role": "user", "content": "Where is it?"}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}]


def prompt(messages, **fields):
    return PROMPTS.prompt(validated(Chat, {"messages": messages, **fields}))


def shown(messages, **fields) -> str:
    return TOKENIZER.decode(prompt(messages, **fields).tokens)


def said(content="", **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def called(arguments, **fields) -> dict:
    return said(None, tool_calls=[{"id": "call_1", "type": "function", "function": {"name": "read", "arguments": arguments}}], **fields)


def refusal(messages, **fields) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        prompt(messages, **fields)
    return refused.value


def test_developers_and_several_systems_are_one_system_message_at_the_head():
    def system(role, text):
        return {"role": role, "content": text}

    tidy = [system("system", "One.\n\nTwo.\n\nThree."), USER, said("Here.")]
    with pytest.raises(ValueError, match="the system message must come first"):  # what the template says to the messages as they are
        TEMPLATE.render([system("system", "One."), system("system", "Two."), USER])
    assert shown([system("developer", "One."), system("system", "Two."), USER, said("Here."), system("developer", "Three.")]) == shown(tidy)
    assert shown([system("system", [{"type": "text", "text": "One."}]), system("system", " \n"), system("system", "Two."), USER]) == shown(
        [system("developer", "One.\n\nTwo."), USER]
    )
    assert shown([system("system", ""), USER]) == shown([USER])


def test_without_a_user_message_the_answer_is_clear():
    told = refusal([{"role": "system", "content": "x"}, said("y")])
    assert (told.status, told.message, told.param) == (400, "expected a message of the user, found none", "messages")


def test_other_complaints_of_the_template_are_told():
    assert refusal([USER], chat_template_kwargs={"namespace": 1}).message.startswith("chat template: ")
    model = types.SimpleNamespace(name="plain", template=None, tokenizer=TOKENIZER)
    with pytest.raises(BadRequest, match="plain has no chat template: /v1/completions continues plain text"):
        Prompts(model).prompt(validated(Chat, {"messages": [USER]}))


@pytest.mark.parametrize("effort", [*EFFORTS, "max", "High", ""])
def test_efforts(effort):
    if effort not in EFFORTS:
        assert refusal([USER], reasoning_effort=effort).param == "reasoning_effort"
        return
    same = {"none": {"enable_thinking": False}, "minimal": {"reasoning_effort": "low"}, "high": {"reasoning_effort": "xhigh"}}
    alike = same.get(effort, {"reasoning_effort": effort})
    want = TEMPLATE.render([USER], **alike)
    for fields in ({"reasoning_effort": effort}, {"chat_template_kwargs": {"reasoning_effort": effort}}):
        assert prompt([USER], **fields).tokens.tolist() == want
    assert (want == TEMPLATE.render([USER])) == (effort == "medium")  # the embedded template's own default


def test_variables_of_the_template():
    assert not prompt([USER], enable_thinking=False).opened
    assert prompt([USER], chat_template_kwargs={"enable_thinking": True}, enable_thinking=False).opened
    assert prompt([USER], chat_template_kwargs={"enable_thinking": None}).opened
    assert not prompt([USER], reasoning_effort="none").opened
    assert variables_of(validated(Chat, {"messages": [USER], "reasoning_effort": "high", "enable_thinking": False})) == {"enable_thinking": False}
    old = [USER, said("Here.", reasoning_content="A thought."), USER]
    assert "A thought." in shown(old)
    assert "A thought." not in shown(old, preserve_thinking=False)
    assert "A thought." not in shown(old, chat_template_kwargs={"preserve_thinking": False})
    for wrong in ({"messages": []}, {"self": 1}, {"add_generation_prompt": False}, {"tools": []}, {"a-b": 1}, {"enable_thinking": "no"}):
        assert refusal([USER], chat_template_kwargs=wrong).status == 400


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_comes_in_under_every_name(name):
    want = TEMPLATE.render([USER, said("Here.", reasoning_content="A thought."), USER])
    assert prompt([USER, said("Here.", **{name: "A thought."}), USER]).tokens.tolist() == want
    assert prompt([USER, said("Here.", **{"reasoning_content": "A thought.", name: "A thought."}), USER]).tokens.tolist() == want
    assert prompt([USER, said("Here."), USER]).tokens.tolist() != want


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>\nA thought.\n</think>\n\nHere.", "A thought.", "Here."),
        (" \n<think>A thought.</think>Here.", "A thought.", "Here."),
        ("<think>\n\n</think>\n\nHere.", "", "Here."),
        ("<think>A thought.", "A thought.", ""),
        ("Is <think>this</think> a tag?", "", "Is <think>this</think> a tag?"),
        ("<thi", "", "<thi"),
    ],
)
def test_think_tags_at_the_beginning_of_an_answer_are_its_reasoning(content, reasoning, rest):
    want = prompt([USER, said(rest, reasoning_content=reasoning), USER]).tokens.tolist()
    parts = [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]
    assert prompt([USER, said(content), USER]).tokens.tolist() == prompt([USER, said(parts), USER]).tokens.tolist() == want
    assert (TEMPLATE.render([USER, said(content), USER]) == want) == (content == rest)  # the template alone does not part them


def test_think_tags_beside_reasoning_are_the_answers_own_text():
    assert messages_of(validated(Chat, {"messages": [USER, said("<think>x</think>", reasoning="y")]}).messages)[1] == {
        "role": "assistant",
        "content": "<think>x</think>",
        "reasoning_content": "y",
    }


@given(text=st.text(max_size=20), cut=st.integers(0, 20), role=st.sampled_from(["system", "user", "assistant", "tool"]))
def test_contents_render_alike_in_every_form(text, cut, role):
    def message(content):
        return [USER, {"role": role, "content": content}, USER]

    parts = [{"type": "text", "text": text[:cut]}, {"type": "text", "text": text[cut:]}]
    assert shown(message(text)) == shown(message(parts))
    if role in ("assistant", "tool"):
        assert shown(message("")) == shown(message(None)) == shown(message([])) == shown([USER, {"role": role}, USER])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(
    arguments=st.dictionaries(st.text(max_size=4), json_values, max_size=4),
    ascii=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
)
def test_c9_arguments_render_alike_as_a_string_and_as_an_object(arguments, ascii, separators):
    text = json.dumps(arguments, ensure_ascii=ascii, separators=separators)
    messages = [[USER, called(form), {"role": "tool", "tool_call_id": "call_1", "content": "x"}] for form in (arguments, text)]
    assert prompt(messages[0], tools=TOOLS).tokens.tolist() == prompt(messages[1], tools=TOOLS).tokens.tolist()


def test_c9_the_template_alone_refuses_a_string():
    with pytest.raises(ValueError, match="the arguments of a tool call must be an object"):
        TEMPLATE.render([USER, called('{"path": "/a"}')])
    assert "<parameter=path>\n/a\n</parameter>" in shown([USER, called('{"path": "/a"}')])


@pytest.mark.parametrize(
    "text",
    ['{"path": "/a', "[1, 2]", "12", "null", "path", '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 70 + "1" + "}" * 70, "[" * 10**5, '{"a": 1e999}'],
)
def test_arguments_that_are_no_object_stay_as_they_are(text):
    assert arguments_of(text) == {"arguments": text}
    assert text in shown([USER, called(text)])


@given(text=st.text(max_size=12) | st.text('{}[]":,\\u0d8 1en', max_size=12))
def test_no_arguments_fail(text):
    prompt([USER, called(text)])


def test_calls_without_arguments():
    for nothing in ("", " ", None, "{}", {}):
        assert shown([USER, called(nothing)]) == shown([USER, called({})])


def test_tools_are_rendered_as_sent_and_not_where_no_call_is_wanted():
    odd = [{"zeta": 1, "type": "function", "function": {"parameters": {"b": 1, "a": 2}, "name": "read", "strict": True}}]
    assert json.dumps(odd[0]) in shown([USER], tools=odd)
    assert shown([USER], tools=odd, tool_choice="none") == shown([USER], tools=[]) == shown([USER])
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}]}
    ids = messages_of(validated(Chat, {"messages": [USER, called({}), result]}).messages)
    assert (ids[1]["tool_calls"][0]["id"], ids[2]) == ("call_1", {"role": "tool", "content": "x", "tool_call_id": "call_1"})
