"""What the tests store: arrays that follow from a number, of odd and of whole-page sizes, and the files that they are in."""

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np

from storage import Storage

FINGERPRINT = {"weights": "5e1f", "jax": "0.10.2"}
SHAPES = {"K": ((3, 8, 5), ml_dtypes.bfloat16), "V": ((3, 8, 5), ml_dtypes.bfloat16), "S": ((2, 2048), np.float32), "ids": ((7,), np.int32)}


def content(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {name: random_bits(rng, *spec) for name, spec in SHAPES.items()}


def random_bits(rng, shape, dtype) -> np.ndarray:
    width = np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * width), dtype).reshape(shape)


def key(number: int) -> str:
    return hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()


def empty() -> dict[str, np.ndarray]:
    return {name: np.empty(shape, dtype) for name, (shape, dtype) in SHAPES.items()}


def equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(a.tobytes() == wanted[name].tobytes() and a.dtype == wanted[name].dtype for name, a in found.items())


def reads(store: Storage, number: int) -> bool:
    """Whether the entry is there; it then holds the bits that were put."""
    found = empty()
    there = store.get([(key(number), found)]) == 1
    assert not there or equal(found, content(number)), f"entry {number} holds other bits than were put"
    return there


def entry_path(root: Path, number: int) -> Path:
    (found,) = root.glob(f"*/{key(number)}")
    return found


def file(root: Path, number: int, name: str) -> Path:
    """The file of an array, or `meta`."""
    if name == "meta":
        return entry_path(root, number) / name
    (found,) = (entry_path(root, number) / name).iterdir()
    return found


def names(root: Path) -> set[str]:
    """What there is of entries, finished or not, on the disk."""
    return {path.name for path in root.glob("*/*") if path.is_dir()}
