"""What the disk tier writes, decided before the prefill: seen by what a later start finds."""

import pytest

from qjax.caches.nvme.disk import Nvme
from qjax.caches.nvme.restore import restore
from qjax.config import GRID, TOKEN
from tests import runs
from tests.equivalence.nvme import GB, HEADS, assert_restored, joined, lengths, on_disk, recount, started
from tests.equivalence.test_grid import bits, conversation
from tests.equivalence.test_resident import answer, followed
from tests.impure import impure_steps
from tests.models import prompt


@pytest.mark.usefixtures("level")
def test_a_line_that_was_counted_twice_gets_an_anchor(tiny_engine, memory_path):
    """The longest such line, and no other; found by the third prompt. The count survives a restart."""
    head = prompt(150)
    for seed in (1, 2):
        with started(tiny_engine, memory_path, **HEADS) as caches:
            assert lengths(caches) == []
            assert_restored(tiny_engine, joined(head, prompt(100, seed=seed)), "cold", 0, user=0)  # no line below a user message
            recount(caches, memory_path)
    with started(tiny_engine, memory_path, **HEADS) as caches:
        assert lengths(caches) == [128]
        assert_restored(tiny_engine, joined(head, prompt(100, seed=3)), "disk", 128, user=0)
        assert lengths(caches) == [128]


@pytest.mark.parametrize("after", [1, 3])
def test_admit_after_is_settable(tiny_engine, memory_path, after):
    with started(tiny_engine, memory_path, admit_after=after, **HEADS) as caches:
        for count in range(1, 4):
            answer(tiny_engine, prompt(200), user=0)
            assert lengths(caches) == ([192] if count >= after else [])
            caches.clear()
            if count >= after:
                break


def test_the_last_lines_below_the_user_message_of_a_sessions_first_request(tiny_engine, memory_path):
    """Four of them; not of its second turn, and not where the prompt has no such lines."""
    with started(tiny_engine, memory_path, **HEADS) as caches:
        tokens = prompt(360)
        _, generated, _ = answer(tiny_engine, tokens, user=340)
        assert lengths(caches) == [128, 192, 256, 320]
        answer(tiny_engine, followed(tokens, generated, prompt(70, seed=4)), user=430)
        answer(tiny_engine, prompt(100, seed=5), user=63)
        assert lengths(caches) == [128, 192, 256, 320]
        answer(tiny_engine, prompt(200, seed=6), user=130)
        assert lengths(caches) == [64, 128, 128, 192, 256, 320]


def test_a_branch_gets_an_anchor(tiny_engine, memory_path):
    """Where an earlier prompt read this far and went on differently; its own anchor there had made room for others."""
    layout = tiny_engine.layout
    with started(tiny_engine, memory_path, caches={"resident_gb": layout.section_bytes / GB}, **HEADS) as caches:
        answer(tiny_engine, prompt(440), user=0)
        assert lengths(caches) == []
        record, *_ = answer(tiny_engine, joined(prompt(200), prompt(100, seed=1)), user=0)
        assert (record.agrees, record.start) == (200, 0)
        assert lengths(caches) == [192]


@pytest.mark.parametrize(("least", "found"), [(201, []), (200, [64, 128, 192])])
def test_short_prompts_are_neither_written_nor_counted(tiny_engine, memory_path, least, found):
    with started(tiny_engine, memory_path, disk_min_tokens=least, **HEADS) as caches:
        for _ in range(3):
            answer(tiny_engine, prompt(200))
            assert lengths(caches) == found
            caches.clear()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("forwards", [0, 1, 3, 5])
def test_a4_a_cancelled_prefill_leaves_what_it_finished(tiny_engine, memory_path, forwards):
    """A4, A3: decided before the prefill, written up to its last finished line; a line that it did not reach is not there, and not found."""
    tokens, asked = prompt(340), iter(range(100))
    with started(tiny_engine, memory_path, **HEADS) as caches:
        generation = tiny_engine.generate(tokens, cancel=lambda: next(asked) >= forwards)
        assert not list(generation)
        tiny_engine.release(generation.sequence)
        finished = [line for line in (128, 192, 256, 320) if line <= 64 * forwards]
        assert lengths(caches) == finished
        recount(caches, memory_path)
    with started(tiny_engine, memory_path, **HEADS):
        assert_restored(tiny_engine, tokens, *(("disk", finished[-1]) if finished else ("cold", 0)))


@pytest.mark.usefixtures("level")
def test_a_clear_of_the_files_is_not_undone_by_a_request_that_runs(tiny_engine, memory_path):
    with started(tiny_engine, memory_path, **HEADS) as caches:
        generation = tiny_engine.generate(prompt(340), max_tokens=5, progress=lambda now: now.done == 256 and caches.clear(files=True))
        list(generation)
        tiny_engine.release(generation.sequence)
        assert lengths(caches) == []
        answer(tiny_engine, prompt(340, seed=1))
        assert lengths(caches) == [128, 192, 256, 320]  # the next one is written
        caches.clear(files=True)
        assert on_disk(memory_path) == {}
        assert_restored(tiny_engine, prompt(340, seed=1), "cold", 0)


def differing(engine, caches) -> dict[int, int]:
    """Per length of an anchor in the files, the bits in which it and the pages below it differ from a cold prefill."""
    found = {}
    for filed in caches.nvme.index.anchors.values():
        restored, _ = restore(engine.pool, caches.nvme.reader, filed, None, filed.length)
        state = runs.kept(engine.pool, restored.sequence)
        engine.release(restored.sequence)
        found[filed.length] = found.get(filed.length, 0) + bits(state, runs.cold(engine, state["tokens"]))
    return found


@pytest.mark.parametrize("level", [GRID, TOKEN])
def test_nothing_that_a_session_resume_wrote(tiny_engine, memory_path, monkeypatch, level):
    """At level grid on steps that differ: lines that were to be written were passed by resumes of an answer's end, and none of those is there.
    Control: at level token, which such an engine does not have, some are, with other bits.
    """
    refused, capture = [], Nvme.capture

    def counted(self, intake, anchor):
        refused.append(anchor.tainted and anchor.length in intake.lines)
        return capture(self, intake, anchor)

    monkeypatch.setattr(Nvme, "capture", counted)
    with impure_steps(tiny_engine, level) as engine, started(engine, memory_path, admit_after=1, **HEADS) as caches:
        found = conversation(engine)
        assert len(lengths(caches)) > 4
        caches.clear()
        wrong = differing(engine, caches)
        if level == GRID:
            assert any(refused)
            assert set(wrong.values()) == {0}
            assert all(n == 0 for record, n in found if record.exact)
        else:
            assert any(wrong.values())
