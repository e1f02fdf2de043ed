"""kill -9 of engines that write to NVMe: nothing half-written is served, and what was acknowledged is. 200 of them: killed.py."""

import shutil

from tests.equivalence.killed import FAULTS, kills
from tests.equivalence.nvme_damage import entry, file, flip

KILLS = 12


def test_engines_that_are_killed(tiny_engine, compile_cache, tmp_path):
    """One after another on one directory, at moments that come from a seed; and the control, that the survey would see what is wrong."""
    survey = kills(tiny_engine, compile_cache, directory := tmp_path / "states", KILLS)
    print(dict(survey.counts), survey.opened)
    assert not any(survey.counts[fault] for fault in FAULTS), survey.counts
    assert survey.counts["kills"] == KILLS
    assert survey.counts["unfinished"] >= 2
    assert survey.counts["requests"] >= 3 * KILLS
    assert len(survey.acknowledged) >= KILLS

    gone = min(survey.acknowledged)
    shutil.rmtree(entry(directory, gone))
    survey.look()
    assert (survey.counts["lost"] >= 1, survey.counts["wrong"], survey.counts["damaged"]) == (True, 0, 0)
    for key in survey.acknowledged.keys() - {gone}:
        flip(file(directory, key, "section.gdn.S"), 0)
    survey.counts["lost"] = 0
    survey.look()
    assert survey.counts["lost"] >= 2
    assert survey.counts["wrong"] == 0
