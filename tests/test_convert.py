"""Conversion: the same bits in another form, whole or absent, and damage is named."""

import json
import shutil

import jax
import pytest

from qjax.model import convert as conversion
from qjax.model import converted, source
from qjax.model.checkpoint import CheckpointError
from qjax.model.config import ModelConfig
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
