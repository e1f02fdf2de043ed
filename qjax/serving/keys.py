"""API keys: who a caller is, and the tenant whose caches a request may see. No key is kept, shown or written, only digests of keys."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from qjax.serving.errors import Forbidden, Unauthorized

NAMED = "default"
"""The name of the one key of --api-key."""


@dataclass(frozen=True)
class Caller:
    """Someone who may ask. name: for logs. secret: 32 bytes of the key's, none for a server without keys."""

    name: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Caller({self.name!r})"

    def tenant(self, cache_salt: str | None = None) -> str:
        """What the caches tell this caller's requests of one salt by: 32 hex digits, the same at every start.

        Two keys have no tenant in common, whatever the salts: a salt only parts what one key has. It is "" without keys and without a
        salt, as in the commands, which use the same files.
        """
        if not self.secret and not cache_salt:
            return ""
        return hashlib.blake2b((cache_salt or "").encode(), key=self.secret, digest_size=16, person=b"qjax tenant").hexdigest()


ANYONE = Caller("anyone", b"")


class Keys:
    """The keys of a server. Without any, everyone may ask, whatever key is sent: most clients cannot send none."""

    def __init__(self, keys: Iterable[tuple[str, str]] = (), admin: str | None = None):
        """keys: names and keys. admin: the administrator's key. ValueError names what is wrong, by the key's name."""
        self._callers: list[Caller] = []
        for name, key in keys:
            caller = Caller(name, _digest(_checked(key, f"key {name!r}")))
            for other in self._callers:
                if other.name == name:
                    raise ValueError(f"expected keys of different names, found {name!r} twice")
                if other.secret == caller.secret:
                    raise ValueError(f"expected different keys, found one key under the names {other.name!r} and {name!r}")
            self._callers.append(caller)
        self._admin = None if admin is None else _digest(_checked(admin, "the administrator's key"))
        if self._admin in [caller.secret for caller in self._callers]:
            raise ValueError("expected a key of the administrator's own, found one that is also a caller's")

    @classmethod
    def of(cls, api_key: str | None = None, key_file: Path | None = None, admin: str | None = None) -> Self:
        """The key of --api-key and those of a file. ValueError names the line, never what is in it."""
        keys = [] if api_key is None else [(NAMED, api_key)]
        return cls([*keys, *([] if key_file is None else read(key_file))], admin)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this Authorization header. Raises Unauthorized. It takes as long whichever key it is, and whether it is one."""
        if not self._callers:
            return ANYONE
        given, found = _digest(_bearer(authorization)), None
        for caller in self._callers:
            if hmac.compare_digest(caller.secret, given):
                found = caller
        if found is None:
            raise Unauthorized()
        return found

    def administrate(self, authorization: str | None, host: str | None) -> None:
        """Lets the administrator in: with the key, or from this machine where there is none. host: the connection's other end.

        Raises Unauthorized or Forbidden.
        """
        if self._admin is not None:
            if not hmac.compare_digest(self._admin, _digest(_bearer(authorization))):
                raise Unauthorized("expected the administrator's key in Authorization: Bearer KEY")
        elif not is_loopback(host):
            raise Forbidden("without an administrator's key (--admin-key) this may be asked from the server's machine only")


def read(path: Path) -> list[tuple[str, str]]:
    """Names and keys of a file with `name key` on each line; empty lines and those that begin with # count nothing. ValueError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: expected a file of keys, found: {getattr(e, 'strerror', None) or 'no UTF-8'}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise ValueError(f"{path}, line {number}: expected a name and a key, found {len(words)} word{'s' * (len(words) != 1)}")
        keys.append((words[0], words[1]))
    if not keys:
        raise ValueError(f"{path}: expected a name and a key on a line, found none")
    return keys


def is_loopback(host: str | None) -> bool:
    """Whether an address is this machine's own loopback; not for a name, nor for a connection that has none."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # Python 3.11 calls ::ffff:127.0.0.1 no loopback
    return (mapped or address).is_loopback


def _checked(key: str, what: str) -> str:
    if not key or not all("!" <= c <= "~" for c in key):
        raise ValueError(f"{what}: expected printable ASCII without spaces, found {'none' if not key else 'something else'}")
    return key


def _bearer(authorization: str | None) -> str:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
