"""A directory that one run of a command has to itself: what it measures or shows lies there, and nobody else's files."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qjax.interrupts import deferred


@contextlib.contextmanager
def private_directory(what: str, inside: Path | None = None) -> Iterator[Path]:
    """It goes at the end of the block, however that comes. A signal while it is made or removed counts afterwards.

    Nothing may write there any more by then. inside: the directory that it lies in, the system's for temporary files where not given.
    """
    made = None
    try:
        with deferred():
            made = Path(tempfile.mkdtemp(prefix=f"qjax-{what}-", dir=inside))
        yield made
    finally:
        if made is not None:
            with deferred():
                shutil.rmtree(made)
