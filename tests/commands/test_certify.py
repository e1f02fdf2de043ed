"""`qjax certify`: every tier has its row, and ended in the middle it leaves neither its directory nor its children."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from qjax.caches.store import StateStore
from qjax.commands import certify
from qjax.config import EngineConfig
from qjax.ledger import SOURCES
from qjax.warmth import ask, certify_tiers
from qjax.warmth_files import as_arrays, certify_files, over_files, prompts, stage_check

CERTIFY = """
import os, signal, sys
import qjax.cli
from qjax.commands import certify
from qjax.config import EngineConfig
certify.process_outcome = lambda engine: {}
sys.executable = sys.argv[1]
def run(args):
    with certify.private_directory("certify") as directory:
        certify._processes(None, args.model, EngineConfig.from_flags(args), directory, print)
certify.run = run
sys.exit(qjax.cli.main(["certify", "--compile-cache", "none"]))
"""
CHILD = """#!/bin/sh
echo $$ $* > {told}
exec sleep 600
"""


def test_ended_it_leaves_nothing(tmp_path):
    """The processes that it compares are stand-ins which say that they have begun, and where they are to write."""
    told, child, directory = tmp_path / "told", tmp_path / "child", tmp_path / "tmp"
    os.mkfifo(told)
    directory.mkdir()
    child.write_text(CHILD.format(told=told))
    child.chmod(0o700)
    command = [sys.executable, "-c", CERTIFY, str(child)]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(directory)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pid, *arguments = told.read_text().split()
        assert arguments[arguments.index("--dump") + 1].startswith(f"{directory}/qjax-certify-")
        assert len(list(directory.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        assert process.stderr.read() == b""
    assert list(directory.iterdir()) == []
    assert not os.path.exists(f"/proc/{pid}") if os.path.isdir("/proc/self") else True


def test_every_tier_has_a_row_and_its_control(engine_256):
    said, free = [], engine_256.pool.free
    checks, controls = certify_tiers(engine_256, progress=said.append)
    assert {c.name.split()[-1] for c in checks} == SOURCES.keys() - {"cold", "disk", "spill"}
    assert all((c.hit, c.differing_bits) == (True, 0) for c in checks)
    layout = engine_256.layout
    anchor, snapshot = ({s.name for s in parts} for parts in (layout.sections, (*layout.sections, *layout.open, *layout.views)))
    assert set(controls) == {f"{name} of an anchor zeroed" for name in anchor} | {f"{name} of a snapshot zeroed" for name in snapshot}
    assert all(controls.values())
    assert "tier: store" in said
    assert (engine_256.caches, engine_256.pool.free) == (None, free)


def test_files_have_rows_and_controls(engine_256, tmp_path):
    free = engine_256.pool.free
    checks, controls = certify_files(engine_256, tmp_path)
    assert [c.name for c in checks] == ["resumed from disk", "resumed from spill"]
    assert all((c.hit, c.differing_bits) == (True, 0) for c in checks)
    layout = engine_256.layout
    assert set(controls) == {f"{part.name} of a file zeroed" for part in (*layout.sections, *layout.views)}
    assert all(controls.values())
    assert (engine_256.caches, engine_256.pool.free) == (None, free)


def test_processes_one_after_the_other(compile_cache, embedded_engine, tmp_path):
    """One is killed, the next finds its head and stops as planned, the last finds the conversation."""
    config = EngineConfig(grid=128, context_tokens=1024, compile_cache=compile_cache)
    checks = certify._stages(embedded_engine, "embedded", config, tmp_path, lambda name: None)
    assert [c.name.split(",")[0] for c in checks] == ["resumed from disk", "resumed from spill"]
    assert all((c.hit, c.differing_bits) == (True, 0) for c in checks)


def test_what_a_process_sent_is_compared(engine_256, tmp_path):
    """Control: one bit of its state is another."""
    with over_files(engine_256, tmp_path):
        main, edited, _ = prompts(engine_256)
        ask(engine_256, main)
        arrays = as_arrays(ask(engine_256, edited))
    assert stage_check("restart", engine_256, arrays).differing_bits == 0
    name = next(name for name in arrays if name.startswith("state.") and arrays[name].dtype == np.uint16)
    arrays[name] = arrays[name].copy()
    arrays[name].flat[0] ^= 1
    assert stage_check("restart", engine_256, arrays).differing_bits == 1


def test_a_tier_that_does_not_answer_is_no_row(engine_256, monkeypatch):
    """Control: the store finds nothing, and the run does not pass for one."""
    monkeypatch.setattr(StateStore, "find", lambda self, keys, tenant: None)
    free = engine_256.pool.free
    with pytest.raises(RuntimeError, match="expected a hit of 'store', found 'cold'"):
        certify_tiers(engine_256)
    assert (engine_256.caches, engine_256.pool.free) == (None, free)
