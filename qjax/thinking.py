"""Reasoning and content of an answer, parted as it streams."""

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Piece(NamedTuple):
    """Text of an answer, as much as one token completes; the tags between the parts belong to neither."""

    reasoning: str
    content: str


class Thinking:
    """Parts an answer into reasoning and content as it streams. opened: whether the prompt ends inside the reasoning.

    The tag that closes the reasoning takes up to two line ends with it, as a template writes them. The content is always an end of the text fed.
    """

    def __init__(self, opened: bool):
        self._part, self._held, self._gap = "reasoning" if opened else "start", "", 0

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, unless it closes that."""
        return self._part == "reasoning"

    def feed(self, text: str) -> Piece:
        self._held += text
        if self._part == "start":
            bare = self._held.lstrip()
            if len(bare) < len(OPEN) and OPEN.startswith(bare):
                return Piece("", "")
            self._part = "reasoning" if bare.startswith(OPEN) else "content"
            self._held = bare.removeprefix(OPEN) if self._part == "reasoning" else self._held
        reasoning = ""
        if self._part == "reasoning":
            reasoning, closed, rest = self._held.partition(CLOSE)
            if not closed:
                kept = max(n for n in range(len(CLOSE)) if reasoning.endswith(CLOSE[:n]))
                self._held = CLOSE[:kept]
                return Piece(reasoning[: len(reasoning) - kept], "")
            self._part, self._held, self._gap = "content", rest, 2
        content, self._held = self._held, ""
        while content and self._gap:
            self._gap, content = (self._gap - 1, content[1:]) if content[0] == "\n" else (0, content)
        return Piece(reasoning, content)

    def flush(self) -> Piece:
        """What was held back when the answer has ended."""
        text, self._held = self._held, ""
        return Piece(text, "") if self._part == "reasoning" else Piece("", text)
