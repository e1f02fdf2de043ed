"""The `qjax` command as a process of its own, started by another one: what is to hold across processes is tried across processes."""

import subprocess
import sys


def run_qjax(arguments: list[str], what: str, ends: int = 0) -> str:
    """What the process prints. ends: the status that it must end with, a signal's number below 0. ValueError, with its last words, for another."""
    done = subprocess.run([sys.executable, "-m", "qjax.cli", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != ends:
        raise ValueError(f"{what} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
