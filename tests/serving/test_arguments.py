"""A parameter's value is a string or JSON as its schema says, and always JSON that the client can send back."""

import json

import pytest

from qjax.serving.parse import parse_whole

PROPERTIES = {"s": {"type": "string"}, "n": {"type": "integer"}, "u": {"anyOf": [{"type": "string"}, {"type": "null"}]}}


def answered(parameters, text, key="s"):
    """The arguments' text where a model wrote that for a parameter."""
    tools = [{"type": "function", "function": {"name": "w", "parameters": parameters}}]
    call = f"<tool_call>\n<function=w>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (found,) = parse_whole(call, False, tools, str).calls
    assert found.complete
    return found.arguments


def arguments(properties, text, key="s"):
    return answered({"type": "object", "properties": properties}, text, key)


@pytest.mark.parametrize(
    ("key", "text", "json_text"),
    [
        *[("s", text, json.dumps(text)) for text in ("12", "null", '"a"', '{"a": 1}', "C:\\n\t\0")],
        ("s", "é語😀", '"é語😀"'),
        *[("n", text, text) for text in ("12", " -1.50 ", '"12"', "null", '{"b": 1,\n "a": [1.0]}')],
        *[
            ("n", text, json.dumps(text))
            for text in ("twelve", "1,", "", "NaN", "-Infinity", "1e999", "[" * 9999, "1" * 9999, '"\\ud800"', '{"\\ud800":1}')
        ],
        *[("u", text, text) for text in ("null", " null")],
        *[("u", text, json.dumps(text)) for text in ("a", "12", "[1]", '"null"', "nul")],
        *[("k", text, text) for text in ("12", "1.5", "true", "null", "[1,2]", '{"a": "b"}')],
        *[("k", text, json.dumps(text)) for text in ("a", '"a"', "[1", "Null", "")],
    ],
)
def test_the_schema_says_what_is_a_string(key, text, json_text):
    assert arguments(PROPERTIES, text, key) == f'{{"{key}": {json_text}}}'


REFERRED = {"$ref": "#/$defs/T"}


@pytest.mark.parametrize(
    ("schema", "strings"),
    [
        ({"type": "string", "enum": ["1"]}, {"12", "1.5", "null", "true", "[1]"}),
        ({"type": ["string", "integer"]}, {"1.5", "null", "true", "[1]"}),
        ({"type": ["string", "number"]}, {"null", "true", "[1]"}),
        ({"oneOf": [{"type": "string"}, {"anyOf": [{"type": "array"}, {"const": True}]}]}, {"12", "1.5", "null"}),
        ({"enum": ["a", None]}, {"12", "1.5", "true", "[1]"}),
        ({"type": "object"}, set()),
        *[
            (schema, set())
            for schema in ({}, REFERRED, {"anyOf": [REFERRED, {"type": "string"}]}, True, "string", {"type": 5}, {"type": ["text", {}]})
        ],
        *[(schema, set()) for schema in ({"anyOf": "string"}, {"enum": "a"}, {"enum": []}, None)],
    ],
)
def test_what_a_schema_allows(schema, strings):
    for text in ("12", "1.5", "null", "true", "[1]"):
        assert arguments({"s": schema}, text) == f'{{"s": {json.dumps(text) if text in strings else text}}}'
    assert arguments({"s": schema}, '"a"') == ('{"s": "a"}' if schema == {"type": "object"} else r'{"s": "\"a\""}')


@pytest.mark.parametrize("parameters", [None, True, {}, {"properties": None}, {"properties": ["s"]}])
def test_a_tool_without_parameters_may_have_any(parameters):
    assert [answered(parameters, text) for text in ("a", "12")] == ['{"s": "a"}', '{"s": 12}']
