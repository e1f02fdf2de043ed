"""Warm against cold where the pool has the head of what is restored: its pages are held, the others are read, every bit is a cold run's."""

import numpy as np
import pytest

from qjax.caches.nvme.restore import Reader
from qjax.caches.tier import Unusable
from qjax.config import GRID
from qjax.pages import PagePool
from qjax.parallel import Parallel
from tests.bits import assert_bits_equal
from tests.equivalence.nvme import HEADS, SESSIONS, assert_restored, joined, same_state, started
from tests.equivalence.nvme_damage import DAMAGE, file, keys, line_keys
from tests.equivalence.test_grid import bits, cold_state, prompt_state
from tests.equivalence.test_resident import answer, cold, followed
from tests.impure import impure_steps
from tests.models import prompt
from tests.runs import kept

ASKED = prompt(300)
OTHER = joined(ASKED[:150], prompt(100, seed=8))
"""Parts from it inside the third page: the first two are the same."""
PAGES, ANCHORS = line_keys(ASKED)
READ_ONLY = {**HEADS, "disk_min_tokens": 4096}


@pytest.fixture
def directory(tiny_engine, level, tmp_path):
    """With an anchor at 256 and the four pages below it."""
    with started(tiny_engine, tmp_path, **HEADS):
        answer(tiny_engine, ASKED)
    return tmp_path


class Read:
    """Keys of pages that are read, as they come."""

    def __init__(self, monkeypatch):
        self.keys: list[str] = []
        page = Reader.page

        def counted(reader, key, number):
            self.keys.append(key)
            return page(reader, key, number)

        monkeypatch.setattr(Reader, "page", counted)


def in_memory(engine, caches, tokens=OTHER, **more) -> list[int]:
    """Has a prompt in the pool that was computed there: its answer."""
    caches.nvme.find = lambda keys, tenant: None
    _, generated, _ = answer(engine, tokens, **more)
    del caches.nvme.find
    return generated


def counts(caches) -> tuple[int, int]:
    stats = caches.nvme.stats()
    return stats["read_tokens"], stats["shared_tokens"]


@pytest.mark.parametrize(("agrees", "shared"), [(0, 0), (63, 0), (64, 1), (65, 1), (150, 2), (191, 2), (255, 3)])
def test_what_the_pool_has_is_held_and_the_rest_is_read(tiny_engine, directory, monkeypatch, agrees, shared):
    """Whole pages, as far as the two prompts agree. Both have them then, and each goes on for itself."""
    other = joined(ASKED[:agrees], prompt(300, seed=8)[: 280 - agrees])
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        said = in_memory(tiny_engine, caches, other)
        before, read = caches.resident.resident.pages[:], Read(monkeypatch)
        _, generated = assert_restored(tiny_engine, ASKED, "disk", 256)
        assert read.keys == PAGES[1 + shared : 5]
        assert counts(caches) == (256 - 64 * shared, 64 * shared)
        pages = caches.resident.resident.pages
        assert pages[:shared] == before[:shared]
        assert not set(pages[shared:]) & set(before)
        assert_restored(tiny_engine, followed(other, said, prompt(30, seed=5)), "parked", 284)
        assert_restored(tiny_engine, followed(ASKED, generated, prompt(30, seed=6)), "parked", 304)


@pytest.mark.parametrize("first", [80, 200])
def test_the_longest_of_several_is_shared(tiny_engine, directory, first):
    """Of three sessions that agree 80, 200 and no tokens, in whichever order they came."""
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        for number, agrees in enumerate((first, 280 - first, 0)):
            in_memory(tiny_engine, caches, joined(ASKED[:agrees], prompt(20, seed=8 + number)))
        assert_restored(tiny_engine, ASKED, "disk", 256)
        assert counts(caches) == (64, 192)


def test_only_the_anchor_is_read_where_all_rows_are_there(tiny_engine, directory, monkeypatch):
    """Of a session whose anchors were thinned out."""
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches, joined(ASKED[:290], prompt(100, seed=8)))
        session = caches.resident.resident
        session.anchors = [a for a in session.anchors if a.length > 300]
        read = Read(monkeypatch)
        assert_restored(tiny_engine, ASKED, "disk", 256)
        assert (read.keys, counts(caches)) == ([], (0, 256))


def test_control_a_value_that_is_wrong_in_a_shared_page_is_seen(tiny_engine, directory):
    """In the answer's rows, past those that were shared or read."""
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches)
        expected, page, pool = cold(tiny_engine, ASKED)[1], caches.resident.resident.pages[1], tiny_engine.pool
        rows = {name: np.array(of) for name, of in pool.read_page(page).items()}
        rows["V"][0, 0, 5] ^= 1 << 15  # the sign
        pool.write_page(page, rows, 64)
        record, _, state = answer(tiny_engine, ASKED)
        assert (record.source, record.start, counts(caches)) == ("disk", 256, (128, 128))
        new = [{view: of[:, :, 256:] for view, of in one["rows"].items()} for one in (state, expected)]
        assert not same_state(*new)


def test_f4_another_tenants_pages_are_not_shared(tiny_engine, directory, monkeypatch):
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches, tenant="b")
        read = Read(monkeypatch)
        assert_restored(tiny_engine, ASKED, "disk", 256)
        assert (read.keys, counts(caches)) == (PAGES[1:5], (256, 0))


def test_a_damaged_page_above_the_shared_ones_is_a_miss(tiny_engine, directory):
    """The next best hit shares them too, and `started` finds none held at the end. One that is damaged below them is not read, and is a hit."""
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches)
        DAMAGE["first bit"](file(directory, PAGES[1], "K"))
        assert_restored(tiny_engine, ASKED, "disk", 256)
        caches.clear()
        in_memory(tiny_engine, caches)
        DAMAGE["first bit"](file(directory, PAGES[4], "K"))
        held = caches.resident.resident.pages[:2]
        record, generated, state = answer(tiny_engine, ASKED)
        assert record.failed == [f"nvme: {PAGES[4]} is damaged or gone"]
        assert (record.source, record.start) == ("disk", 192)
        assert counts(caches) == (128 + 64, 128 + 128)
        assert caches.resident.resident.pages[:2] == held
        assert (generated, ANCHORS[4] in keys(directory)) == (cold(tiny_engine, ASKED)[0], False)
        assert_bits_equal(state, cold(tiny_engine, ASKED)[1])


def test_the_session_is_given_up_while_its_head_is_held(tiny_engine, directory):
    """Two pages are to be read and one is free: the session goes, and what is shared of it stays."""
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches)
        session, pool = caches.resident.resident, tiny_engine.pool
        head, spare = session.pages[:2], [pool.take() for _ in range(pool.free - 1)]
        assert_restored(tiny_engine, ASKED, "disk", 256)
        assert (counts(caches), session.pages) == ((128, 128), [])
        assert caches.resident.resident.pages[:2] == head
        pool.release(spare)


@pytest.mark.parametrize("free", [3, 1])
def test_there_must_be_pages_for_the_rest_only(tiny_engine, directory, free):
    """Two, and one for the prompt's end. With fewer nothing is given up for it."""
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches)
        pool, session = tiny_engine.pool, caches.resident.resident
        pool.hold(held := session.pages[:])  # by somebody else too, so that giving it up frees nothing
        spare = [pool.take() for _ in range(pool.free - free)]
        if free == 3:
            assert_restored(tiny_engine, ASKED, "disk", 256)
        else:
            before = pool.holders.tolist()
            with pytest.raises(Unusable, match="expected 2 pages that nobody else holds, found 1"):
                caches.take(caches.find(ASKED.astype(np.int64), "")[0])
            assert (pool.holders.tolist(), caches.resident.sessions) == (before, [session])
        pool.release(spare)
        pool.release(held)


@pytest.mark.parametrize("at", [1, 2])
def test_a_restore_that_breaks_off_holds_nothing(tiny_engine, directory, monkeypatch, at):
    """While a page is written into the pool; the next try is served."""
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches)
        before, write, calls = tiny_engine.pool.holders.tolist(), PagePool.write_page, []

        def broken(*page):
            calls.append(page)
            if len(calls) == at:
                raise RuntimeError("no device")
            return write(*page)

        monkeypatch.setattr(PagePool, "write_page", broken)
        with pytest.raises(RuntimeError, match="no device"):
            answer(tiny_engine, ASKED)
        assert tiny_engine.pool.holders.tolist() == before
        assert not caches.nvme.index._in_use
        assert_restored(tiny_engine, ASKED, "disk", 256)


def test_what_a_running_request_has_is_shared(tiny_engine, directory):
    """Two conversations with one head, restored side by side after a restart: the second reads the pages that the first has not."""
    second = joined(ASKED[:150], prompt(150, seed=8))
    with started(tiny_engine, directory, **HEADS) as caches:
        in_memory(tiny_engine, caches, second)
        caches.nvme.drain()
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        runs = Parallel(tiny_engine, 2)
        prompts = [joined(tokens, prompt(40, seed=7)) for tokens in (ASKED, second)]
        generations = [runs.submit(tokens, max_tokens=5) for tokens in prompts]
        order = [generations.index(generation) for generation, token in runs if token]
        assert order.index(1) < len(order) - 1 - order[::-1].index(0)  # side by side
        assert [(r.source, r.start) for r in caches.ledger.records] == [("disk", 256)] * 2
        assert counts(caches) == (256 + 128, 128)
        for generation, tokens in zip(generations, prompts, strict=True):
            expected = cold(tiny_engine, tokens)
            assert generation.tokens == expected[0]
            assert_bits_equal(kept(tiny_engine.pool, generation.sequence), expected[1])
            tiny_engine.release(generation.sequence)


def test_the_rate_is_that_of_what_is_read(tiny_engine, directory):
    added, layout = [], tiny_engine.layout
    with started(tiny_engine, directory, **READ_ONLY) as caches:
        in_memory(tiny_engine, caches)
        caches.nvme.rates.read.add = lambda nbytes, seconds: added.append(nbytes)
        answer(tiny_engine, ASKED)
        (anchor,) = (a for a in caches.nvme.index.anchors.values() if a.hits)
        assert added == [anchor.nbytes + 2 * layout.page_bytes]


def test_at_level_grid_rows_of_an_answer_are_not_shared(tiny_engine, tmp_path):
    """Steps are impure: the page in which the answer's rows begin is read from the file, though the pool has it of the same key ids."""
    with impure_steps(tiny_engine, GRID) as engine:
        with started(engine, tmp_path, **HEADS) as caches:
            _, generated, _ = answer(engine, prompt(200), max_tokens=120)
            asked = followed(prompt(200), generated, prompt(20, seed=9))
            caches.clear()
            record, _ = prompt_state(engine, asked)
            assert (record.source, record.start) == ("disk", 192)
        with started(engine, tmp_path, **READ_ONLY) as caches:
            in_memory(engine, caches, prompt(200), max_tokens=120)
            record, state = prompt_state(engine, asked)
            assert (record.source, record.start, record.exact) == ("disk", 320, True)
            assert bits(state, cold_state(engine, asked)) == 0
            assert counts(caches) == (128, 192)


def test_at_level_grid_a_session_resume_shares_nothing(tiny_engine, tmp_path):
    """What was read back was computed over its own rows; those that the pool has of the same key ids are a prefill's."""
    with impure_steps(tiny_engine, GRID) as engine:
        with started(engine, tmp_path, **SESSIONS):
            _, generated, _ = answer(engine, prompt(200), max_tokens=120)
        with started(engine, tmp_path, **SESSIONS) as caches:
            caches.clear()
            said = followed(prompt(200), generated, prompt(20, seed=9))
            in_memory(engine, caches, said[:300])
            record, state = prompt_state(engine, said)
            assert (record.source, record.start, record.exact) == ("spill", 319, False)
            assert counts(caches) == (319, 0)
            pages = [engine.pool.rows("V", caches.resident.resident.pages, 319), cold_state(engine, said)["rows"]["V"][:, :, :319]]
            assert not np.array_equal(*pages)
            assert np.array_equal(state["rows"]["V"][:, :, :319], pages[0])
