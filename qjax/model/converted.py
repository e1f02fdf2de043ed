"""A converted checkpoint: the stacked tree as an Orbax checkpoint, beside the small files of the directory that it was made from."""

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from qjax.interrupts import deferred
from qjax.model.config import ModelConfig
from qjax.model.values import CheckpointError, read_json, shortened, shown
from qjax.model.weights import spec

MARKER, PARAMS = "qjax.json", "params"
FORMAT = 1


def is_converted(directory: Path) -> bool:
    """True for a directory that `write` completed."""
    return (directory / MARKER).is_file()


def write(directory: Path, params: dict, config: ModelConfig) -> None:
    """Write the tree into an existing directory, and last the marker, which lists the files of the tree with their lengths.

    Raises OSError where the tree cannot be written. Ctrl-C waits for Orbax.
    """
    try:
        with _orbax() as checkpointer:
            checkpointer.save(directory.resolve() / PARAMS, params)
    except Exception as e:  # a full disk is a ValueError of tensorstore's, with the system's error in its text
        number = re.search(r"os_error_code='(\d+)'", str(e))
        raise OSError(os.strerror(int(number[1])) if number else shortened(str(e))) from e
    marker = {"format": FORMAT, "dtype": config.dtype, "bytes": _lengths(directory)}
    (directory / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")


def read(directory: Path, config: ModelConfig) -> dict:
    """The tree as jax arrays on the default device, in the form that is held. Raises CheckpointError."""
    marker = read_json(directory / MARKER)
    if marker.get("format") != FORMAT or not isinstance(marker.get("bytes"), dict):
        raise CheckpointError(f"{directory / MARKER}: expected format {FORMAT}, found {shown(marker.get('format'))}")
    if marker.get("dtype") != config.dtype:
        raise CheckpointError(f"{directory}: expected weights converted as {config.dtype}, found {shown(marker.get('dtype'))}")
    there = _lengths(directory)
    # a restore of a cut file fails only after it began, and then also in the threads that it left behind
    faults = [f"{k}: expected {n} bytes, found {there.get(k, 'no file')}" for k, n in marker["bytes"].items() if there.get(k) != n]
    if faults:
        raise CheckpointError(f"{directory}: damaged:" + "".join(f"\n  {f}" for f in faults))
    path = directory.resolve() / PARAMS
    import orbax.checkpoint as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), spec(config))
    try:
        with _orbax() as checkpointer:
            _compare(path, checkpointer.metadata(path).item_metadata.tree, target)
            args = ocp.checkpoint_utils.construct_restore_args(target)
            return checkpointer.restore(path, ocp.args.PyTreeRestore(item=target, restore_args=args))
    except CheckpointError:
        raise
    except Exception as e:  # Orbax and tensorstore raise many kinds for a damaged directory
        raise CheckpointError(f"{path}: expected a whole Orbax checkpoint, found: {e}") from e


def files(directory: Path) -> list[Path]:
    """The files of the tree."""
    return sorted(p for p in (directory / PARAMS).rglob("*") if p.is_file())


def _lengths(directory: Path) -> dict[str, int]:
    """Bytes of each file of the tree, by its path below the directory."""
    return {p.relative_to(directory).as_posix(): p.stat().st_size for p in files(directory)}


def _compare(path: Path, found: dict, wanted: dict) -> None:
    """Raise CheckpointError with every leaf that is missing, unexpected or of another shape or dtype (a restore would convert in silence)."""
    there = {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(found)}
    want = {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(wanted)}
    faults = [f"unexpected leaf {key}" for key in there.keys() - want.keys()]
    for key, leaf in want.items():
        if key not in there:
            faults.append(f"missing leaf {key}")
        elif (tuple(there[key].shape), there[key].dtype) != (leaf.shape, leaf.dtype):
            faults.append(f"{key}: expected {leaf.dtype}{list(leaf.shape)}, found {there[key].dtype}{list(there[key].shape)}")
    if faults:
        raise CheckpointError(f"{path}: leaves do not fit the config:" + "".join(f"\n  {f}" for f in faults))


@contextlib.contextmanager
def _orbax() -> Iterator:
    """Orbax's checkpointer, storing plain bytes: zstd halves the speed of a load and saves a quarter.

    Its threads go on when an interruption has left it, so Ctrl-C waits until it has ended. Each of them reports a failure that the error says
    too, with a traceback, some of them long after it: what they report is dropped from here on, until Orbax succeeds.
    """
    import orbax.checkpoint as ocp  # here: it takes 0.7 s

    hook = sys.unraisablehook
    with deferred():
        for name, dropped in _DROPPED.items():
            logging.getLogger(name).addFilter(dropped)
        sys.unraisablehook = _without_late_writes(hook)
        with ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=False, use_compression=False) as checkpointer:
            yield checkpointer
        sys.unraisablehook = hook
        for name, dropped in _DROPPED.items():
            logging.getLogger(name).removeFilter(dropped)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.getMessage()


_DROPPED = {"absl": _nothing, "asyncio": _not_of_orbax}  # absl's logger is Orbax's alone here


def _without_late_writes(hook: Callable) -> Callable:
    """A sys.unraisablehook but for writes of tensorstore's threads that end when the first failure has closed Orbax's event loop."""
    if getattr(hook, "drops_late_writes", False):
        return hook

    def filtered(args):
        if str(args.exc_value) != "Event loop is closed":
            hook(args)

    filtered.drops_late_writes = True
    return filtered
