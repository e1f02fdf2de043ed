"""A Hugging Face checkpoint directory: its JSON files, and its safetensors read straight into the stacked tree."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from qjax.model.config import ModelConfig
from qjax.model.names import Found, check, leaf_dtypes
from qjax.model.values import CheckpointError, read_json, shortened
from qjax.model.weights import fill

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

__all__ = ["CheckpointError", "read_json", "read_tensors", "shards"]


def shards(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises CheckpointError where there are none, or the index names files that are not there."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        there = sorted(p.name for p in directory.iterdir())
        raise CheckpointError(f"{directory}: expected {SINGLE} or {INDEX}, found {', '.join(there[:20]) or 'an empty directory'}")
    names = read_json(directory / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{directory / INDEX}: expected a weight_map of tensor names to file names, found {type(names).__name__}")
    files = sorted(set(names.values()))
    foreign = [n for n in files if Path(n).name != n]
    if foreign:
        raise CheckpointError(f"{directory / INDEX}: expected names of files beside it, found {shortened(', '.join(foreign))}")
    missing = [n for n in files if not os.path.isfile(directory / n)]  # Path's own raises for a name too long
    if missing:
        raise CheckpointError(f"{directory}: expected the shards that {INDEX} names, found no {shortened(', '.join(missing))}")
    return [directory / n for n in files]


def read_tensors(directory: Path, config: ModelConfig) -> dict:
    """The stacked tree of numpy arrays, in the form that is held (`weights.spec`).

    All names, shapes and dtypes are checked before any weight is read; then one tensor at a time is copied into its rows, so that the peak
    is one copy of the model and one tensor. Raises CheckpointError.
    """
    with ExitStack() as stack:
        found, place, faults = {}, {}, []
        for path in shards(directory):
            file = stack.enter_context(_open(path))
            for name in file.offset_keys():
                if name in place:
                    faults.append(f"{path}: expected {name} in one file, found it in an earlier one too")
                part = file.get_slice(name)
                dtype = part.get_dtype()
                found[name] = Found(tuple(part.get_shape()), _DTYPES.get(dtype, dtype))
                place[name] = file
        if faults:
            raise CheckpointError("\n".join(faults))
        faults = []

        def read(name: str) -> np.ndarray:
            tensor = place[name].get_tensor(name)
            if not_finite := _not_finite(tensor, leaf_dtypes(slots[name].path, config)[0]):
                faults.append(f"{name}: {not_finite}")
            return tensor

        try:
            slots = check(found, config)
            params = fill(read, list(slots), slots, config)
        except CheckpointError as e:
            raise CheckpointError("\n  ".join([f"{directory}: {e}", *faults])) from e
        if faults:
            raise CheckpointError("\n  ".join([f"{directory}: weights that no forward pass can use:", *faults]))
        return params


def _not_finite(tensor: np.ndarray, dtype: np.dtype) -> str:
    """What is not finite in a float tensor, or would not be in `dtype`, with counts; "" where all is.

    Compared as integers, a mebibyte at a time, which stays in the processor's cache: numpy's isfinite of a bfloat16 takes 20 times as long.
    """
    bits = np.dtype(f"uint{8 * tensor.itemsize}")
    flat, sign = tensor.reshape(-1).view(bits), bits.type(1 << (8 * tensor.itemsize - 1))
    infinity = int(np.array(np.inf, tensor.dtype).view(bits))
    # the least float32 that rounds to bfloat16's infinity lies halfway above its largest number
    limit = 0x7F7F8000 if tensor.itemsize == 4 and dtype.itemsize == 2 else infinity
    step, lost, beyond = 2**20 // tensor.itemsize, 0, 0
    for start in range(0, flat.size, step):
        part = flat[start : start + step] & ~sign
        if part.max() >= limit:
            lost += int((part >= infinity).sum())
            beyond += int(((part >= limit) & (part < infinity)).sum())
    found = [f"{lost:,} that are NaN or infinite"] * (lost > 0) + [f"{beyond:,} beyond the range of {dtype.name}"] * (beyond > 0)
    return f"expected {flat.size:,} finite numbers, found {' and '.join(found)}" if found else ""


def _open(path: Path):
    """A safetensors file opened for numpy. Raises CheckpointError that says how many bytes there should be, where the header tells."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: {_damage(path) or f'expected a safetensors file, found: {e}'}") from e


def _damage(path: Path) -> str:
    """What is wrong with the length of a safetensors file (8 bytes of header length, the header, the tensors); "" where nothing is."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > 100_000_000:  # the format's own limit of a header
            return f"expected a safetensors file, found {size} bytes that begin with no header length"
        if size < 8 + length:
            return f"truncated: expected a header of {length} bytes, found {size - 8}"
        try:
            ends = [t["data_offsets"][1] for k, t in json.loads(f.read(length)).items() if k != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return "expected a safetensors header, found bytes that are none"
    want = 8 + length + max(ends, default=0)
    return "" if size == want else f"{'truncated' if size < want else 'too long'}: expected {want} bytes, found {size}"
