"""`qjax certify`: every tier has its row, and ended in the middle it leaves neither its directory nor its children."""

import os
import signal
import subprocess
import sys

import pytest

from qjax.caches.store import StateStore
from qjax.ledger import SOURCES
from qjax.warmth import certify_tiers

CERTIFY = """
import os, signal, sys
import qjax.cli
from qjax.commands import certify
from qjax.config import EngineConfig
certify.process_outcome = lambda engine: {}
sys.executable = sys.argv[1]
def run(args):
    with certify._private_directory() as directory:
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
    assert {c.name.split()[-1] for c in checks} == SOURCES.keys() - {"cold"}
    assert all((c.hit, c.differing_bits) == (True, 0) for c in checks)
    layout = engine_256.layout
    anchor, snapshot = ({s.name for s in parts} for parts in (layout.sections, (*layout.sections, *layout.open, *layout.views)))
    assert set(controls) == {f"{name} of an anchor zeroed" for name in anchor} | {f"{name} of a snapshot zeroed" for name in snapshot}
    assert all(controls.values())
    assert "tier: store" in said
    assert (engine_256.caches, engine_256.pool.free) == (None, free)


def test_a_tier_that_does_not_answer_is_no_row(engine_256, monkeypatch):
    """Control: the store finds nothing, and the run does not pass for one."""
    monkeypatch.setattr(StateStore, "find", lambda self, keys, tenant: None)
    free = engine_256.pool.free
    with pytest.raises(RuntimeError, match="expected a hit of 'store', found 'cold'"):
        certify_tiers(engine_256)
    assert (engine_256.caches, engine_256.pool.free) == (None, free)
