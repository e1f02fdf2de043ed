"""A shelf for sessions: with budgets that nothing ever exceeds, a request has to do only with those that it agrees with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from qjax.bench.trace import Call
from qjax.caches.resident import ResidentPrefix
from qjax.caches.session import Session

FETCHED = 16
"""Sessions that a request sees at the most, of those that agree with it equally far: the newest."""


class Node:
    """Prompts that agree up to here. after: the next by (base, count) of its span. sessions: those that pass, the newest last."""

    __slots__ = ("after", "sessions")

    def __init__(self):
        self.after: dict[tuple[int, int], Node] = {}
        self.sessions: dict[Session, None] = {}


class Shelf:
    """Sets sessions aside, so that ten thousand of them do not make every request look at each. Between `fetch` and `put_back` the
    resident prefix has its resident session and those that can serve the request or be its nearest.
    """

    def __init__(self, resident: ResidentPrefix):
        self._resident, self._root = resident, Node()
        self._nodes: dict[Session, list[Node]] = {}
        self._fetched: dict[Session, None] = {}

    def fetch(self, call: Call) -> None:
        """Puts a request's sessions there."""
        found = dict.fromkeys(s for s in self._resident.sessions if s.role == "resident")
        for node in reversed(list(self._path(call))):
            found |= dict.fromkeys(islice(reversed(node.sessions), FETCHED))
            if len(found) > FETCHED:
                break
        self._resident.sessions = list(found)
        self._fetched = found

    def put_back(self, call: Call) -> None:
        """Takes what a request left."""
        now = dict.fromkeys(self._resident.sessions)
        for session in self._fetched.keys() - now.keys():
            for node in self._nodes.pop(session):
                del node.sessions[session]
        for session in now.keys() - self._fetched.keys():
            node, self._nodes[session] = self._root, []
            for span in call.spans():
                node = node.after.setdefault(span, Node())
                node.sessions[session] = None
                self._nodes[session].append(node)

    def _path(self, call: Call) -> Iterator[Node]:
        node = self._root
        for span in call.spans():
            if (node := node.after.get(span)) is None:
                return
            yield node
