"""The directory that keeps compiled programs from run to run: JAX's persistent cache, mended where an entry is damaged."""

from __future__ import annotations

import contextlib
import functools
import importlib
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from qjax.flags import WrongSetting

_mended: list[str] = []
_not_kept: list[str] = []


def use_compile_cache(directory: Path | None) -> None:
    """Keeps compiled programs in a private directory from run to run; None switches that off. ValueError where there can be none."""
    if directory is not None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise WrongSetting("compile_cache", f"must be a directory that can be made, not {directory}: {e.strerror}") from e
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", None if directory is None else str(directory))
    reset_cache()  # jax 0.10 opens the directory of its first compile and keeps to it
    _mend()
    _mended.clear()
    _not_kept.clear()


def faults() -> str:
    """What has gone wrong with the directory since it was taken into use, in a few words; empty where nothing has."""
    said = [f"{len(_mended)} damaged made anew"] if _mended else []
    if _not_kept:
        said.append(f"{len(_not_kept)} not kept: {_not_kept[0]}")
    return ", ".join(said)


@functools.cache
def _mend() -> None:
    """Makes JAX remove an entry that it cannot read, or could not write whole (a full disk leaves it empty).

    JAX itself only warns, and never writes over an entry: it would compile the program at every start. Its warning names no entry, so
    this wraps its two functions that read and write one, the key first in both; without them JAX does as it would.
    """
    module = importlib.import_module(reset_cache.__module__)

    def read(function, key, *rest):
        try:
            return function(key, *rest)
        except Exception:  # zlib.error, an EOFError, an OSError or the compiler's own, whatever the bytes are
            _remove(key)
            _mended.append(key)
            return None, None

    def write(function, key, *rest):
        try:
            function(key, *rest)
        except OSError as e:
            _remove(key)
            _not_kept.append(e.strerror or str(e))

    for name, wrapper in (("get_executable_and_time", read), ("put_executable_and_time", write)):
        if function := getattr(module, name, None):
            setattr(module, name, functools.partial(wrapper, function))


def _remove(key: str) -> None:
    for suffix in ("-cache", "-atime"):
        with contextlib.suppress(OSError):
            (Path(jax.config.jax_compilation_cache_dir) / (key + suffix)).unlink()
