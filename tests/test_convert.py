"""Conversion: the same bits in another form, whole or absent, and damage is named."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from qjax.interrupts import deferred
from qjax.model import convert as conversion
from qjax.model import converted, source
from qjax.model.config import ModelConfig
from qjax.model.values import CheckpointError
from qjax.model.weights import spec
from tests import tiny_checkpoint as tiny
from tests.bits import assert_bits_equal

CONFIG = ModelConfig.from_dict(tiny.CONFIG)


def test_a_conversion_loads_with_the_same_bits(tmp_path):
    src, dst = tiny.write(tmp_path / "src", shards=2), tmp_path / "deep" / "dst"
    before = {p.name: p.read_bytes() for p in src.iterdir()}
    report = conversion.convert(src, dst)
    assert report.bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec(CONFIG)))
    assert min(report.safetensors_seconds, report.orbax_seconds) > 0
    original = source.load(src)
    shutil.rmtree(src)
    model = source.load(dst)
    assert_bits_equal(model.params, original.params)
    assert (model.config, model.generation, model.tokenizer.stop_ids) == (original.config, original.generation, original.tokenizer.stop_ids)
    messages = [{"role": "user", "content": "hello"}]
    assert model.template.render(messages) == original.template.render(messages)
    assert {p.name for p in dst.iterdir()} == {"params", "qjax.json"} | {n for n in before if n.endswith((".json", ".jinja")) and "index" not in n}
    assert list(dst.parent.iterdir()) == [dst]
    with pytest.raises(CheckpointError, match="expected a Hugging Face directory, found a converted one"):
        conversion.convert(dst, tmp_path / "again")
    with pytest.raises(CheckpointError, match="expected weights converted as float32, found 'bfloat16'"):
        source.load(dst, dtype="float32")


def test_a_conversion_overwrites_nothing(tmp_path):
    src, dst = tiny.write(tmp_path / "src"), tmp_path / "dst"
    dst.mkdir()
    (dst / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="dst: expected a new or an empty directory, found a full one"):
        conversion.convert(src, dst)
    assert (dst / "mine").read_text() == "precious"
    with pytest.raises(CheckpointError, match="found a file"):
        conversion.convert(src, dst / "mine")
    (dst / "mine").unlink()
    conversion.convert(src, dst)
    assert converted.is_converted(dst)


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    src, dst = tiny.write(tmp_path / "src"), tmp_path / "dst"

    def interrupted(directory, params, config):
        assert directory != dst
        assert not dst.exists()
        (directory / "params").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(converted, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        conversion.convert(src, dst)
    assert list(tmp_path.iterdir()) == [src]


def test_a_damaged_conversion_is_named(tmp_path):
    dst = tmp_path / "dst"
    conversion.convert(tiny.write(tmp_path / "src"), dst)
    config = (dst / "config.json").read_text()
    (dst / "config.json").write_text(json.dumps(tiny.CONFIG | {"intermediate_size": 32, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="leaves do not fit the config") as e:
        source.load(dst)
    assert "unexpected leaf ['head']" in str(e.value)
    assert "['gdn']['gate_up']: expected uint16[3, 64, 16], found uint16[3, 48, 16]" in str(e.value)
    (dst / "config.json").write_text(config)
    cut = next(p for p in sorted((dst / "params" / "ocdbt.process_0" / "d").iterdir()) if p.stat().st_size > 20)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(
        CheckpointError, match=rf"dst: damaged:\n  params/.*/{cut.name}: expected {cut.stat().st_size + 20} bytes, found {cut.stat().st_size}"
    ):
        source.load(dst)
    shutil.rmtree(dst / "params")
    with pytest.raises(CheckpointError, match=r"params/_METADATA: expected \d+ bytes, found no file"):
        source.load(dst)
    (dst / "qjax.json").write_text('{"format": 2}')
    with pytest.raises(CheckpointError, match=r"qjax\.json: expected format 1, found 2"):
        source.load(dst)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/dst: expected to write \d+ bytes there, found: .*Not a directory"):
        conversion.convert(tiny.write(tmp_path / "src"), tmp_path / "file" / "dst")


def test_an_empty_directory_is_filled_and_stays_itself(tmp_path, monkeypatch):
    """It may be a mount point, which no rename can replace, or where a shell stands."""
    src, dst = tiny.write(tmp_path / "src"), tmp_path / "dst"
    (dst / "lost+found").mkdir(parents=True)  # of a new file system
    monkeypatch.chdir(dst)
    number, moved, rename = dst.stat().st_ino, [], Path.rename

    def recorded(path, target):
        assert path.parent.parent == dst
        moved.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", recorded)
    conversion.convert(src, ".")
    assert dst.stat().st_ino == number
    assert {p.name for p in Path().iterdir()} == {*moved, "lost+found"}  # the control: a replaced directory would be empty here
    assert moved[-1] == converted.MARKER
    assert_bits_equal(source.load(dst).params, source.load(src).params)


def test_a_move_that_fails_half_way_is_undone(tmp_path, monkeypatch):
    src, dst = tiny.write(tmp_path / "src"), tmp_path / "dst"
    dst.mkdir()
    rename, moved = Path.rename, []

    def failing(path, target):
        if target.parent == dst and len(moved) == 2:
            raise OSError(5, "Input/output error")
        moved.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match=r"dst: expected to write \d+ bytes there, found: Input/output error"):
        conversion.convert(src, dst)
    assert len(moved) == 4
    assert list(dst.iterdir()) == []


def test_what_dead_conversions_left_is_removed_and_said(tmp_path):
    src, dst, said = tiny.write(tmp_path / "src"), tmp_path / "dst", []
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = [tmp_path / f".dst.partial-{dead.pid}-1", dst / f".partial-{dead.pid}-1", tmp_path / f".dst.partial-{os.getpid()}-1"]
    other = [tmp_path / f".dst.partial-{os.getppid()}-1", tmp_path / f".x.partial-{dead.pid}-1", tmp_path / ".dst.partial-mine"]
    for path in left + other:
        (path / "params").mkdir(parents=True)
    conversion.convert(src, dst, said.append)
    assert sorted(said) == sorted(f"{path}: removed, left by a conversion that was ended early" for path in left)
    assert set(tmp_path.iterdir()) == {src, dst, *other}
    assert converted.is_converted(dst)


def test_another_conversion_at_work_inside_keeps_its_place(tmp_path):
    src, dst = tiny.write(tmp_path / "src"), tmp_path / "dst"
    (dst / f".partial-{os.getppid()}-1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="expected a new or an empty directory"):
        conversion.convert(src, dst)
    assert [p.name for p in dst.iterdir()] == [f".partial-{os.getppid()}-1"]


def test_too_little_space_is_said_before_anything_is_read(tmp_path, monkeypatch):
    src = tiny.write(tmp_path / "src")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 99, 99))
    monkeypatch.setattr(source, "load", lambda path: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=r"dst: expected to write \d+ bytes there, found: 99 bytes free"):
        conversion.convert(src, tmp_path / "new" / "dst")
    assert list(tmp_path.iterdir()) == [src]


def test_ctrl_c_inside_counts_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("after it")
    assert done == ["after it"]
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise OSError
    with pytest.raises(OSError, match="alone"), deferred():
        raise OSError("alone")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
