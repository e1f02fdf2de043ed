"""`qjax serve` as a process: its flags, its address, and how it stops."""

import json
import re
import signal
import socket
import subprocess
import sys

import httpx2
import pytest

from qjax.cli import main
from tests.serving.live import live, until
from tests.storage.children import run_with_mounts

CHAT = "/v1/chat/completions"
SMALL = ("--context-tokens", "8192")


def turn(url: str, messages: list[dict], **more) -> dict:
    response = httpx2.post(url + CHAT, json={"messages": messages, "max_tokens": 40, "temperature": 0} | more, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_conversation_goes_on_after_a_planned_stop(compile_cache, tmp_path):
    """And answers as a server that never had it; live asserts that the stop ends with 0."""
    flags = ("--compile-cache", str(compile_cache), *SMALL)
    messages = [{"role": "user", "content": "My room is 2354. " + "The worker reads the file. " * 400 + "What is my room?"}]
    with live(tmp_path, *flags, "--disk-cache", str(tmp_path / "states"), "--disk-free-gb", "0") as server:
        first = turn(server.url, messages)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "And my room again?"}]
    with live(tmp_path, *flags, "--disk-cache", str(tmp_path / "states"), "--disk-free-gb", "0") as server:
        again = turn(server.url, messages)
    with live(tmp_path, *flags, "--disk-cache", "none") as server:
        cold = turn(server.url, messages)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first["usage"]["prompt_tokens"] - 64
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["message"] == cold["choices"][0]["message"]


FULL = """
import contextlib, subprocess, sys
from pathlib import Path
from tests.commands.test_serve import SMALL, turn
from tests.serving.live import live

directory = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", directory], check=True)
with live(Path(sys.argv[2]), "--compile-cache", sys.argv[3], *SMALL, "--disk-cache", str(directory), "--disk-free-gb", "0") as server:
    turn(server.url, [{"role": "user", "content": "The worker reads the file. " * 200}])
    with (directory / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
print(server.log.read_text())
"""


def test_a_planned_stop_on_a_full_disk_says_what_is_missing_and_ends_well(compile_cache, tmp_path):
    """Status 0, which live asserts, a line for the conversation and one for the answers on record."""
    (tmp_path / "states").mkdir()
    lines = run_with_mounts(FULL, tmp_path / "states", tmp_path, compile_cache).splitlines()
    conversation, answers = (line for line in lines if "WARNING" in line)
    assert re.search(r"a conversation of [\d,]+ tokens is not written: it needs .* MiB more", conversation)
    assert "answers was not written (No space left on device)" in answers
    assert not any("Traceback" in line or "ERROR" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_waits_for_what_runs_and_the_second_does_not(compile_cache, tmp_path, number):
    with live(tmp_path, "--compile-cache", str(compile_cache), "--disk-cache", "none", "--drain-seconds", "600") as server:
        prompt = {"prompt": "The worker reads the file.", "max_tokens": 200_000, "temperature": 5.0, "seed": 1, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=prompt, timeout=300) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(number)
            until(lambda: httpx2.get(f"{server.url}/ready").status_code == 503, "stop")
            assert next(line for line in lines if line)
            server.process.send_signal(number)
            assert server.process.wait() == 128 + number
        server.process.returncode = 0  # it has ended as it should, which is not as `live` expects it


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1, port {port}" in said
    assert "loaded" not in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "99999"], "--port must be a number from 0 to 65535"),
        (["--host", "0.0.0.0"], "without a key"),
        (["--key-file", "/nowhere/keys"], "/nowhere/keys: expected a file of keys"),
        (["--side-request", "["], "must be a regular expression"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--max-depth", "9999"], "max-depth must be at most 200"),
        (["--config", "/nowhere.toml"], "/nowhere.toml: expected a TOML file of flags"),
        (["--ledger", "/nowhere/requests.jsonl"], "--ledger: expected a file in a directory that is there, found none at /nowhere"),
    ],
)
def test_wrong_flags_are_told_before_anything_is_loaded(flags, words, capsys, monkeypatch):
    monkeypatch.delenv("QJAX_API_KEY", raising=False)
    assert main(["serve", "--port", "0", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "loaded" not in said


def test_a_config_file_holds_flags_and_the_command_line_goes_before_it(tmp_path, compile_cache):
    file = tmp_path / "serve.toml"
    file.write_text('model-name = "file"\n[limits]\nmax_body_mb = 1\n[server]\nside-request = ["none"]\nend-align = false\ncontext-tokens = 5000\n')
    flags = ("--config", str(file), "--context-tokens", "3000", "--compile-cache", str(compile_cache), "--disk-cache", "none")
    with live(tmp_path, *flags) as server:
        found = httpx2.get(f"{server.url}/v1/models").json()["data"][0]
        assert (found["id"], found["max_model_len"]) == ("file", 3000)
        assert httpx2.post(server.url + CHAT, content=b" " * 2**21).status_code == 413


def test_a_config_file_in_a_config_file_is_refused(tmp_path, capsys):
    file = tmp_path / "serve.toml"
    file.write_text('[server]\nconfig = "other.toml"\n')
    assert main(["serve", "--config", str(file)]) == 2
    assert f"{file}: expected flags, found config" in capsys.readouterr().err


def test_an_unknown_key_of_a_config_file_is_named(tmp_path, capsys):
    file = tmp_path / "serve.toml"
    file.write_text("kv-gigabytes = 8\n")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", str(file)])
    assert end.value.code == 2
    assert "--kv-gigabytes" in capsys.readouterr().err


def test_what_is_written_to_the_terminal_has_no_text_of_a_prompt(compile_cache, tmp_path):
    with live(tmp_path, "--compile-cache", str(compile_cache), "--disk-cache", "none", "--api-key", "sk-secret") as server:
        messages = [{"role": "user", "content": "The heron reads the letter."}]
        for key in ("sk-secret", "sk-wrong"):
            httpx2.post(server.url + CHAT, json={"messages": messages, "max_tokens": 5}, headers={"Authorization": f"Bearer {key}"}, timeout=300)
        until(lambda: "first token" in server.log.read_text(), "line of the request")
        log = server.log.read_text()
    assert "heron" not in log
    assert "sk-" not in log


def test_it_teaches_its_flags():
    said = subprocess.run([sys.executable, "-m", "qjax.cli", "serve", "--help"], capture_output=True, text=True, check=True).stdout
    for group in ("server:", "engine:", "caches:", "caches on NVMe:", "limits of a request:"):
        assert group in said
    assert json.dumps({"messages": [{"role": "user", "content": "hello"}]}) in said
