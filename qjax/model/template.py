"""The chat template of a checkpoint: messages to token ids, with the text of users kept from becoming special tokens."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.sandbox

from qjax.model.checkpoint import CheckpointError
from qjax.model.tokenizer import Tokenizer


class Template:
    """A Jinja chat template over a tokenizer; runs in Jinja's sandbox, with the settings that Qwen's templates are written for.

    `source`: its text. `special_ids`: tokens that no text of a user becomes.
    """

    def __init__(self, source: str, tokenizer: Tokenizer):
        """Raises CheckpointError for a source that is no template."""
        wordlike = [text for text in sorted(tokenizer.wordlike) if text in source]
        if wordlike:
            raise CheckpointError(f"chat template: expected special tokens between punctuation marks, found {', '.join(map(repr, wordlike))}")
        self._tokenizer = tokenizer
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
        )
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        environment.filters["tojson"] = _tojson
        try:
            self._program = environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise CheckpointError(f"chat template: expected Jinja, found in line {e.lineno}: {e.message}") from e
        self.source, self.special_ids = source, frozenset(tokenizer.special.values())
        specials = sorted(tokenizer.special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, specials)) + ")") if specials else None

    def render(
        self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = True, enable_thinking: bool = True, **kwargs
    ) -> list[int]:
        """Token ids of a conversation; `kwargs` are further variables of the template, e.g. reasoning_effort.

        Whatever stands in messages, tools and kwargs stays text: a special token comes from the template's own source only, also where two
        strings meet. The template sees such text broken, so it does not act upon it either. Raises ValueError with the template's complaint.
        """
        values = {"messages": messages, "tools": tools, **kwargs}
        take = str
        try:
            guard = Guard(self._tokenizer.special, [self.source, *_strings(values)])
            take = guard.take
            text = self._program.render(**guard.put(values), add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking)
        except Exception as e:  # a template can fail in any way that Python can
            raise ValueError(f"chat template: {take(str(e)) or type(e).__name__}") from None
        ids = []
        for piece in self._cut.split(text) if self._cut else [text]:
            special = self._tokenizer.special.get(piece)
            if special is not None:
                ids.append(special)
            elif piece:
                ids += self._tokenizer.encode(guard.take(piece))
        return ids


class Guard:
    """Breaks special-token text in strings with a sentinel, and takes the sentinel out again.

    The sentinel follows every character that a special token can begin with and precedes every one that it can end with: so no special token
    keeps a user's character at either end, not even where two strings are joined. Those characters are punctuation, hence a sentinel never
    stands between a string's own whitespace and its edge, and trimming works as without it.
    """

    def __init__(self, specials: Iterable[str], strings: list[str]):
        """Chooses a sentinel that none of the strings has, nor its escaped form. Raises ValueError where no character is left."""
        for code in [*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900)]:  # never assigned, then private
            self._sentinel, self._escaped = chr(code), f"\\u{code:04x}"
            if not any(form in text for text in strings for form in (self._sentinel, self._escaped)):
                break
        else:
            raise ValueError("expected a private-use character that the messages leave free, found none")
        first, last = {text[0] for text in specials}, {text[-1] for text in specials}
        self._table = {ord(c): f"{self._sentinel if c in last else ''}{c}{self._sentinel if c in first else ''}" for c in first | last}

    def put(self, value):
        """The same value with every string in it guarded, keys too. Raises ValueError for any type that JSON lacks: its text would pass unguarded."""
        if isinstance(value, str):
            return value.translate(self._table)
        if isinstance(value, Mapping):
            return {self.put(k): self.put(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put(v) for v in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise ValueError(f"expected JSON values, found {type(value).__name__}")

    def take(self, text: str) -> str:
        """The text without sentinels, also those that were written escaped (JSON in ASCII, the repr of a list)."""
        return text.replace(self._sentinel, "").replace(self._escaped, "")


def _strings(value) -> Iterator[str]:
    """Every string in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _strings(k)
            yield from _strings(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _strings(v)


def _raise(message: str):
    """`raise_exception` of the templates."""
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """`strftime_now` of the templates: the local time."""
    return datetime.now().strftime(pattern)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """`tojson` as Hugging Face has it: no escaping for HTML, no ASCII."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
