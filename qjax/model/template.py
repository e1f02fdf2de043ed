"""The chat template of a checkpoint: messages to token ids, with the text of users kept from becoming special tokens."""

import json
import re
from collections.abc import Iterable
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

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
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False)
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
        ids = []
        for part in self.parts(messages, tools, add_generation_prompt, enable_thinking, **kwargs):
            ids += [part] if isinstance(part, int) else self._tokenizer.encode(part)
        return ids

    def parts(
        self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = True, enable_thinking: bool = True, **kwargs
    ) -> list[int | str]:
        """What `render` encodes: special tokens as their ids, and the texts between them, of which none is empty."""
        guard = Guard(self._tokenizer.special, self.source)
        try:
            values = guard.put({"messages": messages, "tools": tools, **kwargs})
            text = self._program.render(**values, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking)
        except Exception as e:  # a template can fail in any way that Python can
            raise ValueError(f"chat template: {guard.take(str(e)) or type(e).__name__}") from None
        pieces = self._cut.split(text) if self._cut else [text]
        parts, special = [], self._tokenizer.special
        for piece in pieces:
            if piece in special:
                parts.append(special[piece])
            elif text := guard.take(piece):  # which may read like a special token now
                parts.append(text)
        return parts


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox. Over 400 messages of an agent it takes 3 to 4 ms, the original 6 to 8, most of them to look for attributes of dicts."""

    def getattr(self, obj, attribute: str):
        """Nothing is to be guarded in what is no attribute of a dict, or is a loop's or a namespace's own, which hold values of the template's."""
        kind = type(obj)
        if kind is dict and attribute not in OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


OF_DICT = frozenset(dir(dict))


class Guard:
    """Breaks special-token text in strings with a sentinel, and takes the sentinel out again.

    The sentinel follows every character that a special token can begin with and precedes every one that it can end with: so no special token
    keeps a user's character at either end, not even where two strings are joined. Those characters are punctuation, hence a sentinel never
    stands between a string's own whitespace and its edge, and trimming works as without it.
    """

    def __init__(self, specials: Iterable[str], source: str):
        """source: the text that has these special tokens of its own."""
        self._source = source
        self._first, self._last = {text[0] for text in specials}, {text[-1] for text in specials}
        self._choose(SENTINELS[0])

    def put(self, value):
        """The same value with every string in it guarded, keys too, by a sentinel that neither they nor the source have, nor its escaped form.

        Raises ValueError where no character is left for one, and for any type that JSON lacks: its text would pass unguarded.
        """
        strings = [self._source]
        guarded = self._put(value, strings)
        text = "\n".join(strings)
        if self._sentinel not in text and self._escaped not in text:
            return guarded
        found = {*map(ord, set(text)), *(int(code, 16) for code in re.findall(r"\\u([0-9a-f]{4})", text))}
        self._choose(next((code for code in SENTINELS if code not in found), None))
        return self._put(value, [])

    def _put(self, value, strings: list[str]):
        """strings: takes every string as it was."""
        if isinstance(value, str):
            strings.append(value)
            for c, guarded in self._places:
                value = value.replace(c, guarded)
            return value
        if isinstance(value, dict):
            return {self._put(k, strings): self._put(v, strings) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._put(v, strings) for v in value]
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise ValueError(f"expected JSON values, found {type(value).__name__}")

    def _choose(self, code: int | None) -> None:
        if code is None:
            raise ValueError("expected a private-use character that the messages leave free, found none")
        self._sentinel, self._escaped = chr(code), f"\\u{code:04x}"
        ends = sorted(self._first | self._last)
        self._places = [(c, f"{self._sentinel if c in self._last else ''}{c}{self._sentinel if c in self._first else ''}") for c in ends]

    def take(self, text: str) -> str:
        """The text without sentinels, also those that were written escaped (JSON in ASCII, the repr of a list)."""
        return text.replace(self._sentinel, "").replace(self._escaped, "")


SENTINELS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))
"""Code points, in the order in which they are taken: never assigned, then private."""


def _raise(message: str):
    """`raise_exception` of the templates."""
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """`strftime_now` of the templates: the local time."""
    return datetime.now().strftime(pattern)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """`tojson` as Hugging Face has it: no escaping for HTML, no ASCII."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
