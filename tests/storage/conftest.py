"""A private directory for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import Storage
from tests.storage.content import FINGERPRINT


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(root) -> Iterator[Callable[..., Storage]]:
    """Opens the directory; a storage that the test does not close is closed behind it."""
    stores = []

    def opened(fingerprint=FINGERPRINT, **arguments) -> Storage:
        stores.append(Storage.open(root, fingerprint, **arguments))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()
