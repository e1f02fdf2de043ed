"""Staging: keys, zeros past the rows, what is there already, and what a sequence of two levels has in common."""

import numpy as np
import pytest

from qjax.caches.anchors import Anchor
from qjax.caches.nvme.filed import DISK, IDS, LOGITS, SPILL, TOKENS
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.staging import Staging
from qjax.caches.nvme.writer import Writer
from qjax.config import GRID, TOKEN
from qjax.pages import PagePool
from storage import Storage
from tests.bits import assert_bits_equal
from tests.caches.filed import chain
from tests.caches.snapshots import LAYOUT, made
from tests.models import prompt

PAGE_BYTES = LAYOUT.page_bytes + 12 * 64


class Stage:
    def __init__(self, root, level, limit=1 << 30):
        self.pool, self.storage = PagePool(LAYOUT, 8), Storage.open(root, {})
        self.index = Index(self.storage, 64)
        self.writer = Writer(self.storage, limit, lambda nbytes: True)
        self.staging = Staging(self.pool, self.index, self.writer, level)

    def sequence(self, tokens):
        sequence = made(self.pool, tokens)
        return sequence.replace(stamps=self.pool.stamps[sequence.pages])

    def pages(self, sequence, use, tenant="", keys=None) -> list[str]:
        of = chain(sequence.tokens if keys is None else keys, tenant)
        length = sequence.tokens.size
        return [self.staging.page(of, sequence.tokens, length, number, int(page), use) for number, page in enumerate(sequence.pages)]

    def read(self, key) -> dict[str, np.ndarray]:
        self.writer.drain()
        arrays = self.storage.find(key).empty()
        assert self.storage.get([(key, arrays)]) == 1
        return arrays

    def close(self):
        self.writer.close()
        self.storage.close()


@pytest.fixture(params=[TOKEN, GRID])
def stage(request, tmp_path):
    stage = Stage(tmp_path, request.param)
    yield stage
    stage.close()


@pytest.mark.parametrize("use", [DISK, SPILL])
def test_a_page_is_its_rows_ids_and_tokens(stage, use):
    """Full, and with 17 rows: zeros past them, whatever lies there in the pool."""
    tokens = prompt(81)
    keys = tokens.astype(np.int64) + 2**40
    sequence = stage.sequence(tokens)
    last = int(sequence.pages[1])
    rows = {name: np.array(a) for name, a in stage.pool.read_page(last).items()}
    dirty = {name: np.where(np.arange(64)[:, None] < 17, a, 9).astype(a.dtype) for name, a in rows.items()}
    stage.pool.write_page(last, dirty, 17)
    found = [stage.read(key) for key in stage.pages(sequence, use, keys=keys)]
    full = {name: np.array(a) for name, a in stage.pool.read_page(int(sequence.pages[0])).items()}
    assert_bits_equal(found[0], full | {IDS: keys[:64], TOKENS: tokens[:64]})
    padded = {IDS: np.append(keys[64:], np.zeros(47, np.int64)), TOKENS: np.append(tokens[64:], np.zeros(47, np.int32))}
    assert_bits_equal(found[1], rows | padded)
    assert all(a[:, :, 17:].any() for a in dirty.values())


def test_keys_are_of_the_chain_or_of_the_content(stage):
    """Of the chain at level token, and what the disk tier writes at level grid: prefilled rows alone. A tenant's are its own there."""
    sequence = stage.sequence(prompt(64))
    (disk,), (spill,) = (stage.pages(sequence, use) for use in (DISK, SPILL))
    assert disk == chain(prompt(64)).page(0, 64)
    by_content = stage.staging.by_content(SPILL)
    assert (spill == disk) != by_content
    assert stage.pages(sequence, DISK, "b") != [disk]
    assert (stage.pages(sequence, SPILL, "b") == [spill]) == by_content
    other = stage.sequence(prompt(64))
    stage.pool.write_page(int(other.pages[0]), {name: np.asarray(a) + 1 for name, a in stage.pool.read_page(int(other.pages[0])).items()}, 64)
    assert stage.pages(other, DISK) == [disk]  # equal tokens are equal rows
    assert (stage.pages(other, SPILL) == [spill]) != by_content


def test_what_is_there_or_on_its_way_is_not_staged_again(stage, monkeypatch):
    sequence = stage.sequence(prompt(150))
    keys = stage.pages(sequence, DISK)
    assert stage.pages(sequence, DISK) == keys
    stage.writer.drain()
    assert stage.pages(sequence, DISK) == keys
    stage.writer.drain()
    assert stage.writer.counts["written"] == 3


def test_pages_are_kept_as_long_as_they_are_wanted(stage):
    """Three were staged, and an anchor over two of them: the third goes."""
    sequence = stage.sequence(prompt(150))
    of, pages = chain(prompt(150)), stage.pages(sequence, DISK)
    stage.writer.drain()
    assert (stage.index.stats()["pages"], stage.index.bytes(DISK)) == (3, 3 * PAGE_BYTES)
    key = stage.staging.anchor(of, Anchor("grid", sequence.cut(128, 64)), pages[:2], DISK)
    stage.writer.drain()
    stage.staging.let_go(pages)
    assert set(stage.storage.entries()) == {key, *pages[:2]}
    assert stage.index.bytes(DISK) == 2 * PAGE_BYTES + LAYOUT.section_bytes


def test_without_room_nothing_is_staged(tmp_path):
    stage = Stage(tmp_path, TOKEN, limit=PAGE_BYTES)
    try:
        with stage.writer._room:  # no thread comes to its end
            assert [key is None for key in stage.pages(stage.sequence(prompt(150)), DISK)] == [False, True, True]
            assert stage.writer.staged == PAGE_BYTES
    finally:
        stage.close()


def test_an_anchor_with_its_logits_beside_one_without(tmp_path):
    """D2: the same length, first inside a longer prompt and then as a prompt's end."""
    stage = Stage(tmp_path, TOKEN)
    try:
        tokens, logits = prompt(128), np.arange(50, dtype=np.float32)
        sequence, of = stage.sequence(tokens), chain(tokens)
        pages = stage.pages(sequence, SPILL)
        plain = stage.staging.anchor(of, Anchor("grid", sequence), pages, SPILL)
        whole = stage.staging.anchor(of, Anchor("prompt", sequence, logits), pages, SPILL)
        assert plain == f"a-{of.at(128)}" != whole
        assert stage.staging.anchor(of, Anchor("prompt", sequence, logits), pages, SPILL) == whole
        assert stage.staging.anchor(of, Anchor("grid", sequence), pages, SPILL) == plain
        assert np.array_equal(stage.read(whole)[LOGITS], logits)
        filed, found = stage.index.find(of, TOKEN)
        assert (filed.key, found.whole) == (whole, True)
    finally:
        stage.close()
