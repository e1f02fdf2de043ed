"""What a model writes, parted as it streams: reasoning, content and tool calls.

An answer is `[reasoning</think>\\n\\n] content [\\n\\nCALL [\\nCALL ...]]`, a CALL
`<tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n ... </function>\\n</tool_call>`.
Between two tags of a call any white space may stand, up to 64 characters. What has another form is content.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qjax.serving.arguments import ANY, STRING, escaped, json_of, properties_of, types_of
from qjax.thinking import Piece, Thinking

_SPACE, _NAME = "[ \t\r\n]{0,64}", "([^<>\n]{1,256})"  # bounded: so is what is held back


class _Form:
    """A sequence of tags, of single characters and patterns: `whole` matches it, `begun` any beginning of it. The last is a character."""

    def __init__(self, *atoms: str):
        self.whole, begun = re.compile("".join(atoms)), ""
        for atom in reversed(atoms):
            begun = f"(?:{atom}{begun})?"
        self.begun = re.compile(begun)


_CALL = [*"<tool_call>", _SPACE, *"<function=", _NAME, ">"]
_KEY, _END = [*"<parameter=", _NAME, ">"], [*"</function>", _SPACE, *"</tool_call>"]
_CLOSED = ["\n?", *"</parameter>", _SPACE]
_FIRST, _BARE = (_Form("\n{0,2}", *_CALL, _SPACE, *rest) for rest in (_KEY, _END))  # a call's begin; without a parameter, all of it
_NEXT, _LAST = _Form(*_CLOSED, *_KEY), _Form(*_CLOSED, *_END)  # between two values, after a call's last one
_CUT = _Form(*_CLOSED, *"</function>")  # stands for _LAST where the answer ends
_QUOTE, _UNQUOTE = _Form(*_CALL), _Form(*_END)  # begin and end of a call that is quoted in a value
# Where a form can begin: at the line ends before a tag, at a tag, at the end of the text.
_IN_CONTENT, _IN_VALUE = re.compile(r"\n{0,2}(?:<|\Z)"), re.compile(r"\n?(?:<|\Z)")


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """index: 0 for the first call of an answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON object that a call's arguments are."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, its arguments are an object. A call that the answer's end cuts off has no such event."""

    index: int


Event = Reasoning | Content | CallBegin | Arguments | CallEnd


class Span(NamedTuple):
    """A stretch of an answer as the model wrote it. part: "reasoning" (with its tags), "content" or "call" (with the line ends before it)."""

    part: str
    raw: str


class Parser:
    """Parts one answer into events: Reasoning, Content and, for a call, CallBegin, Arguments, CallEnd; no text of one is empty. However the
    answer is cut into pieces, the events are the same, the texts of like ones that follow each other joined.

    A value ends at the `</parameter>` that another parameter or the call's end follows; any other tag in it is text, and so is a call that
    is quoted in it whole. When the answer has ended, what was held back is text of the part in which it stands.

    A value is a string as it stands where the tool's schema allows no other type. Else it is the JSON that the model wrote, where that is of a
    type that the schema allows, or of any where no string is allowed; else a string. What the schema does not tell may be of any type.
    """

    def __init__(self, opened: bool, tools: list[dict] | None, make_id: Callable[[int], str]):
        """opened: whether the prompt ends inside the reasoning. tools: as a request has them; without any, a call is content.
        make_id: from a call's index to its id."""
        self._schemas = {function["name"]: properties_of(function) for function in (tool.get("function", tool) for tool in tools or [])}
        self._make_id, self._thinking = make_id, Thinking(opened)
        self._head: list[str] | None = []  # the text before the content, until that has begun
        self._parts: list[tuple[str, list[str]]] = []
        self._events: list[Event] = []
        self._held, self._calls = "", 0
        self._schema: dict | None = None  # the parameters of the call that is open
        self._types, self._value = ANY, []  # of the value that is open: its types; its text so far, where that is not streamed
        self._new, self._quoted = False, 0  # whether nothing of the value has come; how many calls are open in it

    @property
    def spans(self) -> list[Span]:
        """The answer's stretches, one for each call: after `flush`, joined, the text fed."""
        return [Span(part, "".join(pieces)) for part, pieces in self._parts]

    def feed(self, text: str) -> list[Event]:
        """The events that this piece of text completes."""
        return self._take(text, self._thinking.feed(text), last=False)

    def flush(self) -> list[Event]:
        """The last events, when the answer has ended or is given up."""
        return self._take("", self._thinking.flush(), last=True)

    def _take(self, text: str, piece: Piece, last: bool) -> list[Event]:
        self._events = [Reasoning(piece.reasoning)] if piece.reasoning else []
        if self._head is not None:
            self._head.append(text)
            if piece.content or last:
                head, self._head = "".join(self._head), None
                self._note("reasoning", head[: len(head) - len(piece.content)])
        self._scan(piece.content, last)
        events = []
        for kind, run in itertools.groupby(self._events, type):
            run = list(run)
            events += [Arguments(run[0].index, "".join(e.text for e in run))] if kind is Arguments else run
        return events

    def _scan(self, text: str, last: bool) -> None:
        text, at, said = self._held + text, 0, 0  # what is before `said` is dealt with, from there to `at` it is text
        while True:
            if self._new and at < len(text):
                self._new = False
                if text[at] == "\n":
                    self._note("call", "\n")
                    at = said = at + 1
            at = (_IN_CONTENT if self._schema is None else _IN_VALUE).search(text, at).start()
            if at == len(text):
                break
            forms = self._forms(last)
            form, found = next(((form, found) for form in forms if (found := form.whole.match(text, at))), (None, None))
            inside = form is _LAST and self._quoted and found.end() < len(text)
            if form is _QUOTE or form is _UNQUOTE or inside:
                self._quoted += 1 if form is _QUOTE else -1
                at = found.end()
            elif not last and (any(f.begun.fullmatch(text, at) for f in forms) if form is None else self._quoted):
                break  # more text decides: also whether the answer ends with the end of a call that seems quoted
            elif form is None:
                at += 1
            else:
                self._say(text[said:at])
                self._tags(form, found)
                at = said = found.end()
        self._say(text[said:at])
        self._held = text[at:]
        if last and self._schema is not None:  # cut off: a value that is not streamed is text that has no end
            if self._types != STRING:
                value = "".join(self._value)
                self._argue(f'"{escaped(value)}' if "string" in self._types else value)
            self._schema = None

    def _forms(self, last: bool) -> tuple[_Form, ...]:
        if self._schema is None:
            return (_FIRST, _BARE) if self._schemas else ()
        if self._quoted:
            return (_LAST, _UNQUOTE, _QUOTE)
        return (_NEXT, _LAST, _QUOTE, _CUT) if last else (_NEXT, _LAST, _QUOTE)

    def _say(self, text: str) -> None:
        """Text of the content, or of the value that is open."""
        self._note("content" if self._schema is None else "call", text)
        if self._schema is not None and self._types == STRING:
            self._argue(escaped(text))
        elif self._schema is not None:
            self._value.append(text)
        elif text:
            self._events.append(Content(text))

    def _tags(self, form: _Form, found: re.Match) -> None:
        """Ends what is open, content or a value, and begins what the tags say."""
        if self._schema is None:
            self._parts.append(("call", []))
            self._events.append(CallBegin(self._calls, self._make_id(self._calls), found[1]))
            self._schema = self._schemas.get(found[1], {})
        else:
            self._argue('"' if self._types == STRING else json_of("".join(self._value), self._types))
        self._note("call", found[0])
        if form in (_FIRST, _NEXT):
            key = found[found.re.groups]
            self._types, self._value, self._new = types_of(self._schema.get(key)), [], True
            before, quote = "{" if form is _FIRST else ", ", '"' if self._types == STRING else ""
            self._argue(f'{before}"{escaped(key)}": {quote}')
        else:
            self._argue("{}" if form is _BARE else "}")
            self._events.append(CallEnd(self._calls))
            self._schema, self._calls = None, self._calls + 1

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self._calls, text))

    def _note(self, part: str, raw: str) -> None:
        if raw:
            if not self._parts or self._parts[-1][0] != part:
                self._parts.append((part, []))
            self._parts[-1][1].append(raw)


class Call(NamedTuple):
    """arguments: a JSON object, or as much of its text as there is where the answer was cut off (not `complete`)."""

    id: str
    name: str
    arguments: str
    complete: bool


class Answer(NamedTuple):
    """An answer that has ended."""

    reasoning: str
    content: str
    calls: list[Call]
    spans: list[Span]


def parse_whole(text: str, opened: bool, tools: list[dict] | None, make_id: Callable[[int], str]) -> Answer:
    """An answer that is not streamed; the arguments are those of Parser."""
    parser = Parser(opened, tools, make_id)
    texts, calls = {Reasoning: [], Content: []}, []
    for event in [*parser.feed(text), *parser.flush()]:
        match event:
            case CallBegin():
                calls.append(Call(event.id, event.name, "", False))
            case Arguments():
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + event.text)
            case CallEnd():
                calls[-1] = calls[-1]._replace(complete=True)
            case _:
                texts[type(event)].append(event.text)
    return Answer("".join(texts[Reasoning]), "".join(texts[Content]), calls, parser.spans)
