"""A client that writes bytes: what no HTTP library would send."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def wire(url: str, buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection. buffer: bytes that may wait here to be read, about."""
    with socket.socket() as there:
        there.settimeout(300)
        if buffer:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        there.connect((urlsplit(url).hostname, urlsplit(url).port))
        yield there


def post(body: dict | bytes, path: str = CHAT, length: int | str | None = None) -> bytes:
    """A request. length: what it says that its body has; None for the truth."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode() + body


def answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of the next responses, which must come whole."""
    with connection.makefile("rb") as file:
        return [_answer(file) for _ in range(count)]


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """The only response."""
    return answers(connection, 1)[0]


def _answer(file: BinaryIO) -> tuple[int, bytes]:
    status, headers, body = int(file.readline().split()[1]), http.client.parse_headers(file), b""
    if "content-length" in headers:
        return status, file.read(int(headers["content-length"]))
    if "transfer-encoding" not in headers:
        return status, file.read()
    while size := int(file.readline(), 16):
        body += file.read(size)
        file.readline()
    file.readline()
    return status, body


def reset(connection: socket.socket) -> None:
    """Closes it as a process that dies does: nothing that was sent here is taken any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
