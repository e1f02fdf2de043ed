"""What web pages may ask: a browser sends their requests to this machine too, whoever wrote them."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from qjax.serving.errors import Forbidden
from qjax.serving.keys import is_loopback
from qjax.serving.stream import failed


class OwnPages:
    """Refuses pages of other origins than those that are allowed; and, where everyone on this machine may ask, other names than this machine's.

    A page whose name was made to point at this machine is of the server's own origin as far as the browser knows; its Host tells.
    """

    def __init__(self, app: ASGIApp, origins: list[str], trusted: bool):
        """trusted: whoever reaches the server is let in, and it listens on this machine only."""
        self._app, self._origins, self._trusted = app, origins, trusted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._fault(Headers(scope=scope))):
            await failed(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _fault(self, headers: Headers) -> Forbidden | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _hostname(host) if host else "localhost"
        if self._trusted and name != "localhost" and not is_loopback(name):
            return Forbidden("without a key (--api-key) the server answers to this machine's own names only: localhost, 127.0.0.1, [::1]")
        if origin is None or origin in self._origins or "*" in self._origins or origin.partition("://")[2] == host:
            return None
        return Forbidden("scripts of this web page may not ask here (--cors-origin)")


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # brackets with no address in them
        return None
