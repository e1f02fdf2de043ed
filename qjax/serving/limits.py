"""How large a request may be, and the reading of its JSON within that."""

import dataclasses
import functools
import json
import math
from dataclasses import field

from qjax.flags import Flags
from qjax.serving.errors import ApiError, BadRequest, TooLarge

DEEPEST = 200
"""Nesting that `depth` may allow at the most: a template walks values by recursion, four of Python's 1,000 frames a level."""
NAMED = 3
"""Levels whose fields an error names."""


def _limit(what: str, default: int) -> int:
    return field(default=default, metadata={"type": int, "help": f"{what} (default {default:,})", "metavar": "N"})


@dataclasses.dataclass(frozen=True)
class Limits(Flags):
    """What a request may have at the most; ValueError names the field that is out of range.

    A prompt of 262,144 tokens of English has about 1.2 MB. Parsed JSON takes up to 30 times its bytes, so `max_values` is counted early.
    """

    group = "limits of a request"

    max_body_mb: int = _limit("MiB of a body", 16)
    max_string: int = _limit("characters of a string", 4_194_304)
    max_depth: int = _limit("nesting of JSON", 64)
    max_values: int = _limit("values in a body, of all kinds", 524_288)
    max_messages: int = _limit("messages", 16_384)
    max_tools: int = _limit("tools", 1_024)
    max_stops: int = _limit("stop strings", 16)

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            self._check(f.name, "a whole number, 1 or more", isinstance(value, int) and not isinstance(value, bool) and value >= 1)
        self._check("max_depth", f"at most {DEEPEST}", self.max_depth <= DEEPEST)

    def too_long(self, size: int) -> TooLarge | None:
        """The error for a body of so many bytes, None where it may be read; a body that streams is asked about as it grows."""
        most = self.max_body_mb * 2**20
        return TooLarge(f"a body may have {most:,} bytes (--max-body-mb)") if size > most else None


def read(body: bytes, limits: Limits) -> dict:
    """The JSON object of a body. BadRequest or TooLarge names what is above a limit, or no JSON text that can be a prompt."""
    if error := limits.too_long(len(body)):
        raise error
    try:
        value = parse(body.decode())
    except UnicodeDecodeError as e:
        raise BadRequest(f"expected a body in UTF-8, found byte 0x{body[e.start]:02x} at {e.start:,}") from None
    except json.JSONDecodeError as e:
        raise BadRequest(f"expected a JSON object, found at line {e.lineno}, column {e.colno}: {e.msg}") from None
    except RecursionError:
        raise BadRequest(f"JSON may be nested {limits.max_depth} deep (--max-depth)") from None
    except ValueError:
        raise BadRequest("expected a JSON object, found a number that is none, or too large") from None
    if not isinstance(value, dict):
        raise BadRequest(f"expected a JSON object, found {kind(value)}")
    for name, most, flag in (
        ("messages", limits.max_messages, "--max-messages"),
        ("tools", limits.max_tools, "--max-tools"),
        ("stop", limits.max_stops, "--max-stops"),
    ):
        if isinstance(value.get(name), list) and len(value[name]) > most:
            raise BadRequest(f"{name} may have {most:,} entries ({flag}), found {len(value[name]):,}", name)
    check(value, limits)
    return value


def parse(text: str):
    """The value of a JSON text. ValueError also for numbers that JSON lacks; RecursionError where it is nested too deeply to be read."""
    return DECODER.decode(text)


def check(value: dict | list, limits: Limits) -> None:
    """BadRequest or TooLarge where a JSON value is nested too deeply, has too many values or too long a string, or a lone surrogate."""
    waiting, count = [(value, None, None, 1)], 0  # a value, its key, the entry of what it stands in, its depth
    while waiting:
        entry = waiting.pop()
        value, _, _, depth = entry
        count += len(value)
        if count > limits.max_values:
            raise BadRequest(f"a body may have {limits.max_values:,} values (--max-values)")
        if depth > limits.max_depth:
            name = _path(entry)
            raise BadRequest(f"{name}: JSON may be nested {limits.max_depth} deep (--max-depth)", name)
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, (dict, list)):
                waiting.append((inner, key, entry, depth + 1))
            elif isinstance(inner, str) and (len(inner) > limits.max_string or not is_text(inner)):
                raise _fault(inner, _path((inner, key, entry, depth)), limits)
            if isinstance(key, str) and (len(key) > limits.max_string or not is_text(key)):
                raise _fault(key, _path((inner, key, entry, depth)), limits)


def _fault(text: str, name: str, limits: Limits) -> ApiError:
    if len(text) > limits.max_string:
        return TooLarge(f"{name}: a string may have {limits.max_string:,} characters (--max-string), found {len(text):,}", name)
    return BadRequest(f"{name}: expected text, found half of a surrogate pair (\\ud800 to \\udfff)", name)


def _path(entry: tuple) -> str:
    keys = []
    while entry[2] is not None:
        keys.append(entry[1])
        entry = entry[2]
    return functools.reduce(step, keys[::-1][:NAMED], "")


def step(path: str, key: str | int) -> str:
    """The path of a field one level further in; of a key that is no plain name, and may be a user's text, only that there is one."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    key = key if key.isascii() and key.isidentifier() and len(key) <= 40 else "*"
    return f"{path}.{key}" if path else key


def is_text(text: str) -> bool:
    """Whether a string is text, every surrogate with its other half: what is not cannot be sent on or tokenized as it is."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind(value) -> str:
    """A JSON value's type in words; never the value, which may be a prompt."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"a string of {len(value):,} character{'s' * (len(value) != 1)}"
    return "a number" if isinstance(value, (int, float)) else "a list" if isinstance(value, list) else "an object"


def _no_number(text: str):
    raise ValueError(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)  # json.loads makes one for every call's arguments
