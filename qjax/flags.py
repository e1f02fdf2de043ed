"""Settings as fields of a dataclass, each with its flag, and what the flags' texts are read as."""

import argparse
import dataclasses
from pathlib import Path
from typing import ClassVar, Self


def path_or_none(text: str) -> Path | None:
    """argparse.ArgumentTypeError where nothing is named: an empty path would be the current directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a directory or none, found {text!r}")
    try:
        return None if text == "none" else Path(text).expanduser()
    except RuntimeError as e:  # ~nobody
        raise argparse.ArgumentTypeError(f"expected a directory or none, found {text!r}: {e}") from e


def file(text: str) -> Path:
    """argparse.ArgumentTypeError for a path that cannot be a file's."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as e:  # ~nobody
        raise argparse.ArgumentTypeError(f"expected a file, found {text!r}: {e}") from e
    if not text.strip() or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, found {text!r}")
    return path


def place(text: str) -> str | None:
    """argparse.ArgumentTypeError for what can be neither a directory nor an object store."""
    if "://" in text:
        if not text.startswith(("s3://", "gs://")):
            raise argparse.ArgumentTypeError(f"expected a directory, s3://BUCKET/PATH, gs://BUCKET/PATH or none, found {text!r}")
        return text
    path = path_or_none(text)
    if path is not None and path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a directory, found a file: {text!r}")
    return None if path is None else str(path)


def switch(text: str) -> dict:
    """Metadata of a field that is on or off."""
    return {"action": argparse.BooleanOptionalAction, "help": text}


def flag(read, text: str, **more) -> dict:
    return {"type": read, "help": text, **more}


class WrongSetting(ValueError):
    """A setting that is out of range. In Python it is a field's name, on the command line its flag's."""

    def __init__(self, name: str, what: str):
        """what: what is said of it, such as "must be ..., not ..."."""
        super().__init__(name, what)
        self.name, self.what = name, what

    def __str__(self) -> str:
        return f"{self.name} {self.what}"

    @property
    def of_flag(self) -> str:
        return f"--{self.name.replace('_', '-')} {self.what}"


class Flags:
    """A group of settings. The flags that `add_flags` makes are the fields with dashes: `--kv-gb` for `kv_gb`."""

    group: ClassVar[str]

    def _check(self, name: str, wanted: str, holds: bool) -> None:
        if not holds:
            value = getattr(self, name)
            raise WrongSetting(name, f"must be {wanted}, not {str(value) if isinstance(value, Path) else repr(value)}")

    def bytes(self, name: str) -> int:
        """A budget in bytes."""
        return int(getattr(self, name) * 2**30)

    def flags(self) -> list[str]:
        """The flags that give this config again."""
        words = []
        for f in dataclasses.fields(self):
            value, flag = getattr(self, f.name), "--" + f.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else flag.replace("--", "--no-", 1))
            elif value is not None or f.default is not None:
                words += [flag, "none" if value is None else str(value)]
        return words

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Adds one flag for each field; one that is not given leaves the field's default in force."""
        group = parser.add_argument_group(cls.group)
        for f in dataclasses.fields(cls):
            group.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **f.metadata)

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> Self:
        return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)})
