"""A client and a server without an engine: answers as a model could have written them, and what is served for the copies of them."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from qjax.model.source import load
from qjax.model.template import Template
from qjax.serving.align import Aligned, Aligner, Answer
from qjax.serving.parse import parse_whole
from qjax.serving.pieces import Pieces
from qjax.serving.records import Record, Records, canonical
from qjax.serving.render import messages_of
from qjax.serving.schema import Chat

MODEL = load("embedded")
TOKENIZER, SPECIAL = MODEL.tokenizer, MODEL.tokenizer.special
TAGS = re.compile("(</?think>|</?tool_call>)")
CALL = re.compile("<tool_call>\n<function=([^>]+)>\n(.*?)</function>\n</tool_call>", re.DOTALL)
VALUE = re.compile("<parameter=([^>]+)>\n(.*?)\n</parameter>\n", re.DOTALL)
END = "<|im_end|>"
MARK = "~"  # hidden text is made of these, and nothing else is
PHRASE = 3 * MARK
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {}, "o": {}}}}}
    for name in ("look", "run")
]


def spell(text: str, chops: Sequence[int] = (1000,)) -> list[int]:
    """Tokens of a text as a model could write it: tags are special tokens, the rest is cut into pieces of these lengths."""
    tokens, turn = [], 0
    for part in TAGS.split(text):
        if part in SPECIAL:
            tokens.append(SPECIAL[part])
            continue
        while part:
            size = chops[turn % len(chops)]
            tokens += TOKENIZER.encode(part[:size])
            part, turn = part[size:], turn + 1
    return tokens


def call(name: str, arguments: dict) -> str:
    """A call as a model writes it."""
    values = "".join(f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


class Server:
    """Aligns and keeps, and encodes its pieces once. kwargs: the template's variables."""

    def __init__(self, *, limit: int = 10**6, tools: list | None = TOOLS, template: Template = MODEL.template, **flags):
        self.records, self.template, self.tools, self._ids = Records(limit), template, tools, 0
        self.aligner = Aligner(Pieces(template, TOKENIZER, 10**6).render, TOKENIZER, self.records, **flags)

    def align(self, messages: list[dict], kwargs: dict | None = None, *, tools: list | None = None, **asked) -> Aligned:
        return self.aligner.align(taken(messages), tools or self.tools, kwargs or {}, **asked)

    def sent(self, messages: list[dict], kwargs: dict | None = None, *, ask: bool = True) -> list[int]:
        """What the template makes of the client's messages."""
        return self.template.render(taken(messages), self.tools, add_generation_prompt=ask, **kwargs or {})

    def answer(self, prompt: Aligned, tokens: list[int], hidden: Iterable[tuple[int, int]] = (), stop: str | None = None) -> tuple[Record, dict]:
        """Keeps an answer; also the message that the client gets of it."""
        answer, message = received(prompt.tokens, tokens, self.tools, self._id, hidden, stop)
        return self.aligner.keep(prompt, answer), message

    def _id(self, _: int) -> str:
        self._ids += 1
        return f"call_{self._ids}"


def received(
    prompt: np.ndarray, tokens: list[int], tools: list | None, new_id: Callable[[int], str], hidden: Iterable = (), stop: str | None = None
) -> tuple[Answer, dict]:
    """What the server keeps of an answer, and the message that the client gets."""
    text = TOKENIZER.decode(tokens)
    text = text.partition(stop)[0] if stop else text
    opened = TOKENIZER.decode(prompt[-8:]).rstrip().endswith("<think>")
    parsed = parse_whole(text, opened, tools, new_id)
    calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in parsed.calls if c.complete]
    reasoning = parsed.reasoning.replace(MARK, "") if hidden else parsed.reasoning
    message = {"role": "assistant", "content": parsed.content, "reasoning_content": reasoning}
    return Answer(np.array(tokens, np.int32), parsed.spans, parsed.calls, tuple(hidden)), message | ({"tool_calls": calls} if calls else {})


def taken(messages: list[dict]) -> list[dict]:
    """A client's messages as they reach the template."""
    return messages_of(Chat.model_validate({"messages": messages}).messages)


def rows(record: Record) -> list[int]:
    """The tokens that the engine has of an answer and its prompt."""
    return [*record.prompt.tolist(), *record.tokens.tolist()]


def says(tokens: Iterable[int]) -> list:
    """What a prompt says, message by message: its texts without outer white space, its calls as values, no reasoning."""
    said = []
    for message in _messages(tokens):
        role, _, text = _text(message, SPECIAL["<think>"], SPECIAL["</think>"]).partition("\n")
        text, ended, _ = text.partition(END)
        said += [role, ended]
        *texts, last = CALL.split(text)
        for text, name, values in zip(*[iter(texts)] * 3, strict=True):
            said += [text.strip(), (name, {key: _value(value) for key, value in VALUE.findall(values)})]
        said.append(last.strip())
    return [part for part in said if part]


def thoughts(tokens: Iterable[int]) -> list[str]:
    """The reasoning in a prompt, block by block, without the hidden phrase and without white space."""
    found = []
    for message in _messages(tokens):
        _, opened, rest = _text(message).partition("<think>")
        found += ["".join(rest.partition("</think>")[0].replace(MARK, "").split())] if opened else []
    return found


def _messages(tokens: Iterable[int]) -> list[list[int]]:
    messages = [[]]
    for token in map(int, tokens):
        if token == SPECIAL["<|im_start|>"]:
            messages.append([])
        messages[-1].append(token)
    return messages


def _text(tokens: list[int], start: int | None = None, end: int | None = None) -> str:
    """The text of tokens, those from `start` to `end` left out."""
    if start in tokens:
        stop = tokens.index(end) + 1 if end in tokens else len(tokens)
        tokens = tokens[: tokens.index(start)] + tokens[stop:]
    return unicodedata.normalize("NFC", TOKENIZER.decode(tokens))


def _value(text: str) -> str:
    try:
        return canonical(json.loads(text))
    except ValueError:
        return text
