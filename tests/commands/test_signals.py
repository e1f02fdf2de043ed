"""Signals that end a command, from outside: what it has computed is kept, the status is the signal's, and nothing is left behind."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.cached import as_json, shown

LONG = "The worker reads the file and the other one writes it. " * 160
NVME = ["--disk-free-gb", "0", "--disk-min-tokens", "10000000"]
"""Conversations alone."""


def started(*argv, env: dict | None = None) -> subprocess.Popen:
    """The command as a process, its standard streams as pipes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "qjax.cli", *map(str, argv)]
    return subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}))


def until(stream, text: bytes) -> bytes:
    """What comes up to a text and a little more."""
    found = b""
    while text not in found:
        assert select.select([stream], [], [], 100)[0], found
        more = os.read(stream.fileno(), 65536)
        assert more, found
        found += more
    return found


def conversations(capsys, directory: Path) -> list[int]:
    """Tokens of those that are kept."""
    (of,) = as_json(capsys, directory / "embedded")["fingerprints"]
    return [row["tokens"] for row in of["rows"] if row["what"] == "conversation"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_generate_keeps_what_it_has_read(flags, tmp_path, capsys, name):
    """In the middle of a prompt; the next run goes on from there."""
    (tmp_path / "prompt").write_text(LONG)
    argv = ["generate", tmp_path / "prompt", *flags, "--max-tokens", "2", "--disk-cache", tmp_path / "states", *NVME]
    process = started(*argv)
    until(process.stderr, b"  read ")
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + getattr(signal, name), err
    assert err.decode().endswith(f"; ended by {'Ctrl-C' if name == 'SIGINT' else name}\n")
    (length,) = conversations(capsys, tmp_path / "states")
    assert 128 <= length < 2000
    assert "nothing is damaged" in shown(capsys, tmp_path / "states" / "embedded", "--verify")
    again = subprocess.run([sys.executable, "-m", "qjax.cli", *map(str, argv), "--json"], capture_output=True, check=True, text=True)
    assert f'"start": {length}' in again.stdout


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_chat_is_kept_whole(flags, tmp_path, capsys, name, where):
    """At its prompt, where it waits for a line, and in an answer."""
    process = started(
        "chat", "--no-thinking", "--max-tokens", "20" if where == "prompt" else "2000", *flags, "--disk-cache", tmp_path / "states", *NVME
    )
    process.stdin.write(LONG[: 1500 if where == "prompt" else 6000].encode() + b"\n")
    process.stdin.flush()
    until(process.stdout, b"> The worker")
    if where == "prompt":
        until(process.stdout, b"the first token after")
    else:
        until(process.stdout, b"  read ")
    for _ in range(2 if name == "SIGHUP" else 1):  # as a shell does when its terminal goes
        process.send_signal(getattr(signal, name))
        time.sleep(0.05)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (128 + getattr(signal, name), b""), out
    assert len(conversations(capsys, tmp_path / "states")) == 1
    assert where == "prompt" or b"stopped" in out


def test_a_second_signal_ends_at_once(flags, tmp_path, monkeypatch):
    """The first one waits for a forward; a hang-up twice is one, as a shell sends it when its terminal goes."""
    (tmp_path / "prompt").write_text(LONG)
    process = started("generate", tmp_path / "prompt", *flags, "--disk-cache", tmp_path / "states", *NVME, "--max-tokens", "2000")
    until(process.stderr, b"  read ")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=100)
    assert process.returncode == 129
    process = started("generate", tmp_path / "prompt", *flags, "--disk-cache", "none", "--max-tokens", "2000")
    until(process.stderr, b"  read ")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 143


COMMANDS = {
    "demo": (["demo", "--tokens", "1000"], b"\n1 cold"),
    "certify": (["certify"], None),
    "bench restart": (["bench", "restart", "--tokens", "600", "--rounds", "1"], None),
}


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize("after", [0.1, 0.5, 1.5])
def test_ctrl_c_leaves_nothing(flags, tmp_path, what, after):
    """Whatever it does then: one line, status 130, and its own directory is gone."""
    argv, begun = COMMANDS[what]
    process = started(*argv, *flags, env={"TMPDIR": str(tmp_path)})
    if begun:
        until(process.stdout, begun)
    else:
        deadline = time.monotonic() + 100
        while not list(tmp_path.iterdir()) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    if process.returncode != 0:
        assert process.returncode == 130, err
        assert err.decode().splitlines()[-1] == "qjax: interrupted; nothing that was saved is lost"
        assert b"Traceback" not in err
        assert b"cannot" not in err
    assert list(tmp_path.iterdir()) == []
