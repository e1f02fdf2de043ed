"""A chat request as the prompt that the engine runs, which goes on from what was generated before."""

import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from qjax.boundaries import Boundaries
from qjax.model.source import Model
from qjax.serving.align import Aligned, Aligner, Answer
from qjax.serving.errors import BadRequest
from qjax.serving.pieces import Pieces
from qjax.serving.records import Record, Records
from qjax.serving.render import messages_of, tools_of, variables_of
from qjax.serving.schema import Chat
from qjax.thinking import OPEN

TOKENS = 4_194_304
"""Tokens on record, 16 conversations of the longest kind. With their texts they take about 32 MiB."""
PIECE_BYTES = 16
"""Bytes of encoded pieces for each token on record: its text, its id, and what the pieces count for beside."""
VARIABLES = 256
"""Sets of variables whose boundaries are kept, each of at most MOST characters: clients make them up."""
MOST = 1024


@dataclass(frozen=True, eq=False)
class Prompt:
    """tokens: int32 [n]. history, user: as Engine.generate takes them. opened: whether the answer begins inside the reasoning.

    tools: those that it has. aligned: what its answer is recorded with, and why it is not all made of the rows; None where no answer is asked for.
    """

    tokens: np.ndarray
    history: int | None
    user: int | None
    opened: bool
    tools: list[dict] | None
    aligned: Aligned | None


class Prompts:
    """Prompts of one model, and the record of their answers. In any thread, several at once."""

    def __init__(self, model: Model, *, tokens: int = TOKENS, align: bool = True, reasoning: bool = True):
        """tokens: how many may be on record. align, reasoning: as Aligner has them."""
        self._model, self._template = model, model.template
        if self._template is not None:
            self._records, self._pieces = Records(tokens), Pieces(self._template, model.tokenizer, PIECE_BYTES * tokens)
            self._aligner = Aligner(self._pieces.render, model.tokenizer, self._records, align=align, reasoning=reasoning)
            self._known = lru_cache(VARIABLES)(lambda tenant, variables: Boundaries(self._template, **json.loads(variables)))

    def prompt(self, chat: Chat, *, tenant: str = "", limit: int | None = None, ask: bool = True) -> Prompt:
        """limit: as in Aligner.align. ask: for an answer; without it the prompt is what the template writes, and no answer's.

        Raises BadRequest for what the template cannot take.
        """
        if self._template is None:
            raise BadRequest(f"{self._model.name} has no chat template: /v1/completions continues plain text", "messages")
        messages, tools, variables = messages_of(chat.messages), tools_of(chat), variables_of(chat)
        try:
            if not ask:
                tokens = self._pieces.render(messages, tools, variables, ask=False, tenant=tenant)
                return Prompt(tokens, None, None, False, tools, None)
            aligned = self._aligner.align(messages, tools, variables, tenant=tenant, limit=limit)
        except ValueError as e:
            raise BadRequest(str(e)[:300]) from None
        boundaries, tokens = self._boundaries(tenant, variables), aligned.tokens
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        # rows before the last answer are those of its prompt, where the place was found: a long turn is not looked through each time
        within = aligned.matched is not None and last < aligned.matched
        user = aligned.base.user if within else boundaries.user(messages, tokens)
        opened = self._model.tokenizer.decode(tokens[-8:]).rstrip().endswith(OPEN)
        return Prompt(tokens, boundaries.history(tokens), user, opened, tools, aligned)

    def keep(self, prompt: Prompt, answer: Answer) -> Record | None:
        """Records an answer to a prompt that asked for it. None where nothing was generated."""
        return self._aligner.keep(prompt.aligned, answer, prompt.user)

    @property
    def records(self) -> Records | None:
        """The answers; None for a model without a template, which has no conversations."""
        return self._records if self._template is not None else None

    def clear(self) -> None:
        """Forgets what was generated and what was encoded."""
        if self._template is not None:
            self._records.clear()
            self._pieces.clear()
            self._known.cache_clear()

    def _boundaries(self, tenant: str, variables: dict) -> Boundaries:
        """Each tenant's own, as pieces are."""
        text = json.dumps(variables)
        return self._known(tenant, text) if len(text) <= MOST else Boundaries(self._template, **variables)
