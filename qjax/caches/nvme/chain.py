"""The chain: a key for every grid line of a prompt, a hash of the salt and of all key ids up to the line.

A hash is a hint, never an answer: whoever finds something by it compares the key ids.
"""

from __future__ import annotations

import hashlib

import numpy as np

from qjax.caches.keys import common

SIZE = 16
"""Bytes of a hash: blake2b-128, of 131,072 ids in 1.2 ms."""


def _next(before: bytes, keys: np.ndarray) -> bytes:
    return hashlib.blake2b(before + np.ascontiguousarray(keys, "<i8").tobytes(), digest_size=SIZE).digest()


def at_end(line: str, tail: np.ndarray) -> str:
    """The hash at the end of some key ids past a line. ValueError where the line's is none."""
    before = bytes.fromhex(line)
    if len(before) != SIZE:
        raise ValueError(f"expected a line's hash of {SIZE} bytes, found {line!r}")
    return _next(before, tail).hex() if tail.size else line


class Chain:
    """The lines of one prompt, as far as they were asked for. Prompts of different tenants have no line in common."""

    def __init__(self, keys: np.ndarray, tenant: str, grid: int):
        """keys: int64 [n]."""
        self.keys, self.tenant, self.grid = keys, tenant, grid
        self._lines = [hashlib.blake2b(b"qjax\0" + tenant.encode("utf-8", "surrogatepass"), digest_size=SIZE).digest()]

    def line(self, number: int) -> str:
        """The hash at a line, 32 hex digits; line 0 is the tenant's own."""
        while len(self._lines) <= number:
            first = (len(self._lines) - 1) * self.grid
            self._lines.append(_next(self._lines[-1], self.keys[first : first + self.grid]))
        return self._lines[number].hex()

    def lines(self) -> list[str]:
        """Of all lines, the first being line 0."""
        self.line(last := self.keys.size // self.grid)
        return [one.hex() for one in self._lines[: last + 1]]

    def at(self, length: int) -> str:
        """The hash of the first `length` key ids."""
        number, rest = divmod(length, self.grid)
        return at_end(self.line(number), self.keys[length - rest : length])

    def page(self, first: int, length: int) -> str:
        """The key of the page of rows first .. , of a sequence of `length` tokens: of a page that is not full, the rows it has."""
        return f"p-{self.at(min(first + self.grid, length))}"

    def has(self, pages: tuple[str, ...]) -> bool:
        """Whether these are the keys of its first whole pages."""
        return all(page == f"p-{self.line(number)}" for number, page in enumerate(pages, 1))

    def agrees(self, number: int, tail: np.ndarray) -> int:
        """How many keys agree with something that ends `tail` key ids past a line that it has in common with this."""
        return number * self.grid + common(tail, self.keys[number * self.grid :])
