"""Exactness in this project means bits: -0.0 differs from 0.0, and two NaNs are equal only when their payloads are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

BLOCK_BYTES = 1 << 24  # compared at a time: bounds what a comparison of two large arrays allocates


def as_bytes(array) -> np.ndarray:
    """The bytes of a numpy or jax array of any fixed-width dtype, as uint8 [elements, bytes of an element]."""
    array = np.asarray(array)
    if array.dtype.hasobject:
        raise ValueError(f"bits of dtype {array.dtype} are not defined")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.dtype.itemsize)


def differing_bits(a, b) -> int:
    """How many bits differ between two arrays; ValueError when their shapes or dtypes do."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"cannot compare the bits of {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
    a, b = as_bytes(a).reshape(-1), as_bytes(b).reshape(-1)
    blocks = range(0, a.size, BLOCK_BYTES)
    return sum(int(np.bitwise_count(a[i : i + BLOCK_BYTES] ^ b[i : i + BLOCK_BYTES]).sum(dtype=np.int64)) for i in blocks)


def digest(arrays: Mapping[str, Any]) -> str:
    """32 hex digits of named arrays: of their names, dtypes, shapes and bits."""
    found = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        array = np.asarray(array)
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(as_bytes(array).reshape(-1))
    return found.hexdigest()
