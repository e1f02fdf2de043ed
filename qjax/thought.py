"""A thinking budget: reasoning that grows too long is closed for the model, which then answers."""

from __future__ import annotations

from dataclasses import dataclass

from qjax.model.tokenizer import Tokenizer
from qjax.sampling import is_whole
from qjax.thinking import CLOSE, OPEN, Thinking

PHRASE = "I have thought about this for long enough, so I give my answer now."
"""What the model finds itself to have thought when the budget is spent. The client never gets it."""


@dataclass(frozen=True)
class Thought:
    """The reasoning of one answer.

    budget: tokens that it may have, None for any number. opened: whether the prompt ends inside it; else it begins where the answer begins
    with the tag. phrase, close: ids that take the place of what would be drawn when the budget is spent: first the phrase, which the client
    does not get, then the tag that closes the reasoning and the line ends after it.
    """

    budget: int | None = None
    opened: bool = False
    phrase: tuple[int, ...] = ()
    close: tuple[int, ...] = ()

    def __post_init__(self):
        if self.budget is None:
            return
        if not is_whole(self.budget) or self.budget < 0:
            raise ValueError(f"a thinking budget must be a whole number of tokens, 0 or more, found {self.budget!r}")
        if not self.close:
            raise ValueError("a thinking budget needs the tokens that close the reasoning, found none")

    @classmethod
    def of(cls, tokenizer: Tokenizer, budget: int | None, opened: bool, phrase: str = PHRASE) -> Thought:
        """The thought as a template writes it: the phrase is its last paragraph. ValueError for a budget where the tags are no tokens."""
        if budget is None:
            return cls(None, opened)
        missing = [tag for tag in (OPEN, CLOSE) if tag not in tokenizer.special]
        if missing:
            raise ValueError(f"a thinking budget needs a model that thinks: its tokenizer has no {' and no '.join(missing)}")
        if CLOSE in phrase:
            raise ValueError(f"the phrase that ends the reasoning must not have {CLOSE} in it, found {phrase!r}")
        end = f"\n\n{phrase.strip()}\n" if phrase.strip() else "\n"
        return cls(budget, opened, tuple(tokenizer.encode(end)), (tokenizer.special[CLOSE], *tokenizer.encode("\n\n")))


class Meter:
    """Follows an answer's text as its tokens come. tokens: those inside the reasoning so far, its tags aside, the phrase's included.

    Where the reasoning begins and ends is told from the text, as the server tells it: a tag that the model spells counts.
    """

    def __init__(self, thought: Thought | None):
        """thought: None where nobody asks."""
        self._thought, self._thinking = thought, Thinking(thought.opened) if thought else None
        self.tokens, self._due = 0, ()
        self._close = thought is not None and thought.budget is not None  # what is closed for the model is closed once
        self._spend()

    @property
    def due(self) -> int | None:
        """The next token where it is not the model's to choose."""
        return self._due[0] if self._due else None

    @property
    def hides(self) -> bool:
        """Whether the next token is the phrase's."""
        return bool(self._due) and len(self._due) > len(self._thought.close)

    def feed(self, text: str) -> None:
        """Takes the text that the next token completes."""
        if self._thinking is None:
            return
        self._due = self._due[1:]
        before = self._thinking.inside
        self._thinking.feed(text)
        self.tokens += before and self._thinking.inside
        self._spend()

    def _spend(self) -> None:
        if self._close and self._thinking.inside and self.tokens >= self._thought.budget:
            self._due, self._close = (*self._thought.phrase, *self._thought.close), False
