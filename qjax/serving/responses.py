"""What the routes answer, as an OpenAPI document publishes it: JSON Schemas, and the headers of errors."""

TEXT, WHOLE, NUMBER, BOTH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}, {"type": ["string", "null"]}


def record(optional: tuple[str, ...] = (), **fields: dict) -> dict:
    """An object with these fields, all of them required but the optional ones; others may be added."""
    return {"type": "object", "properties": fields, "required": [name for name in fields if name not in optional]}


def listed(items: dict) -> dict:
    return {"type": "array", "items": items}


def one_of(*values: str) -> dict:
    return {"enum": [*values]}


def or_null(schema: dict) -> dict:
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = record(error=record(message=TEXT, type=TEXT, param=BOTH, code=BOTH))
CARD = record(id=TEXT, object=one_of("model"), created=WHOLE, owned_by=TEXT, max_model_len=WHOLE)
MODELS = record(object=one_of("list"), data=listed(CARD))
HEALTH = record(status=one_of("ready"), model=TEXT)
STATS = {"type": "object", "additionalProperties": {"type": "object"}}
CLEARED = record(cleared=one_of("memory", "disk", "all"))
TOKENS = record(tokens=listed(WHOLE), count=WHOLE, max_model_len=WHOLE)
PROMPT = record(prompt=TEXT)
EVENT = record(data=TEXT)
"""Of a stream; the last one's data is [DONE], that of the others JSON."""
DOCUMENT = record(openapi=TEXT, info={"type": "object"}, paths={"type": "object"})

_USAGE = record(
    prompt_tokens=WHOLE,
    completion_tokens=WHOLE,
    total_tokens=WHOLE,
    prompt_tokens_details=record(cached_tokens=WHOLE),
    completion_tokens_details=record(reasoning_tokens=WHOLE),
)
_ENTRY = {"token": TEXT, "logprob": NUMBER, "bytes": listed(WHOLE)}
_CALL = record(id=TEXT, type=one_of("function"), function=record(name=TEXT, arguments=TEXT))
_MESSAGE = record(
    ("reasoning", "reasoning_content", "tool_calls"),
    role=one_of("assistant"),
    content=BOTH,
    reasoning=TEXT,
    reasoning_content=TEXT,
    tool_calls=listed(_CALL),
)
_CHAT_CHOICE = record(
    index={"const": 0},
    message=_MESSAGE,
    logprobs=or_null(record(content=listed(record(**_ENTRY, top_logprobs=listed(record(**_ENTRY)))))),
    finish_reason=one_of("stop", "length", "tool_calls"),
)
_TEXT_CHOICE = record(
    index={"const": 0},
    text=TEXT,
    logprobs=or_null(record(tokens=listed(TEXT), token_logprobs=listed(NUMBER), top_logprobs={"type": "array"}, text_offset=listed(WHOLE))),
    finish_reason=one_of("stop", "length"),
)
_HEAD = {"id": TEXT, "created": WHOLE, "model": TEXT}
CHAT = record(object=one_of("chat.completion"), **_HEAD, choices=listed(_CHAT_CHOICE), usage=_USAGE)
COMPLETION = record(object=one_of("text_completion"), **_HEAD, choices=listed(_TEXT_CHOICE), usage=_USAGE)

_AGAIN = {"Retry-After": {"description": "seconds after which to try again", "required": True, "schema": {"type": "integer", "minimum": 1}}}
_BEARER = {"WWW-Authenticate": {"description": "how to send a key", "required": True, "schema": one_of("Bearer")}}
FAULTS = {
    "400": ("the body says what is wrong or not supported, and the error which", {}),
    "401": ("no key of this server's", _BEARER),
    "403": ("a page of another origin, or a route of the administrator's", {}),
    "404": ("no such model", {}),
    "413": ("larger than the server's limits", {}),
    "429": ("the queue is full", _AGAIN),
    "503": ("loading, stopping, or no room", _AGAIN),
}
"""Statuses of errors: what they say, and their headers."""
