"""Conversion of a Hugging Face directory into one that loads directly."""

import os
import shutil
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from qjax.model import converted, source
from qjax.model.checkpoint import CheckpointError

_COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class ConvertReport(NamedTuple):
    """Seconds to load the weights from either form (the file cache is warm for the second), and the bytes of the stacked tree."""

    safetensors_seconds: float
    orbax_seconds: float
    bytes: int


def convert(src: str | Path, dst: str | Path) -> ConvertReport:
    """Convert the Hugging Face directory `src` into `dst`, which must be new or empty, and load both.

    All is written to a sibling of `dst` and renamed when it has been read back with the same bits: a kill leaves nothing at `dst`.
    Raises CheckpointError.
    """
    src, dst = Path(src), Path(dst).resolve()
    if src.is_dir() and converted.is_converted(src):
        raise CheckpointError(f"{src}: expected a Hugging Face directory, found a converted one")
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise CheckpointError(f"{dst}: expected a new or an empty directory, found {'a full one' if dst.is_dir() else 'a file'}")
    model = source.load(src)
    size, digest, seconds = sum(x.nbytes for x in jax.tree.leaves(model.params)), _digest(model.params), model.load_seconds
    partial = dst.parent / f".{dst.name}.partial-{os.getpid()}-{time.time_ns()}"
    try:
        partial.mkdir(parents=True)
        for name in _COPIED:
            if (src / name).is_file():
                shutil.copyfile(src / name, partial / name)
        converted.write(partial, model.params, model.config)
        del model  # one copy of the weights at a time
        again = source.load(partial)
        if _digest(again.params) != digest:
            raise CheckpointError(f"{partial}: expected the bits that were written, found others")
        partial.rename(dst)
    except OSError as e:
        raise CheckpointError(f"{dst}: expected to write {size} bytes there, found: {e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already where it was renamed
    return ConvertReport(seconds, again.load_seconds, size)


def _digest(params: dict) -> list[int]:
    """A checksum of each leaf's bytes, in the tree's order."""
    return [zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in jax.tree.leaves(params)]
