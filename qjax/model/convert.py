"""Conversion of a Hugging Face directory into one that loads directly."""

import contextlib
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from qjax.interrupts import deferred
from qjax.model import converted, source
from qjax.model.config import ModelConfig
from qjax.model.values import CheckpointError, shortened
from qjax.model.weights import spec

_COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_STARTED = time.time_ns()


class ConvertReport(NamedTuple):
    """Seconds to load the weights from either form (the file cache is warm for the second), and the bytes of the stacked tree."""

    safetensors_seconds: float
    orbax_seconds: float
    bytes: int


def convert(src: str | Path, dst: str | Path, say: Callable[[str], None] = lambda line: None) -> ConvertReport:
    """Convert the Hugging Face directory `src` into `dst`, which must be new or empty, and load both.

    All is written to a directory beside `dst`, or inside it where it is there already (it may be a mount point, or where a shell stands), and
    renamed when it has been read back with the same bits, the marker last: a kill leaves nothing that is taken for a checkpoint, and the next
    conversion to `dst` removes what it left, and has `say` say so. Raises CheckpointError.
    """
    if not str(src) or not os.path.isdir(src):  # Path("") is the current directory
        found = "an empty name" if not str(src) else "a file" if os.path.exists(src) else "nothing there"
        raise CheckpointError(f"{shortened(str(src)) or 'source'}: expected a directory of a Hugging Face checkpoint, found {found}")
    if not str(dst):
        raise CheckpointError("target: expected a directory to make, or an empty one, found an empty name")
    src, dst = Path(src).resolve(), Path(dst).resolve()
    if converted.is_converted(src):
        raise CheckpointError(f"{src}: expected a Hugging Face directory, found a converted one")
    with _written(dst, None):
        _clear(dst, say)
        if os.path.lexists(dst) and (not dst.is_dir() or any(p.name != "lost+found" for p in dst.iterdir())):  # of a new file system
            raise CheckpointError(f"{dst}: expected a new or an empty directory, found {'a full one' if dst.is_dir() else 'a file'}")
    size = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(spec(ModelConfig.from_file(src / "config.json"))))
    inside, name = dst.is_dir(), f"partial-{os.getpid()}-{time.time_ns()}"
    partial = dst / f".{name}" if inside else dst.parent / f".{dst.name}.{name}"
    with _removed_at_the_end(partial):
        with _written(dst, size):
            partial.mkdir(parents=True)
            free = shutil.disk_usage(partial)
            if free.total > 0 and free.free < size:  # some network file systems know neither
                raise OSError(f"{free.free} bytes free")
        model = source.load(src)
        digest, seconds = _digest(model.params), model.load_seconds
        with _written(dst, size):
            for file in _COPIED:
                if (src / file).is_file():
                    shutil.copyfile(src / file, partial / file)
            converted.write(partial, model.params, model.config)
        del model  # one copy of the weights at a time
        again = source.load(partial)
        if _digest(again.params) != digest:
            raise CheckpointError(f"{partial}: expected the bits that were written, found others")
        with _written(dst, size):
            _move_into(partial, dst) if inside else partial.rename(dst)
    return ConvertReport(seconds, again.load_seconds, size)


@contextlib.contextmanager
def _written(dst: Path, size: int | None) -> Iterator[None]:
    """What the system refuses inside becomes a CheckpointError that names the target and the bytes that were to be written there."""
    try:
        yield
    except OSError as e:
        what = "a new or an empty directory" if size is None else f"to write {size} bytes there"
        raise CheckpointError(f"{shortened(str(dst))}: expected {what}, found: {e.strerror or e}") from e


@contextlib.contextmanager
def _removed_at_the_end(partial: Path) -> Iterator[None]:
    """At the end the partial is gone, and after an error the parents too that were made for it."""
    made = [p for p in partial.parents if not p.exists()]
    try:
        yield
    except BaseException:
        with deferred():
            _remove(partial)
            with contextlib.suppress(OSError):  # not made yet, or somebody else's file is in it
                for parent in made:
                    parent.rmdir()
        raise


def _remove(partial: Path) -> None:
    """Remove a directory, for at most ten seconds: writes that a failure left under way can make files in it again."""
    for _ in range(200):
        shutil.rmtree(partial, ignore_errors=True)
        if not os.path.lexists(partial):
            return
        time.sleep(0.05)


def _move_into(partial: Path, dst: Path) -> None:
    """Rename the entries of `partial` into `dst`, the marker last; all or, after an error, none."""
    names = sorted((p.name for p in partial.iterdir()), key=lambda name: name == converted.MARKER)
    moved = []
    with deferred():
        try:
            for name in names:
                (partial / name).rename(dst / name)
                moved.append(name)
        except OSError:
            for name in moved:
                (dst / name).rename(partial / name)
            raise
        partial.rmdir()


def _clear(dst: Path, say: Callable[[str], None]) -> None:
    """Remove what conversions to `dst` left whose process is no longer there, beside it and inside it."""
    for parent, prefix in ((dst.parent, f".{dst.name}."), (dst, ".")):
        for path in sorted(parent.iterdir()) if parent.is_dir() else ():
            match = re.fullmatch(re.escape(prefix) + r"partial-(\d{1,10})-(\d{1,20})", path.name)
            if match and path.is_dir() and not _is_at_work(int(match[1]), int(match[2])):
                shutil.rmtree(path)
                say(f"{path}: removed, left by a conversion that was ended early")


def _is_at_work(pid: int, made: int) -> bool:
    """True where the process that made a partial at `made` (ns since 1970) may still be there."""
    if pid == os.getpid():  # a container gives each run the same number
        return made >= _STARTED
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's
        return True
    return True


def _digest(params: dict) -> list[int]:
    """A checksum of each leaf's bytes, in the tree's order."""
    return [zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in jax.tree.leaves(params)]
