"""Where later prompts part from a prompt: found in its tokens, with what a template makes of a few short messages."""

import numpy as np

from qjax.caches.keys import common
from qjax.model.template import Template

PROBE = {"role": "user", "content": "?"}


class Boundaries:
    """Of one template and its variables. Tools are no part of it: they stand before all messages, and would be rendered each time."""

    def __init__(self, template: Template, /, **variables):
        self._template, self._variables = template, variables
        try:
            # the tokens with which the template begins an answer, int32 [n], and the parts of a message alone
            asking, alone = (np.array(self._template.render([PROBE], None, ask, **variables), np.int32) for ask in (True, False))
            self._opening = asking[common(asking, alone) :]
            self._alone = self._template.parts([PROBE], None, False, **variables)
        except ValueError:  # a template that wants more than a user's message
            self._opening = self._alone = None

    def history(self, prompt: np.ndarray) -> int | None:
        """Tokens of a prompt before the beginning of the answer, a prefix of whatever the template makes of the answer later.

        Found at the prompt's end: a second rendering without the generation prompt, which would say the same, takes 25 ms at
        16,384 tokens, more than reading a short question. None where it cannot be told.
        """
        if self._opening is None or not self._opening.size:
            return None
        before = prompt.size - self._opening.size
        return before if np.array_equal(prompt[before:], self._opening) else None

    def user(self, messages: list[dict], prompt: np.ndarray) -> int | None:
        """Tokens of a prompt before its last user message: a question taken back or asked otherwise parts there.

        The turns from there on are counted in a rendering of short messages in their place, since a turn of tool calls can be most of
        the prompt, and in the prompt from its end. None where turns do not begin with a special token, which no text becomes.
        """
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None or self._alone is None:
            return None
        short = [PROBE, *({"role": message["role"], "content": "?"} for message in messages[last:])]
        try:
            parts = self._template.parts(short, None, True, **self._variables)
        except ValueError:
            return None
        tail = parts[len(self._alone) :]
        if parts[: len(self._alone)] != self._alone or not tail or not isinstance(tail[0], int):
            return None
        places, turns = np.flatnonzero(prompt == tail[0]), tail.count(tail[0])
        return int(places[-turns]) if turns <= places.size else None
