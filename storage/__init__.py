"""storage: named arrays under content keys, in files that are checked when read; knows numpy, tensorstore and bytes, and imports nothing of qjax.

    with Storage.open(directory, {"weights": digest, "jax": version}) as store:
        store.put(key, {"K": k, "V": v}, tokens=1024)
        store.get([(key, {"K": buffer[:, :1024], "V": other})])   # 1: they hold what was written; 0: they do not

`Storage` has the contract, `directory.py` the layout of the files, `arrays.host` memory that a device can share.
"""

from storage.arrays import Leaf, host
from storage.entry import Entry
from storage.errors import Full, Locked, StorageError
from storage.present import fingerprints
from storage.storage import Storage

__all__ = ["Entry", "Full", "Leaf", "Locked", "Storage", "StorageError", "fingerprints", "host"]
