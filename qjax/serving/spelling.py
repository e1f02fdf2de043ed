"""The text of an answer, token by token, and what of it the client got."""

import bisect
import codecs
from collections.abc import Sequence

import numpy as np

from qjax.model.tokenizer import Tokenizer


class Spelling:
    """The text of an answer's tokens, and where in it they end. Places are counted in characters."""

    def __init__(self, tokenizer: Tokenizer, tokens: np.ndarray, hidden: Sequence[tuple[int, int]] = ()):
        """tokens: int32 [n]; hidden: [start, end) of those that the client never got."""
        decoder, texts, ends, length = codecs.getincrementaldecoder("utf-8")("replace"), [], [0], 0
        edges = {edge for span in hidden for edge in span}  # no character goes over one: the client got what came before it
        self._ends, self._counts = [0], [0]  # characters and tokens, of each place where a token ends with a whole character
        for count, token in enumerate(tokens.tolist(), 1):
            texts.append(decoder.decode(tokenizer.token_bytes(token)))
            if count in edges:
                texts[-1] += decoder.decode(b"", final=True)
            length += len(texts[-1])
            ends.append(length)
            if not decoder.getstate()[0]:
                self._ends.append(length)
                self._counts.append(count)
        self.text = "".join(texts) + decoder.decode(b"", final=True)
        self._hidden = [(ends[start], ends[end]) for start, end in hidden]

    def places(self, start: int, end: int) -> Sequence[int]:
        """The places of those characters in [start, end) that the client got."""
        places = range(start, end)
        return [i for i in places if not any(a <= i < b for a, b in self._hidden)] if self._hidden else places

    def visible(self, start: int, end: int) -> str:
        """What the client got of [start, end)."""
        return "".join(self.text[i] for i in self.places(start, end)) if self._hidden else self.text[start:end]

    def end_of(self, count: int, start: int, end: int) -> int:
        """Where the first `count` (at least 1) of those characters end that the client got of [start, end), outer white space aside."""
        seen = self.visible(start, end)
        return self.places(start, end)[len(seen) - len(seen.lstrip()) + count - 1] + 1

    def cut(self, end: int) -> tuple[int, str]:
        """The first tokens, as many as end at or before a place, and the text from there to it: a token can end past it."""
        at = bisect.bisect_right(self._ends, end) - 1
        return self._counts[at], self.text[self._ends[at] : end]
