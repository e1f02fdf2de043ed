"""Damaged files on NVMe: the answer is a cold run's, the bad entry is gone with what stands on it, shorter ones serve, and it is said once.

E4 (reported faults): a bit in each section, truncation, zero length; A7: a missing section refuses the whole hit. The storage's own tests
(tests/storage/test_damage.py) have more ways to damage a file; here is what an engine makes of them.
"""

import shutil

import numpy as np
import pytest

from qjax.config import GRID, TOKEN
from tests.equivalence.nvme import started
from tests.equivalence.nvme_damage import (
    DAMAGE,
    assert_cold,
    entry,
    file,
    keys,
    leaves,
    line_keys,
    read,
    there,
    warnings,
    write_conversation,
    write_heads,
)
from tests.equivalence.test_resident import answer
from tests.models import prompt

HEAD = prompt(300)
PAGES, ANCHORS = line_keys(HEAD)
ASKED = np.concatenate([HEAD[:280], prompt(20, seed=9)])
"""Agrees with what was written past its fourth line, 256."""
NOTHING_WRITTEN = {"session_spill": False, "disk_min_tokens": 10**6}
PAGE_LEAVES, SECTIONS = ["K", "V", "ids", "tokens"], ["section.gdn.S", "section.gdn.conv"]
OPEN = ["open.gdn.a", "open.gdn.b", "open.gdn.u"]


@pytest.fixture(scope="module")
def heads(tiny_engine, tmp_path_factory):
    """A directory with pages and anchors at the first four lines of a prompt, and a book."""
    directory = write_heads(tiny_engine, tmp_path_factory.mktemp("heads"), HEAD)
    assert keys(directory, "[pa]-") == {*PAGES[1:5], *ANCHORS[1:5]}
    return directory


@pytest.fixture(scope="module", params=[TOKEN, GRID])
def level(request, tiny_engine):
    tiny_engine.level = request.param
    yield request.param
    tiny_engine.level = TOKEN


@pytest.fixture(scope="module")
def conversation(tiny_engine, level, tmp_path_factory):
    """(directory with a conversation and no heads, its next turn)."""
    return write_conversation(tiny_engine, tmp_path_factory.mktemp("conversation"), HEAD)


@pytest.fixture
def directory(heads, tmp_path):
    return shutil.copytree(heads, tmp_path / "heads")


def test_without_damage(tiny_engine, directory, caplog):
    """The control of all that follow: the longest one serves, and nothing is said."""
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start, record.failed) == ("disk", 256, [])
        assert (warnings(caplog), caches.nvme.stats()["damaged"]) == ([], 0)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", PAGE_LEAVES)
def test_a_damaged_page(tiny_engine, directory, caplog, name, damage):
    """Of the third line: it goes with the fourth, the second serves, and what is read again is written again."""
    assert leaves(directory, PAGES[3]) == PAGE_LEAVES
    DAMAGE[damage](file(directory, PAGES[3], name))
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start, record.why) == ("disk", 128, "damaged")
        assert record.failed == [f"nvme: {PAGES[3]} is damaged or gone"]
        (line,) = warnings(caplog)
        assert f"entry {PAGES[3]} cannot be used and is removed: {name}: " in line
        assert there(directory) & {*PAGES, *ANCHORS} == {*PAGES[1:3], *ANCHORS[1:3]}
        assert (caches.nvme.stats()["damaged"], sum(caches.nvme.stats()["storage_damaged"].values())) == (1, 1)
        caches.clear()
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start, record.failed) == ("disk", 128, [])
        assert len(warnings(caplog)) == 1
    with started(tiny_engine, directory) as caches:
        answer(tiny_engine, HEAD, user=HEAD.size)
        caches.nvme.drain()
        caches.clear()
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start) == ("disk", 256)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", SECTIONS)
def test_a_damaged_anchor(tiny_engine, directory, caplog, name, damage):
    """Of the third line: the fourth has its own and goes on serving; without it the second serves."""
    assert leaves(directory, ANCHORS[3]) == SECTIONS
    DAMAGE[damage](file(directory, ANCHORS[3], name))
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        assert assert_cold(tiny_engine, ASKED).start == 256
        caches.clear()
        record = assert_cold(tiny_engine, ASKED[:250])
        assert (record.source, record.start, record.failed) == ("disk", 128, [f"nvme: {ANCHORS[3]} is damaged or gone"])
        (line,) = warnings(caplog)
        assert f"entry {ANCHORS[3]} cannot be used and is removed: {name}: " in line
        assert there(directory) & {*PAGES, *ANCHORS} == {*PAGES[1:5], *ANCHORS[1:5]} - {ANCHORS[3]}
        assert caches.nvme.stats()["damaged"] == 1


@pytest.mark.parametrize("damage", ["first bit", "last byte", "a byte short", "zero length"])
@pytest.mark.parametrize("what", ["page", "anchor"])
def test_a_damaged_meta(tiny_engine, directory, caplog, what, damage):
    """Found at the start; of a page with the anchors over it."""
    key, gone = (PAGES[3], {*PAGES[3:], *ANCHORS[3:]}) if what == "page" else (ANCHORS[4], {PAGES[4], ANCHORS[4]})
    DAMAGE[damage](file(directory, key, "meta"))
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        line, *more = warnings(caplog)
        assert f"entry {key} cannot be used and is removed: meta: " in line
        told = f"{directory}: found unusable at the start and removed: 1 damaged, 2 that lack what they stand on"
        assert more == ([told] if what == "page" else [])
        assert there(directory) & {*PAGES, *ANCHORS} == {*PAGES[1:5], *ANCHORS[1:5]} - gone
        assert caches.nvme.stats()["storage_damaged"] == {"meta": 1}
        record = assert_cold(tiny_engine, ASKED)
        assert (record.source, record.start) == ("disk", 128 if what == "page" else 192)


@pytest.mark.parametrize(
    ("name", "damage"), [*((name, damage) for name in ("lines", "counts") for damage in DAMAGE), ("meta", "first bit"), ("meta", "zero length")]
)
def test_a_damaged_book(tiny_engine, directory, caplog, name, damage):
    """What it counted is forgotten, and no more: lines are counted anew, and so is the next book."""
    (book,) = keys(directory, "b-")
    DAMAGE[damage](file(directory, book, name))
    with started(tiny_engine, directory, session_spill=False) as caches:
        (line,) = warnings(caplog)
        assert f"entry {book} cannot be used and is removed: {name}: " in line
        assert not caches.nvme._admission._counts
        assert assert_cold(tiny_engine, ASKED).start == 256
        assert_cold(tiny_engine, prompt(130, seed=5))
    with started(tiny_engine, directory, session_spill=False) as caches:
        assert len(caches.nvme._admission._counts) == 2
    assert len(warnings(caplog)) == 1


def test_a_missing_golden_digest(tiny_engine, directory, caplog):
    """The same, in one line: that it is missing is all that is known."""
    shutil.rmtree(entry(directory, "golden"))
    with started(tiny_engine, directory, session_spill=False):
        (line,) = warnings(caplog)
        assert line == f"{directory}: the golden entry is missing, so that nothing tells whether its bits are the ones computed here"
        assert there(directory) == {"golden"}
        assert assert_cold(tiny_engine, HEAD, user=HEAD.size).source == "cold"


@pytest.mark.parametrize("damage", ["first bit", "zero length"])
def test_a_damaged_golden_digest(tiny_engine, directory, caplog, damage):
    """Nothing tells any more whose bits these are: all of it goes, in two lines, and the next start finds its own again."""
    DAMAGE[damage](file(directory, "golden", "meta"))
    with started(tiny_engine, directory, session_spill=False) as caches:
        first, second = warnings(caplog)
        assert "entry golden cannot be used and is removed: meta: " in first
        assert second.endswith(": the golden entry is damaged, so that nothing tells whether its bits are the ones computed here")
        assert there(directory) == {"golden"}
        assert assert_cold(tiny_engine, HEAD, user=HEAD.size).source == "cold"
        caches.nvme.drain()
    with started(tiny_engine, directory, session_spill=False):
        assert assert_cold(tiny_engine, ASKED).start == 256
    assert len(warnings(caplog)) == 2


def test_every_bit_at_the_edges_of_a_page(tiny_engine, directory):
    """The outermost bits of the first and of the last byte of each array of the first page: a cold answer, every time."""
    whole = directory.with_name("whole")
    shutil.copytree(directory, whole)
    for name in PAGE_LEAVES:
        for at, bit in ((0, 1), (-1, 128)):
            shutil.rmtree(directory)
            shutil.copytree(whole, directory)
            path = file(directory, PAGES[1], name)
            data = bytearray(path.read_bytes())
            data[at] ^= bit
            path.write_bytes(data)
            with started(tiny_engine, directory, **NOTHING_WRITTEN):
                record = assert_cold(tiny_engine, ASKED)
                assert (record.source, record.failed) == ("cold", [f"nvme: {PAGES[1]} is damaged or gone"])
                assert there(directory) & {*PAGES, *ANCHORS} == set()


def spilled(directory, length: int) -> str:
    """The key of a conversation's anchor at a length."""
    (found,) = (key for key in keys(directory, "a-") if read(directory, key).fields["length"] == length)
    return found


def test_a_conversation_without_damage(tiny_engine, conversation, tmp_path, caplog):
    """The control: it is read back at the start, and goes on where it ended."""
    kept, turn = conversation
    with started(tiny_engine, shutil.copytree(kept, tmp_path / "conversation"), **NOTHING_WRITTEN | {"session_spill": True}):
        record = assert_cold(tiny_engine, turn)
        assert (record.source, record.start, warnings(caplog)) == ("spill", 304, [])


PARTS = [*SECTIONS, *OPEN, "logits", "meta", "page", "page ids", "session"]
MORE = [(name, damage) for name in ("section.gdn.S", "page", "meta") for damage in ("a byte short", "gone")]


@pytest.mark.parametrize(("name", "damage"), [*((name, damage) for name in PARTS for damage in ("first bit", "last byte")), *MORE])
def test_a_damaged_conversation(tiny_engine, conversation, level, tmp_path, caplog, name, damage):
    """Its end, at 304, has its own sections, open inputs and page; what is below serves, and nothing of it is kept twice."""
    kept, turn = conversation
    directory = shutil.copytree(kept, tmp_path / "conversation")
    end = spilled(directory, 304)
    assert leaves(directory, end) == sorted([*SECTIONS, *OPEN, "logits"])
    (session,) = keys(directory, "s-")
    page = read(directory, end).fields["pages"][-1]
    key, leaf = {"page": (page, "K"), "page ids": (page, "ids"), "session": (session, "meta")}.get(name, (end, name))
    if leaf == "meta" and damage == "gone":
        (entry(directory, key) / "meta").unlink()
    else:
        DAMAGE[damage](file(directory, key, leaf))
    with started(tiny_engine, directory, **NOTHING_WRITTEN | {"session_spill": True}) as caches:
        record = assert_cold(tiny_engine, turn)
        starts = {"session": 304, "page": 256, "page ids": 256}
        assert (record.source, record.start) == ("spill", starts.get(name, 300 if level == TOKEN else 256))
        lines = warnings(caplog)
        assert len(lines) == 1, lines
        assert (": found unusable at the start and removed: 1 unfinished" if leaf == "meta" and damage == "gone" else key) in lines[0]
        assert key not in there(directory)
        assert not caches.nvme.index._in_use
        caches.clear()
        assert_cold(tiny_engine, turn)
        assert len(warnings(caplog)) == len(lines)
