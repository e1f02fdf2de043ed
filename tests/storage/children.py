"""Scripts in processes of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNSHARE = ["unshare", "--map-root-user", "--mount"]


def run(script: str, *arguments, before: tuple[str, ...] = ()) -> str:
    """What a script prints; it starts at the top of the tree, and fails the test when it does."""
    command = [*before, sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_with_mounts(script: str, *arguments) -> str:
    """The same where the script can mount file systems that nobody else sees; skips the test where the system does not let it."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let its users mount a file system of their own")
    return run(script, *arguments, before=tuple(UNSHARE))
