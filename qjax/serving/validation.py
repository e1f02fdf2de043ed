"""A request's JSON as one of the schema's bodies, or the error that the client gets."""

import functools
from typing import TypeVar

from pydantic import ValidationError

from qjax.serving.errors import BadRequest
from qjax.serving.limits import kind, step
from qjax.serving.schema import Body, Generated, TokenizeChat, TokenizeText

B = TypeVar("B", bound=Body)
UNSUPPORTED = frozenset(
    "logit_bias functions function_call modalities audio suffix continue_final_message chat_template min_tokens ignore_eos stop_token_ids bad_words "
    "prompt_logprobs guided_json guided_regex guided_choice guided_grammar structured_outputs grammar".split()
)
"""Fields of other servers that would change an answer, where they are not empty: who sends one must not believe that it counts."""


def validated(body: type[B], value: dict) -> B:
    """Raises BadRequest with the path of a field that is wrong or not supported."""
    for name in UNSUPPORTED.intersection(value) if issubclass(body, Generated) else ():
        if value[name] and value[name] != ["text"]:
            raise BadRequest(f"{name}: not supported", name)
    try:
        return body.model_validate(value)
    except ValidationError as e:
        errors = e.errors(include_url=False, include_input=False)
    # a value that fits no form of a union has an error for each: the form that fits furthest is the one that was meant
    placed = [(error, *_path(value, error)) for error in errors]
    error, path, found = max(placed, key=lambda each: (each[0]["type"] == "refused", len(each[1])))
    name = functools.reduce(step, path, "")
    alike = [error for error, where, _ in placed if where == path]
    raise BadRequest((f"{name}: " if name else "") + _words(error, alike, found), name or None)


def tokenized(value: dict) -> TokenizeText | TokenizeChat:
    """The body of /tokenize: a text, or a conversation where it has messages."""
    return validated(TokenizeChat if "messages" in value else TokenizeText, value)


def _path(value, error: dict) -> tuple[list, object]:
    """The keys of a place that are the body's own, not names of the schema's forms, and what is there; a missing field is named."""
    path, place = [], error["loc"]
    for key in place:
        if (isinstance(value, dict) and key in value) or (isinstance(value, list) and isinstance(key, int) and key < len(value)):
            value = value[key]
        elif error["type"] == "missing" and key == place[-1]:
            return [*path, key], None
        else:
            continue
        path.append(key)
    return path, value


def _words(error: dict, alike: list[dict], found) -> str:
    """What was expected, in each of the errors of one place, and what was found; of a value only its kind, for it may be a prompt."""
    if error["type"] == "refused":
        return error["msg"]
    if error["type"] == "missing":
        return "expected this field, found none"
    expected = " or ".join(dict.fromkeys(map(_expected, alike)))
    of_range = error["type"] in RANGE and isinstance(found, (int, float)) and abs(found) < 1e9
    return f"expected {expected}, found {found if of_range else kind(found)}"


RANGE = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}
KINDS = {
    "bool_type": "true or false",
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "too_short": "at least one entry",
    "union_tag_not_found": "an object with a role",
    "union_tag_invalid": "one of the roles {expected_tags}",
    "literal_error": "{expected}",
    "string_too_short": "at least {min_length} character",
    "string_too_long": "at most {max_length} characters",
}


def _expected(error: dict) -> str:
    kind_of_error, context = error["type"], error.get("ctx", {})
    if kind_of_error in RANGE:
        return f"a number {RANGE[kind_of_error]} {next(iter(context.values())):g}"
    words = KINDS.get(kind_of_error)
    return error["msg"] if words is None else words.format_map(context)
