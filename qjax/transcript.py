"""What a generation says: its tokens, their text, and what of it the client gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qjax.logprobs import MOST, Logprobs, logprobs
from qjax.model.tokenizer import Tokenizer
from qjax.sampling import is_whole
from qjax.text import StopStrings
from qjax.thought import Meter, Thought


class Token(NamedTuple):
    """A generated token and the text that it completes.

    The text lags behind where a character is not complete or a stop string may be beginning; what is left at the end comes
    with no token (id None). hidden: the client never gets it, and its text is "". logprobs: where they were asked for.
    """

    id: int | None
    text: str
    hidden: bool = False
    logprobs: Logprobs | None = None


class Transcript:
    """tokens: all that were generated. text: what the client gets of theirs, in which stop strings are found.

    hidden: [start, end) of the tokens that the client does not get; they are never more than one run.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] | str, thought: Thought | None, top: int | None):
        """top: the `logprobs` of Engine.generate. ValueError names what is wrong."""
        if top is not None and not (is_whole(top) and 0 <= top <= MOST):
            raise ValueError(f"logprobs must be a whole number from 0 to {MOST}, or None, found {top!r}")
        forced = (*thought.phrase, *thought.close) if thought else ()
        if not all(is_whole(token) and 0 <= token < tokenizer.size for token in forced):
            raise ValueError(f"a thought is closed with token ids from 0 to {tokenizer.size - 1}, found {list(forced)}")
        self._allowed, self._top, self._meter = tokenizer.size, top, Meter(thought)
        self._stream, self._stop = tokenizer.stream(), StopStrings(stop)
        self.plain = top is None and (thought is None or thought.budget is None)  # an answer that is kept can stand for it
        self.tokens: list[int] = []
        self.text, self.hidden = "", []
        self._secret, self._place = "", 0  # the text that is hidden, and how much of the client's comes before it

    @property
    def stops(self) -> tuple[str, ...]:
        return self._stop.stops

    @property
    def due(self) -> int | None:
        """The next token where it is not the model's to choose."""
        return self._meter.due

    @property
    def thought_tokens(self) -> int:
        return self._meter.tokens

    @property
    def raw(self) -> str:
        """The text and what is hidden in it."""
        # a stop string that begins before what is hidden, and ends after it, ends the text before both
        return self.text[: self._place] + (self._secret if self._place <= len(self.text) else "") + self.text[self._place :]

    def add(self, token: int, logits: np.ndarray | None = None) -> tuple[Token, bool]:
        """The next token with the text that it completes, and whether a stop string has ended that. logits: [V] float32, which it came from."""
        hidden, text = self._meter.hides, self._stream.step(token)
        self.tokens.append(token)
        self._meter.feed(text)
        if self._meter.hides != hidden:
            text += self._stream.flush()  # no character goes over the edge of what is hidden
        if hidden:
            end = len(self.tokens)
            if not self.hidden:
                self._place = len(self.text) + len(self._stop.held)
            self.hidden = [(self.hidden[0][0] if self.hidden else end - 1, end)]
        shown, stopped = self._show(text, hidden)
        row = None if self._top is None else logprobs(logits, token, self._top, self._allowed)
        return Token(token, shown, hidden, row), stopped

    def end(self) -> tuple[Token, bool]:
        """What is left when no token comes any more, as `add`."""
        text, stopped = self._show(self._stream.flush(), self._meter.hides)
        rest = self._stop.flush()
        self.text += rest
        return Token(None, text + rest), stopped

    def _show(self, text: str, hidden: bool) -> tuple[str, bool]:
        if hidden:
            self._secret += text
            return "", False
        text, stopped = self._stop.feed(text)
        self.text += text
        return text, stopped
