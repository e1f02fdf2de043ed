"""A TOML file in place of flags."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

FLAG = "--config"


def expanded(argv: Sequence[str]) -> list[str]:
    """The arguments, with what the files of --config say put before all other flags, so that those go first. ValueError for a file that is none.

    Each key of a file is a flag without the dashes in front of it, in a table or in none. A list gives a flag more than once, true and false
    turn one on and off.
    """
    words, given = [], False
    for word in argv:
        if given or word.startswith(FLAG + "="):
            path = word.removeprefix(FLAG + "=")
            words += _words(_read(path), path)
        given = word == FLAG
    return [*argv[:1], *words, *argv[1:]]


def _read(path: str) -> dict:
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as e:
        raise ValueError(f"{path}: expected a TOML file of flags, found: {getattr(e, 'strerror', None) or e}") from None


def _words(table: dict, path: str) -> list[str]:
    words = []
    for key, value in table.items():
        flag = "--" + key.replace("_", "-")
        if flag == FLAG:
            raise ValueError(f"{path}: expected flags, found {key}: one file of flags names no other")
        if isinstance(value, dict):
            words += _words(value, path)
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [f"{flag}={one}"]
    return words
