"""Whose conversation a request says that it is: for what stays in the caches longer, never for what is found there."""

from collections.abc import Mapping

from qjax.serving.schema import Generated

SESSION, PARENT = ("x-session-id", "x-session-affinity", "x-openwebui-chat-id"), "x-parent-session-id"
"""Headers of opencode and Open WebUI, the first that is there counts. opencode sends its titles and summaries under the conversation's own."""
LONGEST = 200
"""Characters of a name that count."""


def names(asked: Generated, headers: Mapping[str, str]) -> dict[str, str | None]:
    """session: the conversation's name, the body's before the headers'; parent: that of the conversation that waits for this one."""
    session = asked.session or next(filter(None, map(headers.get, SESSION)), None)
    return {"session": session and session[:LONGEST], "parent": (headers.get(PARENT) or None) and headers[PARENT][:LONGEST]}
