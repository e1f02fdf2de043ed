"""After damage in many entries at once: one cold run writes all of it anew, and from the next start on it serves as before."""

import shutil

import pytest

from qjax.caches.nvme.chain import Chain
from tests.equivalence.nvme import joined, recount, started
from tests.equivalence.nvme_damage import DAMAGE, assert_cold, file, keys, there, warnings
from tests.equivalence.test_nvme_faults import ANCHORS, HEAD, PAGES
from tests.equivalence.test_resident import answer
from tests.models import prompt

OTHER = prompt(200, seed=4)
ASKED = joined(HEAD[:250], prompt(50, seed=9))
"""Agrees with what was written past its third line, 192; the states of the conversation are past where they part."""


@pytest.fixture(scope="module")
def written(tiny_engine, tmp_path_factory):
    """Heads and conversations of two prompts; that of the second one is read back."""
    directory = tmp_path_factory.mktemp("written")
    with started(tiny_engine, directory):
        for tokens in (HEAD, OTHER):
            answer(tiny_engine, tokens, user=tokens.size)
    return directory


def test_one_cold_run_heals(tiny_engine, written, tmp_path, caplog):
    """A conversation over the same pages, which the prompt cannot start on, kept them in the index: what stands on them was not written."""
    directory = shutil.copytree(written, tmp_path / "states")
    with started(tiny_engine, shutil.copytree(written, tmp_path / "control")):
        assert assert_cold(tiny_engine, ASKED, user=ASKED.size).start == 192  # the control
    for key in PAGES[1:4] + ANCHORS[1:4]:
        DAMAGE["first bit"](file(directory, key, "K" if key.startswith("p-") else "section.gdn.S"))
    with started(tiny_engine, directory) as caches:
        record = assert_cold(tiny_engine, ASKED, user=ASKED.size)
        assert (record.source, record.why) == ("cold", "damaged")
        recount(caches, directory)
    assert {*PAGES[1:4], *ANCHORS[1:4]} <= keys(directory)
    caplog.clear()
    with started(tiny_engine, directory) as caches:
        record = assert_cold(tiny_engine, ASKED, user=ASKED.size)
        assert (record.source, record.start, record.failed, warnings(caplog)) == ("spill", ASKED.size, [], [])
        caches.clear()
        assert assert_cold(tiny_engine, joined(ASKED[:230], OTHER[:70])).start == 192
        caches.nvme.drain()
        storage = caches.nvme.storage
        assert all(storage.get([(key, entry.empty())]) for key, entry in storage.entries().items())
        recount(caches, directory)


def test_a_conversation_that_cannot_be_read_back_takes_what_stands_on_its_pages(tiny_engine, written, tmp_path, caplog):
    """The heads over a damaged page go with it, at the start: no request finds it a second time."""
    directory = shutil.copytree(written, tmp_path / "states")
    page = Chain(OTHER.astype("int64"), "", 64).page(0, OTHER.size)
    DAMAGE["first bit"](file(directory, page, "K"))
    with started(tiny_engine, directory) as caches:
        assert caches.resident.resident is None
        assert page not in there(directory)
        record = assert_cold(tiny_engine, OTHER, user=OTHER.size)
        assert (record.source, record.why, record.failed) == ("cold", "damaged", [])
        recount(caches, directory)
    with started(tiny_engine, directory):
        assert assert_cold(tiny_engine, OTHER, user=OTHER.size).source == "spill"
