"""What a template writes, as tokens, where only the text that is new is encoded."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from qjax.model.template import Template
from qjax.model.tokenizer import Tokenizer

EACH = 256
"""Bytes that a piece counts for beside its text and its tokens: its objects, and its place in the order of use."""


class Pieces:
    """One template's, in any thread. Pieces are the texts between special tokens; limit: bytes of all that are kept, with their tokens.

    A tenant's pieces are its own: how long a prompt takes tells nobody what another tenant sent. Over the limit, the tenant that has most loses
    its least recently used ones, a quarter of what it has: a few tenants that send much do not drive out the others' few.
    """

    def __init__(self, template: Template, tokenizer: Tokenizer, limit: int):
        self.limit, self.size = limit, 0
        self._template, self._tokenizer = template, tokenizer
        self._special = {token: np.int32(token).tobytes() for token in template.special_ids}
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self._used: dict[str, OrderedDict[str, bytes]] = {}  # text -> its tokens, int32

    def render(self, messages: list[dict], tools: list[dict] | None, variables: dict, *, ask: bool = True, tenant: str = "") -> np.ndarray:
        """Template.render's tokens, int32 [n]. ask: with the beginning of an answer. Raises ValueError with the template's complaint."""
        parts = self._template.parts(messages, tools, add_generation_prompt=ask, **variables)
        tokens = self._special | self._encoded(tenant, dict.fromkeys(part for part in parts if isinstance(part, str)))
        return np.frombuffer(bytearray().join([tokens[part] for part in parts]), np.int32)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self.size = 0
            self._held.clear()
            self._used.clear()

    def _encoded(self, tenant: str, texts: Iterable[str]) -> dict[str, bytes]:
        """The tokens of each text. Encoding holds nobody up."""
        with self._lock:
            used = self._used.get(tenant, {})
            known = {text: used[text] for text in texts if text in used}
            for text in known:
                used.move_to_end(text)
        new = {text: np.array(self._tokenizer.encode(text), np.int32).tobytes() for text in texts if text not in known}
        if new:
            with self._lock:
                self._keep(tenant, new)
        return known | new

    def _keep(self, tenant: str, new: dict[str, bytes]) -> None:
        used = self._used.setdefault(tenant, OrderedDict())
        for text, tokens in new.items():
            if text not in used:  # another thread may have encoded it meanwhile
                self._count(tenant, _size(text, tokens))
                used[text] = tokens
        while self.size > self.limit:
            most = max(self._held, key=self._held.__getitem__)  # of all tenants: not for each piece anew
            least = self._held[most] * 3 // 4
            while self.size > self.limit and self._held[most] > least:
                self._count(most, -_size(*self._used[most].popitem(last=False)))
            if not self._used[most]:
                del self._used[most], self._held[most]

    def _count(self, tenant: str, size: int) -> None:
        self.size += size
        self._held[tenant] = self._held.get(tenant, 0) + size


def _size(text: str, tokens: bytes) -> int:
    """Text that is not ASCII takes up to 4 bytes a character, and the tokenizer leaves its UTF-8 with it, as much again."""
    return len(text) * (1 if text.isascii() else 8) + len(tokens) + EACH
