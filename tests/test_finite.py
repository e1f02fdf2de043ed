"""Weights that are not finite, or would not be as they are held, are named with their counts."""

import ml_dtypes
import numpy as np
import pytest

from qjax.model import source
from qjax.model.checkpoint import read_tensors
from qjax.model.config import ModelConfig
from qjax.model.values import CheckpointError
from tests import tiny_checkpoint as tiny

CONFIG = ModelConfig.from_dict(tiny.CONFIG)
TIED = ModelConfig.from_dict(tiny.CONFIG | {"tie_word_embeddings": True})


def test_numbers_that_are_not_finite_are_named_with_their_counts(tmp_path):
    t = tiny.tensors()
    read_tensors(tiny.write(tmp_path / "c", t), CONFIG)
    t["model.norm.weight"][[1, 3]] = np.nan, np.inf
    t["model.layers.2.linear_attn.A_log"][0] = -np.inf
    t["lm_head.weight"][511, 15] = -np.nan
    with pytest.raises(CheckpointError) as e:
        source.load(tiny.write(tmp_path / "c", t))
    assert sorted(str(e.value).split("\n  ")) == [
        f"{tmp_path / 'c'}: weights that no forward pass can use:",
        "lm_head.weight: expected 8,192 finite numbers, found 1 that are NaN or infinite",
        "model.layers.2.linear_attn.A_log: expected 4 finite numbers, found 1 that are NaN or infinite",
        "model.norm.weight: expected 16 finite numbers, found 2 that are NaN or infinite",
    ]


def test_a_tied_head_and_numbers_that_are_not_finite_come_in_one_error(tmp_path):
    t = tiny.tensors()
    t["model.norm.weight"][0] = np.nan
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the embedding .*\n  model\.norm\.weight: .* found 1 that are NaN"):
        read_tensors(tiny.write(tmp_path / "c", t), TIED)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_bfloat16_rounds_to_infinity_are_named(tmp_path, sign):
    t = tiny.tensors(dtype=np.float32)
    edge = np.array([0x7F7F7FFF, 0x7F7F8000], np.uint32).view(np.float32) * np.float32(sign)
    with np.errstate(over="ignore"):
        assert np.isfinite(edge.astype(ml_dtypes.bfloat16).astype(np.float32)).tolist() == [True, False]
    t["model.norm.weight"][0] = t["model.layers.1.linear_attn.A_log"][0] = edge[0]
    t["model.layers.1.linear_attn.A_log"][1] = edge[1]  # is held in float32
    read_tensors(tiny.write(tmp_path / "c", t), CONFIG)
    t["model.norm.weight"][1:3] = edge[1], np.inf
    with pytest.raises(CheckpointError, match=r"norm\.weight: expected 16 .* found 1 that are NaN or infinite and 1 beyond the range of bfloat16"):
        read_tensors(tiny.write(tmp_path / "c", t), CONFIG)
    t["model.norm.weight"][2] = 0
    assert source.load(tiny.write(tmp_path / "c", t), dtype="float32").config.dtype == "float32"


def test_half_precision_infinities_are_named(tmp_path):
    t = tiny.tensors(dtype=np.float16)
    t["model.norm.weight"][:] = np.finfo(np.float16).max
    read_tensors(tiny.write(tmp_path / "c", t), CONFIG)
    t["model.norm.weight"][5] = np.inf
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .* found 1 that are NaN or infinite"):
        read_tensors(tiny.write(tmp_path / "c", t), CONFIG)
