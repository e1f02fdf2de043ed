"""Side requests: the titles, tags and follow-ups that clients ask for beside a conversation."""

import re
from collections.abc import Iterable

from qjax.serving.render import text_of
from qjax.serving.schema import ChatRequest


class Side:
    """They are told by how they begin, and must not think long before a conversation's own turn, which waits for the same engine."""

    def __init__(self, patterns: Iterable[str], max_tokens: int):
        """patterns: regular expressions of how the first message begins; "none" is no rule. ValueError for one that is no regular expression."""
        self._begins, self._max_tokens = [], max_tokens
        for pattern in patterns:
            try:
                self._begins += [re.compile(pattern)] if pattern != "none" else []
            except re.error as e:
                raise ValueError(f"side_request must be a regular expression, not {pattern!r}: {e}") from None

    def applied(self, chat: ChatRequest) -> ChatRequest:
        """The request as it is served: a side request does not think unless it says enable_thinking itself, and its answer is short.

        opencode sends an effort with its titles, as it does with all that it asks of a model that can think.
        """
        if chat.tools or not any(begin.match(text_of(chat.messages[0].content)) for begin in self._begins):
            return chat
        most = min(chat.limit or self._max_tokens, self._max_tokens)
        update = {"max_completion_tokens": most, "reasoning_effort": None}
        if chat.enable_thinking is None and "enable_thinking" not in (chat.chat_template_kwargs or {}):
            update["enable_thinking"] = False
        return chat.model_copy(update=update)
