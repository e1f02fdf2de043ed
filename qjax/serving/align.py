"""The tokens of a conversation that goes on: the rows' own, wherever the client's copy of an answer says what they say.

A client sends text. What its template makes of that parts from the rows where reasoning was not sent back, where white space was trimmed, where
arguments were written again, where a span was hidden, where an answer broke off, and where the model cut a text into other tokens than the
tokenizer does. So a prompt is made of the record of the last answer that the client's copy agrees with, and of what the template writes after
that answer. What no record fits is served as sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qjax.boundaries import PROBE
from qjax.caches.keys import common
from qjax.ledger import Reason
from qjax.model.tokenizer import Tokenizer
from qjax.serving.parse import Call, Span
from qjax.serving.records import Chain, Layout, Record, Records, called, ids
from qjax.serving.spelling import Spelling
from qjax.thinking import CLOSE


class Why(Reason):
    """Why an answer of the client's is not served with the rows' tokens."""

    UNKNOWN = "unknown", "no answer to these messages is on record"
    ANSWER = "answer", "another answer to these messages was generated"
    REASONING = "reasoning", "reasoning is not what was generated"
    OFF = "off", "it says the same in a form whose alignment is off"
    TEMPLATE = "template", "the template writes the messages after it in a way that depends on those before"
    LONG = "long", "with the rows' tokens the prompt would be too long"


class Parted(NamedTuple):
    """The first answer that is served as sent: its place among the messages."""

    message: int
    why: Why


class Answer(NamedTuple):
    """What was generated: int32 [n] without the stop token.

    spans, calls: what parse.py makes of its text, hidden tokens and all, up to a stop string. hidden: [start, end) of the tokens that the
    client never got.
    """

    tokens: np.ndarray
    spans: Sequence[Span]
    calls: Sequence[Call] = ()
    hidden: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Aligned:
    """A prompt.

    tokens   int32 [n]
    matched  the last message whose rows are in it as they were generated; None: it is what the template makes of the client's messages
    parted   where and why it goes on as sent; None where no answer is left
    The rest is what the record of its answer is made of.
    """

    tokens: np.ndarray
    matched: int | None
    parted: Parted | None
    tenant: str
    variables: dict
    key: bytes
    said: tuple[str, ...]
    base: Record | None
    taken: int
    tail: np.ndarray


class Reading(NamedTuple):
    """What a copy says of an answer: its first `taken` tokens, then the text `rest`. closed: the reasoning has ended. said: the reasoning."""

    taken: int
    rest: str
    closed: bool
    said: str


class Aligner:
    """Prompts, and records of their answers, for one template. What it serves is a function of the messages and of the records there are."""

    def __init__(self, render: Callable[..., np.ndarray], tokenizer: Tokenizer, records: Records, *, align: bool = True, reasoning: bool = True):
        """render: Pieces.render, or what takes the same arguments.

        align: also copies whose white space differs from the rows', or that are a beginning. reasoning: also those that leave reasoning out.
        """
        self._render, self._tokenizer, self._records, self._align, self._reasoning = render, tokenizer, records, align, reasoning
        self._chain = Chain(_is_loose(render))
        closing = self._always_last([{"content": text} for text in "ab"])
        thought = self._always_last([{"content": "", "reasoning_content": text} for text in "ab"])
        # what the template writes after an answer, and after one that broke off in its reasoning, int32; None where it cannot be told
        self._closing = closing if closing.size and closing[0] in tokenizer.stop_ids else None
        self._thought = thought if self._closing is not None and CLOSE in tokenizer.decode(thought) else None

    def align(self, messages: list[dict], tools: list[dict] | None, variables: dict, *, tenant: str = "", limit: int | None = None) -> Aligned:
        """The prompt of messages as render.messages_of has them; one of more than `limit` tokens is not aligned.

        Raises ValueError with the template's complaint.
        """
        sent = self._render(messages, tools, variables, tenant=tenant)
        keys = self._chain.keys(self._chain.start(tenant, tools, variables), messages)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        said = tuple(_reasoning(messages[i]) for i in answers)
        asked, parted = dict(tenant=tenant, variables=variables, key=keys[-1]), None
        for known in range(len(answers), 0, -1):
            at = answers[known - 1]
            found = self._find(messages[at], keys[at], keys[at + 1], said[:known])
            if isinstance(found, Why):
                parted = Parted(at, found)
                continue
            record, read = found
            closing = self._closing if read.closed else self._thought
            if closing is None or (after := self._after(messages[at:], sent, variables, tenant)) is None:
                parted = Parted(at, Why.TEMPLATE)
                break
            tail = np.concatenate([np.array(self._tokenizer.encode(read.rest), np.int32), closing, after])
            tokens = np.concatenate([record.prompt, record.tokens[: read.taken], tail])
            if limit is not None and tokens.size > limit:
                parted = Parted(at, Why.LONG)
                break
            said = (*record.said[:-1], read.said, *said[known:])
            return Aligned(tokens=tokens, matched=at, parted=parted, said=said, base=record, taken=read.taken, tail=tail, **asked)
        return Aligned(tokens=sent, matched=None, parted=parted, said=said, base=None, taken=0, tail=sent, **asked)

    def keep(self, prompt: Aligned, answer: Answer, user: int | None = None) -> Record | None:
        """Records an answer to a prompt, whole or broken off. user: as the record has it. None where nothing was generated."""
        tokens, text = np.array(answer.tokens, np.int32), "".join(span.raw for span in answer.spans)
        spelling, layout = Spelling(self._tokenizer, tokens, answer.hidden), Layout.of(answer.spans)
        if not text or not spelling.text.startswith(text):
            return None
        reasoning, content = (spelling.visible(*part) for part in (layout.reasoning, layout.content))
        calls = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls if call.complete]
        complete, calls = layout.end == len(text) and len(calls) == len(answer.calls), calls[: len(layout.calls)]
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        return self._records.add(
            Record(
                tenant=prompt.tenant,
                before=prompt.key,
                after=self._chain.extend(prompt.key, message) if complete else None,
                base=prompt.base,
                taken=prompt.taken,
                tail=prompt.tail,
                user=user,
                tokens=tokens,
                hidden=tuple(answer.hidden),
                layout=layout,
                reasoning=reasoning,
                content=content,
                calls=tuple(called(message)),
                ids=tuple(ids(message)),
                said=(*prompt.said, reasoning.strip()),
                whole=(tokens.size, "") if len(text) == len(spelling.text) else spelling.cut(len(text)),
                faithful=None if self._align else self._is_faithful(spelling, layout, reasoning, content, prompt),
            )
        )

    def _find(self, message: dict, before: bytes, after: bytes, said: tuple[str, ...]) -> tuple[Record, Reading] | Why:
        """The record of an answer, and what of it this copy says. before, after: the keys without and with it. said: all reasoning to here."""
        why, named = None, tuple(ids(message))
        listed = dict.fromkeys([*self._records.after(after), *self._records.before(before)])
        for record in sorted(listed, key=lambda record: record.ids != named):
            read = self._read(record, message, said)
            if isinstance(read, Reading):
                return record, read
            why = why or read
        return why or Why.UNKNOWN

    def _read(self, record: Record, message: dict, said: tuple[str, ...]) -> Reading | Why:
        """What a copy says of a record that stands after the same messages."""
        text, calls, content, layout = message["content"].strip(), called(message), record.content.strip(), record.layout
        if any(v for name, v in message.items() if name not in ("role", "content", "reasoning_content", "tool_calls")):
            return Why.ANSWER
        if not (text == content and calls == list(record.calls[: len(calls)]) if calls else content.startswith(text)):
            return Why.ANSWER
        if not self._chain.loose and ids(message) != list(record.ids[: len(calls)]):
            return Why.ANSWER
        whole = record.after is not None and text == content and len(calls) == len(record.calls)
        *earlier, own = record.said
        sent, empty = said[-1], not text and not calls
        broken = empty and bool(sent) and sent != own and own.startswith(sent)  # off in the reasoning
        if any(theirs and theirs != mine for mine, theirs in zip(earlier, said[:-1], strict=True)) or not (sent in ("", own) or broken):
            return Why.REASONING
        if not self._reasoning and any(mine and not theirs for mine, theirs in zip(record.said, said, strict=True)):
            return Why.OFF
        if not self._align:
            same = message["content"] == record.content and (not sent or message["reasoning_content"] == record.reasoning)
            return Reading(*record.whole, layout.closed, own) if whole and not broken and same and record.faithful else Why.OFF
        if whole and not broken:
            return Reading(*record.whole, layout.closed, own)
        spelling = Spelling(self._tokenizer, record.tokens, record.hidden)
        if broken:
            return Reading(*spelling.cut(spelling.end_of(len(sent), *layout.reasoning)), False, sent)
        if empty:
            return Reading(*spelling.cut(layout.thought if layout.closed else layout.end), layout.closed, own)
        end = layout.calls[len(calls) - 1] if calls else spelling.end_of(len(text), *layout.content)
        return Reading(*spelling.cut(end), True, own)

    def _after(self, messages: list[dict], sent: np.ndarray, variables: dict, tenant: str) -> np.ndarray | None:
        """What the template writes after the first of some messages, an answer; None where that depends on what came before.

        Told from a conversation that begins with that answer: it is read in a time that goes with what is new, where all messages but those
        after the answer would take as long again as the prompt does. It has to be the end of that prompt.
        """
        try:
            begun = self._render([PROBE, messages[0]], None, variables, ask=False, tenant=tenant)
            whole = self._render([PROBE, *messages], None, variables, tenant=tenant)
        except ValueError:  # a template that wants more than a user's message before an answer
            return None
        after = whole[begun.size :]
        before = sent.size - after.size
        ends = common(begun, whole) == begun.size and before > 0 and np.array_equal(sent[before:], after)
        return after if ends and sent[:before][-self._closing.size :].tolist() == self._closing.tolist() else None

    def _always_last(self, answers: list[dict]) -> np.ndarray:
        """The tokens that the template ends each of some answers with, int32 [n]."""
        try:
            written = [self._render([PROBE, {"role": "assistant", **answer}], None, {}, ask=False)[::-1] for answer in answers]
        except ValueError:
            return np.zeros(0, np.int32)
        return written[0][: min(common(written[0], other) for other in written[1:])][::-1]

    def _is_faithful(self, spelling: Spelling, layout: Layout, reasoning: str, content: str, prompt: Aligned) -> bool:
        """Whether the template writes an answer, up to its calls, with the white space that its tokens have, hidden ones aside."""
        if self._closing is None:
            return False
        (start, stop), decode = layout.reasoning, self._tokenizer.decode
        text = spelling.text[:start] + reasoning + spelling.text[stop : layout.thought] + content
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        written = self._render([PROBE, message], None, prompt.variables, ask=False, tenant=prompt.tenant)
        asked = self._render([PROBE], None, prompt.variables, tenant=prompt.tenant)
        return decode(asked) + text + decode(self._closing) == decode(written)


def _reasoning(message: dict) -> str:
    """The reasoning that a message has, as the template takes it: without outer white space."""
    return message.get("reasoning_content", "").strip()


def _is_loose(render: Callable[..., np.ndarray]) -> bool:
    """Whether a template trims texts and writes no ids of calls."""

    def written(edge: str, given: str) -> np.ndarray:
        call = {"id": given, "type": "function", "function": {"name": "f", "arguments": {"k": 1}}}
        said = [("system", "s"), ("user", "u"), ("assistant", "a"), ("tool", "t"), ("user", "v")]
        messages = [{"role": role, "content": f"{edge}{text}{edge}"} for role, text in said]
        messages[2]["tool_calls"], messages[3]["tool_call_id"] = [call], given
        return render(messages, None, {})

    try:
        return np.array_equal(written("", "0"), written(" \n", "1"))
    except ValueError:
        return False
