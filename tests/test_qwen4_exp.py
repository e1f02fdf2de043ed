"""The layout of the qwen4_exp family: its published byte counts, leaf by leaf, and configs that cannot be read."""

import pytest

from qjax.model.config import CheckpointError, ModelConfig
from qjax.model.qwen4_exp import PRESETS, layout

VALUES = PRESETS["qwen3.8-flash-next"]


def test_flash_next_leaf_by_leaf():
    of = layout(VALUES)
    assert {s.name: (s.shape, s.dtype, s.nbytes) for s in of.sections} == {
        "gdn.S": ((36, 48, 128, 128), "float32", 113_246_208),
        "gdn.conv": ((36, 10240, 3), "bfloat16", 2_211_840),
        "ple.conv": ((1, 10240, 9), "bfloat16", 184_320),
        "ple.tokens": ((1, 2), "int64", 16),
        "mtp.h_last": ((4, 2560), "bfloat16", 20_480),
    }
    assert {v.name: (v.layers, v.heads, v.dim, v.nbytes) for v in of.views} == {
        "K": (12, 2, 256, 12_288),
        "V": (12, 2, 256, 12_288),
        "idx": (12, 1, 128, 3_072),
        "mtp.K": (1, 2, 256, 1_024),
        "mtp.V": (1, 2, 256, 1_024),
        "mtp.idx": (1, 1, 128, 256),
    }
    assert {s.name: s.shape for s in of.open} == {"gdn.u": (36, 64, 10240), "gdn.b": (36, 48, 64), "gdn.a": (36, 48, 64)}
    assert (of.section_bytes, of.row_bytes, of.grid) == (115_662_864, 29_952, 4096)


@pytest.mark.parametrize("sparse", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
def test_layer_types_by_any_name(sparse):
    assert layout(VALUES | {"layer_types": (["linear_attention"] * 3 + [sparse]) * 12}) == layout(VALUES)


def test_without_the_draft_layer():
    of = layout({key: value for key, value in VALUES.items() if key != "mtp_num_hidden_layers"})
    assert [leaf.name for leaf in (*of.sections, *of.views)] == ["gdn.S", "gdn.conv", "ple.conv", "ple.tokens", "K", "V", "idx"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None, "ngram_size": "3"}, "hidden_size: expected a positive integer, found None; ngram_size: expected .* found '3'"),
        ({"ple_layer_ids": 2}, "ple_layer_ids: expected a list of layers, found 2"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers: expected a number of layers, found -1"),
        ({"layer_types": ["linear_attention"]}, "layer_types: expected a list of num_hidden_layers = 48 entries"),
        ({"layer_types": ["linear_attention"] * 47 + ["mamba"]}, "layer_types: expected linear_attention or full_attention, found mamba"),
        ({"full_attention_interval": 0}, "full_attention_interval: expected a positive integer, found 0"),
        ({"text_config": []}, "text_config: expected a JSON object, found list"),
    ],
)
def test_faults_are_named(change, message):
    with pytest.raises(CheckpointError, match=message):
        layout(VALUES | change)


def test_the_model_itself_is_refused():
    with pytest.raises(CheckpointError, match="found 'qwen4_exp_text'"):
        ModelConfig.from_dict(VALUES)
