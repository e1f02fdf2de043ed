"""Values of a checkpoint's JSON files: read with an error that says in one line where, what was expected and what was found."""

import json
from collections.abc import Callable
from pathlib import Path

SIZE_MAX = 2**31 - 1  # a dimension of an array, and an int32 index into it
FLOAT_MAX = 3.4e38  # constants are used as float32


class CheckpointError(ValueError):
    """A checkpoint, a config or a model name that cannot be used: the message says where, what was expected and what was found."""


def shown(value, limit: int = 200) -> str:
    """repr(value), or its beginning and its length where it is longer than `limit`."""
    try:
        return shortened(repr(value), limit)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of more digits than Python prints
        return f"{type(value).__name__} too large to show"


def shortened(text: str, limit: int = 200) -> str:
    """A text that a message echoes: as it is, or its beginning and its length where it is longer than `limit`."""
    return text if len(text) <= limit else f"{text[:60]}... ({len(text):,} characters)"


def read_json(path: Path, *, required: bool = True) -> dict:
    """The JSON object in a file; {} where it is absent and not required. Raises CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        if required:
            raise CheckpointError(f"{path}: expected a JSON file, found none") from e
        return {}
    except OSError as e:
        raise CheckpointError(f"{path}: expected a readable file, found: {e.strerror or e}") from e
    except RecursionError as e:
        raise CheckpointError(f"{path}: expected JSON, found brackets nested too deeply") from e
    except ValueError as e:
        raise CheckpointError(f"{path}: expected JSON, found: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def is_whole(value, low: int = 0, high: int = SIZE_MAX) -> bool:
    """True for an integer from `low` to `high`, which a boolean is not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value) -> bool:
    """True for a number that float32 can hold; not for booleans, NaN and infinities."""
    # compared before it is converted: float() of an integer of 400 digits raises
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -FLOAT_MAX <= value <= FLOAT_MAX


def size_fault(key: str, value, most: int = SIZE_MAX) -> str:
    """What is wrong with a size from 1 to `most`; "" where nothing is."""
    if is_whole(value, 1, most):
        return ""
    above = f" of at most {most:,}" if is_whole(value, 1, value) else ""
    return f"{key}: expected a positive integer{above}, found {shown(value)}"


class Fields:
    """The keys of one JSON object: a value that does not fit is noted in `faults`, and a default stands in for it."""

    def __init__(self, values: dict, faults: list[str]):
        self._values, self._faults = values, faults

    def read(self, key: str, default, expected: str, fits: Callable[[object], bool]):
        """The value of a key; the default where it is absent or null, and where it does not fit."""
        value = self._values.get(key)
        if value is None or fits(value):
            return default if value is None else value
        self._faults.append(f"{key}: expected {expected}, found {shown(value)}")
        return default

    def size(self, key: str, most: int = SIZE_MAX, default: int | None = None) -> int:
        """A size from 1 to `most`; 1 in place of one that does not fit."""
        value = self._values.get(key, default)
        fault = size_fault(key, value, most)
        if fault:
            self._faults.append(fault)
        return 1 if fault else value

    def number(self, key: str, default: float) -> float:
        return float(self.read(key, default, "a number", is_number))

    def flag(self, key: str, default: bool) -> bool:
        return self.read(key, default, "true or false", lambda x: isinstance(x, bool))

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids of a key that holds an id, a list of ids, or null."""
        found = self.read(key, [], "a token id or a list of them", lambda x: all(map(is_whole, x if isinstance(x, list) else [x])))
        return tuple(found) if isinstance(found, list) else (found,)
