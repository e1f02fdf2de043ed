"""Requests that break off on what came from NVMe: what is unusable goes, what is good stays, and nothing is held."""

import shutil

import numpy as np
import pytest

from qjax.pages import PoolFull
from qjax.slot import Slot
from tests.equivalence.nvme import started
from tests.equivalence.nvme_damage import assert_cold, keys, there, warnings, write_conversation, write_heads
from tests.equivalence.test_nvme_faults import ANCHORS, ASKED, HEAD, NOTHING_WRITTEN, PAGES
from tests.equivalence.test_resident import answer
from tests.models import prompt

WHOLE = HEAD[:256]


@pytest.fixture(scope="module")
def heads(tiny_engine, tmp_path_factory):
    """Heads of a prompt that ends on its last line, so that its last anchor has logits."""
    return write_heads(tiny_engine, tmp_path_factory.mktemp("heads"), WHOLE)


@pytest.fixture(scope="module")
def conversation(tiny_engine, tmp_path_factory):
    return write_conversation(tiny_engine, tmp_path_factory.mktemp("conversation"), HEAD)


@pytest.fixture
def directory(heads, tmp_path):
    return shutil.copytree(heads, tmp_path / "states")


def broken(monkeypatch, method: str, error: BaseException, times: int = 1) -> None:
    """The next forwards raise."""
    forward, left = getattr(Slot, method), [times]

    def raising(*arguments, **named):
        if left[0]:
            left[0] -= 1
            raise error
        return forward(*arguments, **named)

    monkeypatch.setattr(Slot, method, raising)


@pytest.mark.parametrize("method", ["prefill", "step"])
def test_d3_a_state_that_cannot_be_gone_on_from(tiny_engine, directory, caplog, monkeypatch, method):
    """D3: the first forward after the restore raises: the entry is gone, in one line, and a client that tries again gets on."""
    tokens = np.concatenate([WHOLE, prompt(100 if method == "prefill" else 20, seed=9)])
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        broken(monkeypatch, method, RuntimeError("no such state"), times=3)
        for number in (4, 3, 2):
            with pytest.raises(RuntimeError, match="no such state"):
                answer(tiny_engine, tokens)
            record = caches.ledger.records[-1]
            assert (record.source, record.start, record.finish) == ("disk", 64 * number, "failed")
            assert ANCHORS[number] not in there(directory)
            assert len(warnings(caplog)) == 5 - number
            assert tiny_engine.pool.free == tiny_engine.pool.pages
        assert f"entry {ANCHORS[4]} is removed: a request could not go on from it" in warnings(caplog)[0]
        record = assert_cold(tiny_engine, tokens)
        assert (record.source, record.start) == ("disk", 64)
        assert caches.nvme.stats()["damaged"] == 3


def test_d3_d2_with_no_token_to_read(tiny_engine, directory, caplog, monkeypatch):
    """D3, D2: the whole prompt was restored, and the first forward is the answer's."""
    with started(tiny_engine, directory, **NOTHING_WRITTEN) as caches:
        broken(monkeypatch, "step", RuntimeError("no such state"))
        generation = tiny_engine.generate(WHOLE, max_tokens=5)
        with pytest.raises(RuntimeError, match="no such state"):
            list(generation)
        tiny_engine.release(generation.sequence)
        record = caches.ledger.records[-1]
        assert (record.source, record.start, record.finish, generation.finish) == ("disk", 256, "failed", "failed")
        assert caches.resident.sessions == []
        assert ANCHORS[4] not in there(directory)
        assert len(warnings(caplog)) == 1
        record = assert_cold(tiny_engine, WHOLE)
        assert (record.source, record.start) == ("disk", 192)


def test_d3_a_conversation_that_was_read_back(tiny_engine, conversation, tmp_path, caplog, monkeypatch):
    """D3: it lies in the pool, and would be found there for ever."""
    kept, turn = conversation
    directory = shutil.copytree(kept, tmp_path / "states")
    with started(tiny_engine, directory, disk_min_tokens=10**6) as caches:
        broken(monkeypatch, "prefill", RuntimeError("no such state"))
        broken(monkeypatch, "step", RuntimeError("no such state"))
        with pytest.raises(RuntimeError, match="no such state"):
            answer(tiny_engine, turn)
        assert (caches.ledger.records[-1].source, caches.resident.sessions) == ("spill", [])
        assert len(warnings(caplog)) == 1
        assert not keys(directory, "[pas]-")
        monkeypatch.undo()
        assert assert_cold(tiny_engine, turn).source == "cold"


def test_no_page_is_no_fault_of_the_entry(tiny_engine, directory, caplog, monkeypatch):
    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        broken(monkeypatch, "step", PoolFull("none is left"))
        with pytest.raises(PoolFull):
            answer(tiny_engine, ASKED[:270])
        assert warnings(caplog) == []
        assert {*PAGES[1:5], *ANCHORS[1:5]} <= there(directory)
        record = assert_cold(tiny_engine, ASKED[:270])
        assert (record.source, record.start) == ("disk", 256)


@pytest.mark.parametrize("which", ["progress", "cancel"])
@pytest.mark.parametrize("tokens", [ASKED, WHOLE], ids=["prompt", "answer"])
def test_an_error_of_the_callers_is_no_fault_of_the_entry(tiny_engine, directory, caplog, which, tokens):
    """A client that has gone away, before the first forward: in the prompt, or in the answer to one that was restored whole."""

    def gone(*_):
        raise BrokenPipeError("nobody listens")

    with started(tiny_engine, directory, **NOTHING_WRITTEN):
        generation = tiny_engine.generate(tokens, max_tokens=5, **{which: gone})
        with pytest.raises(BrokenPipeError):
            list(generation)
        if generation.sequence is not None:
            tiny_engine.release(generation.sequence)
        assert warnings(caplog) == []
        assert {*PAGES[1:5], *ANCHORS[1:5]} <= there(directory)
        assert tiny_engine.caches.ledger.records[-1].source == "disk"
        assert assert_cold(tiny_engine, ASKED).start == 256


def test_what_did_not_end_is_no_measure_of_a_prefill(tiny_engine, directory, monkeypatch):
    """Cancelled and failed prefills took no time that counts: else the tier would seem slower than any prefill, and be silent from then on."""
    with started(tiny_engine, directory, rates=True, **NOTHING_WRITTEN) as caches:
        rates = caches.nvme.rates
        answer(tiny_engine, prompt(200, seed=3))
        before = rates.stats()["prefill_tokens_per_s"]
        assert before > 0
        run = tiny_engine.generate(prompt(300, seed=4), max_tokens=5, cancel=iter([False, True, True]).__next__)
        list(run)
        tiny_engine.release(run.sequence)
        assert run.finish == "cancelled"
        broken(monkeypatch, "prefill", RuntimeError("broken"))
        with pytest.raises(RuntimeError, match="broken"):
            answer(tiny_engine, prompt(300, seed=5))
        assert rates.stats()["prefill_tokens_per_s"] == before
        answer(tiny_engine, prompt(300, seed=6))
        assert rates.stats()["prefill_tokens_per_s"] != before  # the control
