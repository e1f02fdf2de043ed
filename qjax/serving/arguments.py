"""The arguments of a tool call as JSON text: what a model wrote for a parameter, under the parameter's JSON schema."""

import json

from qjax.serving.limits import is_text, parse

_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
ANY, STRING = frozenset(_TYPES.values()), frozenset({"string"})


def types_of(schema: object) -> frozenset[str]:
    """The JSON types that a schema allows by type, anyOf, oneOf, enum or const; all of them where it does not tell."""
    allowed, schemas = set(), [schema]
    for schema in schemas:  # grows
        schema = schema if isinstance(schema, dict) else {}
        named, choice, values = schema.get("type"), schema.get("anyOf") or schema.get("oneOf"), schema.get("enum")
        if isinstance(named, str | list):
            allowed |= {name for name in ([named] if isinstance(named, str) else named) if isinstance(name, str)}
        elif isinstance(choice, list):
            schemas += choice
        elif isinstance(values, list) or "const" in schema:
            allowed |= {_TYPES[type(value)] for value in (values if isinstance(values, list) else [schema["const"]])}
        else:
            return ANY
    return frozenset(allowed | ({"integer"} if "number" in allowed else set())) & ANY or ANY


def json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON.

    Where a string is allowed: the text itself if it is JSON of another type that is allowed, else a string. Where none is: the text itself if
    it is JSON, else a string all the same. JSON is what this server reads: no infinite number, no half of a surrogate pair, for the client sends
    the arguments back.
    """
    if types == STRING:
        return f'"{escaped(text)}"'
    try:
        value = parse(text)
        taken = is_text(json.dumps(value, ensure_ascii=False)) and ("string" not in types or _TYPES[type(value)] in types - STRING)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits; brackets a thousand deep
        taken = False
    return text if taken else f'"{escaped(text)}"'


def escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string. That of a text is that of its pieces, joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def properties_of(tool: dict) -> dict:
    """The parameters' schemas of a tool, by their names."""
    parameters = tool.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}
