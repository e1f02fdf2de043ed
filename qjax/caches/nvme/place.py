"""Opening the storage of an engine: who may write to it, and whether its bits are still the ones that are computed here."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from qjax.config import DiskConfig
from storage import Storage, StorageError

log = logging.getLogger(__name__)

GOLDEN = "golden"


def bucket_options(config: DiskConfig) -> dict[str, str] | None:
    """What Storage.open has to know of a bucket's server, beside its URL."""
    return {"endpoint": config.disk_endpoint, "aws_region": "us-east-1"} if config.disk_endpoint else None


def open_storage(config: DiskConfig, identity: Mapping[str, str], golden: str) -> Storage:
    """The storage of what engines with this identity write. golden: a digest of the bits of a short prefill here.

    Where another engine writes to the directory, or nobody can, it is opened read-only, which is said in the log. What was written with
    another golden digest is removed. Raises StorageError where nothing can be opened.
    """
    try:
        return _opened(config, identity, golden)
    except StorageError as error:
        if "://" in config.disk_cache:
            raise
        try:
            return _opened(config, identity, golden, read_only=True, why=error)
        except StorageError:
            raise error from None


def _opened(config: DiskConfig, identity: Mapping[str, str], golden: str, read_only: bool = False, why: StorageError | None = None) -> Storage:
    options = bucket_options(config)
    storage = Storage.open(config.disk_cache, identity, read_only=read_only, options=options)
    if why is not None:
        log.warning("%s: its entries are read, and nothing is written", why)
    try:
        return _checked(storage, golden, config, identity, options)
    except BaseException:
        storage.close()
        raise


def _checked(storage: Storage, golden: str, config: DiskConfig, identity: Mapping[str, str], options) -> Storage:
    """The storage, emptied where its bits are others than this engine's."""
    found = storage.find(GOLDEN)
    was = None if found is None else found.fields.get("bits")
    if was == golden:
        return storage
    if found is not None:
        log.warning("%s was written by an engine of other bits (golden digest %s, here %s)", config.disk_cache, was, golden)
    elif storage.entries():
        what = "damaged" if GOLDEN in storage.damaged else "missing"
        log.warning("%s: the golden entry is %s, so that nothing tells whether its bits are the ones computed here", config.disk_cache, what)
    if found is not None or storage.entries():
        if storage.read_only or storage.shared:
            storage.close()
            return Storage.open(config.disk_cache, {**identity, "golden": golden}, read_only=storage.read_only, options=options)
        for key in storage.entries():
            storage.drop(key)
    if not storage.read_only:
        storage.put(GOLDEN, {}, bits=golden)
    return storage
