"""One array in one file: its bytes in C order, little endian, and nothing else.

TensorStore's zarr3 driver writes and reads it in an object store, and can in a directory, where direct.py does: one chunk, no codec but
`bytes`, no zarr.json. Bits travel as unsigned integers of the array's width, so that no dtype's own rules (a bool's, an int4's) can change
one. A codec with a sum (crc32c) would make the file's size 4 mod 4096, which turns direct reads off, and cost another copy; sums are taken
here, at 28 GB/s.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import tensorstore as ts
import xxhash

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ARRAY = {
    "driver": "zarr3",
    "assume_metadata": True,
    "fill_missing_data_reads": False,  # a missing file is an error, not zeros
    "store_data_equal_to_fill_value": True,  # zeros are data
    "metadata": {
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},  # "default" makes a directory of every dimension
    },
}

if sys.byteorder != "little":
    raise ImportError("files are little endian, and sums are taken over memory as it is: this machine is big endian")


@dataclass(frozen=True)
class Leaf:
    """What is known of one array: dtype's name, shape, and xxh3 of its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    sum: str

    @classmethod
    def of(cls, array: np.ndarray) -> Leaf:
        return cls(array.dtype.name, array.shape, checksum(array))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def empty(self) -> np.ndarray:
        """Memory that the array can be read into."""
        return host(self.shape, self.dtype)

    def fits(self, array: np.ndarray) -> bool:
        return array.shape == self.shape and array.dtype.name == self.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def host(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Zeros in pages of their own: `jax.device_put` aliases such an array on a CPU instead of copying it (np.empty is not aligned enough).

    Because of that it is never filled a second time while a computation may still read it. Huge pages, where the system has them: a disk
    was read into some buffers of small ones, scattered in memory, at half its rate.
    """
    dtype = np.dtype(dtype)
    nbytes = prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # huge ones may be off for memory that is shared
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, nbytes).view(dtype).reshape(shape)


def storable(name: str, array) -> np.ndarray:
    """The numpy array itself. ValueError for one whose bits are not all that it is."""
    array = np.asarray(array)
    dtype = array.dtype
    if dtype.hasobject or not dtype.isnative or dtype.itemsize not in WIDTHS or not _named(dtype):
        raise ValueError(
            f"{name}: expected elements of {', '.join(map(str, WIDTHS))} bytes in this machine's order, found dtype {dtype.str} ({dtype})"
        )
    return array


def _named(dtype: np.dtype) -> bool:
    try:
        return np.dtype(dtype.name) == dtype
    except TypeError:
        return False


def checksum(array: np.ndarray) -> str:
    """xxh3 over the bytes in C order, 16 hex digits; a slice of a larger array is not copied, unless single elements lie apart."""
    sum_ = xxhash.xxh3_64()
    for part in contiguous(array):
        sum_.update(part.reshape(-1).view(np.uint8))
    return sum_.hexdigest()


def timed_checksum(array: np.ndarray) -> tuple[str, float]:
    """The sum, and the CPU seconds that it took."""
    begin = time.thread_time()
    return checksum(array), time.thread_time() - begin


def contiguous(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array in parts whose bytes lie together, in C order; copies only where single elements lie apart."""
    if array.flags.c_contiguous or array.ndim < 2:
        yield np.ascontiguousarray(array)
    else:
        for part in array:
            yield from contiguous(part)


def write(kv: ts.KvStore, key: str, arrays: Mapping[str, np.ndarray]) -> list[ts.Future]:
    """Futures that are done when the files are durable. No copy is made: the arrays stay as they are until then."""
    opened = [(_open(kv, key, name, bits), bits) for name, bits in as_bits(arrays)]
    return [file.result().write(bits, can_reference_source_data_indefinitely=True).commit for file, bits in opened]


def read(kv: ts.KvStore, key: str, arrays: Mapping[str, np.ndarray]) -> dict[str, ts.Future]:
    """Futures, by name, that are done when the arrays, which may be slices of larger ones, are filled. An array of no element has no file."""
    opened = [(name, _open(kv, key, name, bits), bits) for name, bits in as_bits(arrays)]
    return {name: ts.array(bits, copy=False, write=True).write(file.result()).commit for name, file, bits in opened}


def as_bits(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays that have a file, as unsigned integers."""
    return ((name, a.view(WIDTHS[a.itemsize])) for name, a in arrays.items() if a.size)


def file_name(array: np.ndarray) -> str:
    """Of an array's one chunk, as zarr names it."""
    return ".".join("0" * array.ndim) or "0"


def _open(kv: ts.KvStore, key: str, name: str, bits: np.ndarray) -> ts.Future:
    # open=True is left out: it would take assume_metadata back
    layout = ts.ChunkLayout(chunk_shape=bits.shape)
    return ts.open(ARRAY, kvstore=kv / f"{key}/{name}/", dtype=bits.dtype, shape=bits.shape, chunk_layout=layout)
