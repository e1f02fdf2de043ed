"""`qjax certify`: ended in the middle, it leaves neither its directory nor its children."""

import os
import signal
import subprocess
import sys

CERTIFY = """
import os, signal, sys
import qjax.cli
from qjax.commands import certify
from qjax.config import EngineConfig
certify.process_outcome = lambda engine: {}
sys.executable = sys.argv[1]
certify.run = lambda args: certify._processes(None, args.model, EngineConfig.from_flags(args), print)
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
