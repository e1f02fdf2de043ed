"""What the session spill writes, and what it does not write again."""

import numpy as np
import pytest

from qjax.caches.nvme import spill as spilling
from qjax.caches.nvme.filed import ANCHOR, IDS, PAGE, SESSION, TOKENS
from qjax.config import GRID, TOKEN
from tests.equivalence.nvme import GB, SESSIONS, Written, assert_restored, joined, on_disk, recount, started
from tests.equivalence.test_resident import answer, followed
from tests.models import prompt

pytestmark = pytest.mark.usefixtures("level")


def test_what_did_not_change_is_not_written_again(tiny_engine, memory_path, monkeypatch):
    """A second stop writes nothing; one after a further turn the new pages only, the last one of before being a new one."""
    tokens = prompt(300)
    with started(tiny_engine, memory_path, **SESSIONS):
        _, generated, _ = answer(tiny_engine, tokens)
    written = Written(monkeypatch)
    with started(tiny_engine, memory_path, **SESSIONS):
        pass
    assert written.keys == []
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        answer(tiny_engine, followed(tokens, generated, prompt(100, seed=9)))  # 304 tokens, and then more than 404
        length = caches.resident.resident.length
    assert (written.of(PAGE), written.of(SESSION)) == (3, 1)
    assert written.of(ANCHOR) == 4  # 320, 384, the prompt's end and the answer's
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        assert [s.length for s in caches.nvme.index.sessions.values()] == [length]
        recount(caches, memory_path)


def test_control_pages_that_changed_are_written(tiny_engine, memory_path, monkeypatch):
    with started(tiny_engine, memory_path, **SESSIONS):
        answer(tiny_engine, prompt(300))
    written = Written(monkeypatch)
    with started(tiny_engine, memory_path, **SESSIONS):
        answer(tiny_engine, joined(prompt(100), prompt(200, seed=1)))
    assert written.of(PAGE) == 4


def test_at_level_token_the_disk_tier_and_the_spill_share_files(tiny_engine, memory_path, level, monkeypatch):
    """At level grid the spill has its own, by the sum of their bytes."""
    written = Written(monkeypatch)
    with started(tiny_engine, memory_path) as caches:
        answer(tiny_engine, prompt(300))
        caches.nvme.drain()
        assert (written.of(PAGE), written.of(ANCHOR)) == (4, 4)
    assert (written.of(PAGE), written.of(ANCHOR)) == ((5, 6) if level == TOKEN else (9, 8))


def test_the_newest_anchors_and_one_in_a_while(tiny_engine, memory_path, monkeypatch):
    """The newest four, and one for every EVERY tokens."""
    for every, older, start in ((10_000, [], 0), (128, [128, 256], 128)):
        monkeypatch.setattr(spilling, "EVERY", every)
        with started(tiny_engine, memory_path / str(every), **SESSIONS):
            answer(tiny_engine, prompt(400))
        with started(tiny_engine, memory_path / str(every), **SESSIONS) as caches:
            assert [a.length for a in caches.resident.resident.anchors] == [*older, 320, 384, 400, 404]
            assert_restored(tiny_engine, joined(prompt(210), prompt(20, seed=1)), *(("spill", start) if start else ("cold", 0)))


def test_what_a_session_is_survives(tiny_engine, memory_path, level):
    """Tenant, history, turns, the kinds of its anchors and their taint."""

    def told(session):
        anchors = [(a.kind, a.length, a.tainted, a.logits is not None) for a in session.anchors]
        return session.tenant, session.history, session.turns, session.length, session.keys.tolist(), anchors

    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        tokens = prompt(300)
        _, generated, _ = answer(tiny_engine, tokens, tenant="ü\ud800", history=290)
        tokens = followed(tokens, generated, prompt(50, seed=9))
        answer(tiny_engine, tokens, tenant="ü\ud800", history=340)
        caches.resident.resident.anchors[:] = spilling.chosen(caches.resident.resident.anchors)
        before = told(caches.resident.resident)
    assert before[:4] == ("ü\ud800", 340, 2, 358)
    assert [tainted for _, _, tainted, _ in before[5]][-1] == (level == GRID)
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        assert told(caches.resident.resident) == before


def test_a_page_that_is_not_full_has_zeros_past_its_rows(tiny_engine, memory_path):
    """In the pool there may be others: those of a longer prompt that was cut back."""
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        _, generated, _ = answer(tiny_engine, prompt(290), max_tokens=3)
        (session,) = caches.resident.sessions
        last, n = session.pages[-1], session.length - 256
        assert n == 36
        rows = {name: np.array(rows) for name, rows in tiny_engine.pool.read_page(last, 64).items()}
        for one in rows.values():
            one[:, :, n:] = 9
        tiny_engine.pool.write_page(last, rows, n)
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        (filed,) = caches.nvme.index.sessions.values()
        arrays = caches.nvme.reader.page(filed.pages[-1], 0)
        for view in tiny_engine.layout.views:
            assert arrays[view.name][:, :, :n].any()
            assert not arrays[view.name][:, :, n:].any()
        for name in (IDS, TOKENS):
            assert arrays[name].tolist() == [*prompt(290)[256:], *generated[:2], *[0] * 28]


def test_a_parked_session_without_its_end_is_written_as_far_as_it_goes(tiny_engine, memory_path):
    """The park's budget had room for two anchors. Tokens past the last one were once written as zeros, in pages that others then stood on."""
    layout, tokens = tiny_engine.layout, prompt(380)
    with started(tiny_engine, memory_path, caches={"resident_park_gb": 2.2 * layout.section_bytes / GB}, **SESSIONS) as caches:
        _, generated, _ = answer(tiny_engine, tokens)
        answer(tiny_engine, prompt(200, seed=1))
        (parked,) = [s for s in caches.resident.sessions if s.role == "parked"]
        last = parked.anchors[-1].length
        assert (parked.length, last) == (384, 320)
    with started(tiny_engine, memory_path) as caches:
        assert sorted(s.length for s in caches.nvme.index.sessions.values()) == [204, 320]
        assert_restored(tiny_engine, followed(tokens, generated, prompt(20, seed=9)), "spill", last)
    with started(tiny_engine, memory_path):
        assert_restored(tiny_engine, followed(tokens, generated, prompt(20, seed=8)), "spill", 384)


def test_a3_a_session_without_a_state_is_not_written(tiny_engine, memory_path):
    """A3: rows alone are no state."""
    with started(tiny_engine, memory_path, **SESSIONS) as caches:
        answer(tiny_engine, prompt(300))
        caches.resident.resident.anchors.clear()
        assert not caches.nvme.spill(caches.resident.resident, 1.0)
        assert caches.nvme.stats()["spilled"] == 0
    assert on_disk(memory_path) == {}
    with started(tiny_engine, memory_path, **SESSIONS):
        assert_restored(tiny_engine, prompt(300), "cold", 0)
