"""A Hugging Face checkpoint directory: its JSON files, and its safetensors read straight into the stacked tree."""

import json
from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError, safe_open

from qjax.model.config import CheckpointError, ModelConfig
from qjax.model.names import Found, check
from qjax.model.weights import fill

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

__all__ = ["CheckpointError", "read_json", "read_tensors", "shards"]


def read_json(path: Path, *, required: bool = True) -> dict:
    """The JSON object in a file; {} where it is absent and not required. Raises CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        if required:
            raise CheckpointError(f"{path}: expected a JSON file, found none") from e
        return {}
    except OSError as e:
        raise CheckpointError(f"{path}: expected a readable file, found: {e.strerror or e}") from e
    except ValueError as e:
        raise CheckpointError(f"{path}: expected JSON, found: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


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
        raise CheckpointError(f"{directory / INDEX}: expected names of files beside it, found {', '.join(foreign)}")
    missing = [n for n in files if not (directory / n).is_file()]
    if missing:
        raise CheckpointError(f"{directory}: expected the shards that {INDEX} names, found no {', '.join(missing)}")
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
        try:
            slots = check(found, config)
            return fill(lambda name: place[name].get_tensor(name), list(slots), slots, config)
        except CheckpointError as e:
            raise CheckpointError(f"{directory}: {e}") from e


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
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "expected a safetensors header, found bytes that are none"
    want = 8 + length + max(ends, default=0)
    return "" if size == want else f"{'truncated' if size < want else 'too long'}: expected {want} bytes, found {size}"
