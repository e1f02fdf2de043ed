"""`qjax convert` on the embedded checkpoint, and how it refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qjax.cli import main
from qjax.model import source
from tests.bits import assert_bits_equal


def test_converts_and_says_so(tmp_path, capsys):
    target = tmp_path / "converted"
    assert main(["convert", str(source.EMBEDDED), str(target)]) == 0
    model, expected = source.load(str(target)), source.load("embedded")
    assert_bits_equal(model.params, expected.params)
    shown = capsys.readouterr().out
    size = sum(x.nbytes for x in jax.tree.leaves(expected.params))
    assert f"{target}: {size:,} bytes of weights, read back bit for bit\n" in shown
    assert main(["convert", str(source.EMBEDDED), str(target)]) == 2
    assert capsys.readouterr().err.startswith(f"qjax: error: {target}: expected a new or an empty directory")


def test_wrong_sources_are_one_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "to")]) == 2
    broken = shutil.copytree(source.EMBEDDED, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    assert main(["convert", str(broken), str(tmp_path / "to")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("qjax: error: ") for line in errors] == [True, True]
    assert "truncated" in errors[1]
    assert not (tmp_path / "to").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


# what a user does in a terminal: Ctrl-C once the first file of weights is there
INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
from qjax import cli
def press(root=pathlib.Path(sys.argv[2]).parent):
    while not list(root.glob(".*partial*/params*/ocdbt*/d/*")):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
sys.exit(cli.main(["convert", *sys.argv[1:]]))
"""
# ulimit -f, here in bytes: a write beyond it fails as on a full disk
LIMITED = """
import resource, sys
from qjax import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
sys.exit(cli.main(["convert", *sys.argv[1:]]))
"""


def _run(script: str, *args) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", script, *map(str, args)], env=environment, capture_output=True, text=True, timeout=300)


def test_ctrl_c_during_the_write_leaves_nothing_and_says_one_line(tmp_path):
    ended = _run(INTERRUPTED, source.EMBEDDED, tmp_path / "new" / "to")
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr.split() == "qjax: interrupted; nothing that was saved is lost".split()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [False, True])
def test_a_write_that_the_system_refuses_is_one_line(tmp_path, there):
    target = tmp_path / "to"
    if there:
        target.mkdir()
    ended = _run(LIMITED, source.EMBEDDED, target)
    size = sum(x.nbytes for x in jax.tree.leaves(source.load("embedded").params))
    assert (ended.returncode, ended.stderr) == (2, f"qjax: error: {target}: expected to write {size} bytes there, found: File too large\n")
    assert list(tmp_path.rglob("*")) == [target] * there


def test_the_current_directory_is_filled_and_an_empty_name_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(source.EMBEDDED), ""]) == 2
    assert main(["convert", "", "to"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [e.split(": ")[-1].split(", ")[-1] for e in errors] == ["found an empty name"] * 2
    assert list(tmp_path.iterdir()) == []
    assert main(["convert", str(source.EMBEDDED), "."]) == 0
    assert "qjax.json" in os.listdir()
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("name", ["embedded", "random:0.8b"])
def test_a_source_that_is_no_directory_is_said_at_once(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(source, "load", lambda path: pytest.fail("loaded"))
    assert main(["convert", name, str(tmp_path / "to")]) == 2
    assert capsys.readouterr().err == f"qjax: error: {name}: expected a directory of a Hugging Face checkpoint, found nothing there\n"


def test_what_a_dead_conversion_left_is_one_line(tmp_path, capsys):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".to.partial-{dead.pid}-123"
    left.mkdir()
    assert main(["convert", str(source.EMBEDDED), str(tmp_path / "to")]) == 0
    assert capsys.readouterr().err == f"{left}: removed, left by a conversion that was ended early\n"
    assert [p.name for p in tmp_path.iterdir()] == ["to"]


def test_weights_and_settings_that_cannot_be_used_are_not_converted(tmp_path, capsys):
    broken = shutil.copytree(source.EMBEDDED, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(n for n in tensors if n.endswith("norm.weight"))
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[0] = np.nan
    save_file(tensors, broken / "model.safetensors")
    assert main(["convert", str(broken), str(tmp_path / "to")]) == 2
    assert f"{name}: expected {tensors[name].size:,} finite numbers, found 1 that are NaN or infinite\n" in capsys.readouterr().err
    (broken / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    assert main(["convert", str(broken), str(tmp_path / "to")]) == 2
    assert "generation_config.json: temperature must be a finite number, 0 (greedy) or more, not -1" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"]
