"""Configs: the published sizes, what from_dict reads, and what it refuses."""

import dataclasses
import json

import jax
import pytest

from qjax.model.config import FULL, LINEAR, CheckpointError, ModelConfig
from qjax.model.weights import spec
from tests.tiny_checkpoint import CONFIG

# hidden, layers, intermediate, q heads, kv heads, GDN key heads, GDN value heads, tied, conv channels
PUBLISHED = {
    "qwen3.5-0.8b": (1024, 24, 3584, 8, 2, 16, 16, True, 6144),
    "qwen3.5-4b": (2560, 32, 9216, 16, 4, 16, 32, True, 8192),
    "qwen3.5-9b": (4096, 32, 12288, 16, 4, 16, 32, False, 8192),
    "qwen3.8-27b": (5120, 64, 17408, 24, 4, 16, 48, False, 10240),
}
ROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
TEXT_27B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "intermediate_size": 17408,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "output_gate_type": "swish",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "eos_token_id": 248044,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "rope_parameters": ROPE,
}
NESTED_27B = {"model_type": "qwen3_5", "dtype": "bfloat16", "tie_word_embeddings": False, "text_config": TEXT_27B, "vision_config": {"depth": 27}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name):
    c = ModelConfig.preset(name)
    assert (c.hidden, c.layers, c.intermediate, c.heads, c.kv_heads, c.key_heads, c.value_heads, c.tied, c.conv_channels) == PUBLISHED[name]
    assert (c.head_dim, c.key_dim, c.value_dim, c.conv, c.vocab, c.context, c.mtp_layers) == (256, 128, 128, 4, 248320, 262144, 1)
    assert (c.rope_theta, c.rotary_dims, c.mrope_section, c.eps, c.eos, c.dtype) == (1e7, 64, (11, 11, 10), 1e-6, (248044,), "bfloat16")
    assert [i for i, kind in enumerate(c.layer_types) if kind == FULL] == list(range(3, c.layers, 4))
    assert (c.period, c.gdn_layers, c.attention_layers) == (4, 3 * c.layers // 4, c.layers // 4)
    assert ModelConfig.preset(name.split("-")[1].upper()) == c


def test_parameters_of_the_27b_are_26_90_billion():
    count = sum(leaf.size for leaf in jax.tree.leaves(spec(ModelConfig.preset("27b"))))
    assert round(count / 1e9, 2) == 26.90


def test_unknown_preset_is_named_with_the_known_ones():
    with pytest.raises(CheckpointError, match=r"qwen3\.5-0\.8b, .*qwen3\.8-27b, found '2b'"):
        ModelConfig.preset("2b")


def test_nested_and_flat_config_give_the_preset():
    preset = ModelConfig.preset("27b")
    assert ModelConfig.from_dict(NESTED_27B) == dataclasses.replace(preset, model_type="qwen3_5")
    flat = ModelConfig.from_dict(TEXT_27B)
    assert flat == preset
    assert hash(flat) == hash(preset)


def test_outer_tie_wins_over_the_inner_one():
    assert ModelConfig.from_dict(NESTED_27B | {"tie_word_embeddings": True}).tied
    inner_only = {k: v for k, v in NESTED_27B.items() if k != "tie_word_embeddings"}
    assert not ModelConfig.from_dict(inner_only).tied
    assert ModelConfig.from_dict(inner_only | {"text_config": TEXT_27B | {"tie_word_embeddings": True}}).tied


@pytest.mark.parametrize(("stated", "used"), [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32"), (None, "bfloat16")])
def test_dtype(stated, used):
    assert ModelConfig.from_dict(CONFIG | {"dtype": stated}).dtype == used
    assert ModelConfig.from_dict({k: v for k, v in CONFIG.items() if k != "dtype"} | {"torch_dtype": stated}).dtype == used


def test_older_rope_keys_are_read():
    d = {k: v for k, v in CONFIG.items() if k != "rope_parameters"} | {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "rope_scaling": None}
    c = ModelConfig.from_dict(d)
    assert (c.rope_theta, c.rotary_dims, c.mrope_section) == (5e6, 8, ())


def test_eos_may_be_a_list_or_absent():
    assert ModelConfig.from_dict(CONFIG | {"eos_token_id": [3, 5]}).eos == (3, 5)
    assert ModelConfig.from_dict(CONFIG | {"eos_token_id": None}).eos == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen4_exp"}, "expected one of qwen3_5, qwen3_5_text, found 'qwen4_exp'"),
        ({"model_type": None}, "model_type: .*found None"),
        ({"text_config": TEXT_27B | {"model_type": "qwen3_5_moe_text"}}, "found 'qwen3_5_moe_text'"),
        ({"text_config": []}, "text_config: expected a JSON object, found list"),
        ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, "rope_type: expected 'default', found 'yarn'"),
        ({"rope_parameters": None}, "expected rope_theta"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta: expected a number, found 'big'"),
        ({"rope_parameters": ROPE}, r"mrope_section: expected a sum of 2 .* found \[11, 11, 10\]"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2.0}}, "partial_rotary_factor: .*at most 1, found 2.0"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.2}}, "rotary dims: .*found 3"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        ({"attention_bias": True, "attn_output_gate": False}, "attention_bias: .*; attn_output_gate: expected True, found False"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: expected 'float32'"),
        ({"dtype": "float8_e4m3fn"}, "dtype: .*found 'float8_e4m3fn'"),
        ({"hidden_size": "16", "vocab_size": 0}, "vocab_size: .*found 0; hidden_size: expected a positive integer, found '16'"),
        ({"num_attention_heads": 3, "linear_num_value_heads": 5}, "num_attention_heads: .*found 3; linear_num_value_heads: .*found 5"),
        ({"num_hidden_layers": 5}, "layer_types: expected num_hidden_layers = 5 entries, found 4"),
        ({"num_hidden_layers": "4", "layer_types": None}, "num_hidden_layers: expected a positive integer, found '4'"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: .*found 0"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types: .*found 'sliding_attention'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: .*found 0.0"),
        ({"eos_token_id": "<|im_end|>"}, "eos_token_id: .*found '<|im_end|>'"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers: .*found -1"),
    ],
)
def test_what_no_forward_pass_can_run_is_refused(change, message):
    ModelConfig.from_dict(CONFIG)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(CONFIG | change)


HUGE = 10**400  # no float can hold it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": ["bfloat16"]}, r"dtype: expected bfloat16, float16 or float32, found \['bfloat16'\]"),
        ({"dtype": {}}, "dtype: expected bfloat16, float16 or float32, found {}"),
        ({"rms_norm_eps": HUGE}, r"rms_norm_eps: expected a number, found 1000.*\.\.\. \(401 characters\)"),
        ({"rms_norm_eps": 1e-50}, "rms_norm_eps: expected a small positive number, found 1e-50"),
        ({"rope_parameters": {"rope_theta": HUGE}}, "rope_theta: expected a number, found 1000"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta: expected a number, found inf"),
        ({"rope_parameters": {"rope_theta": 1e300}}, r"rope_theta: expected a number, found 1e\+300"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": float("inf")}}, "partial_rotary_factor: expected .*, found inf"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": float("nan")}}, "partial_rotary_factor: expected .*, found nan"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": HUGE}}, "partial_rotary_factor: expected .*, found 1000"),
        ({"rope_parameters": []}, r"rope_parameters: expected a JSON object, found \[\]"),
        ({"rope_parameters": {"rope_theta": 1e7, "mrope_section": [1, "1"]}}, r"mrope_section: expected a list of whole numbers, found \[1, '1'\]"),
        ({"rope_parameters": {"rope_theta": 1e7, "mrope_section": 2}}, "mrope_section: expected a list of whole numbers, found 2"),
        ({"rope_parameters": {"rope_theta": 1e7, "mrope_section": [4, -2]}}, "mrope_section: expected a list of whole numbers"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: expected true or false, found 'false'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, found 1"),
        ({"attention_bias": 0}, "attention_bias: expected False, found 0"),
        ({"hidden_size": 10**30}, "hidden_size: expected a positive integer of at most 2,147,483,647, found 1000"),
        ({"vocab_size": 10**13}, "vocab_size: expected a positive integer of at most 2,147,483,647, found 10000000000000"),
        ({"head_dim": HUGE}, "head_dim: expected a positive integer of at most"),
        ({"hidden_size": True}, "hidden_size: expected a positive integer, found True"),
        ({"num_hidden_layers": 2**31 - 1, "layer_types": None}, "num_hidden_layers: expected a positive integer of at most 10,000"),
        ({"layer_types": None, "full_attention_interval": True}, "full_attention_interval: expected a positive integer, found True"),
        ({"layer_types": ["linear_attention", {}]}, "layer_types: expected a list of linear_attention and full_attention, found"),
        ({"mtp_num_hidden_layers": []}, r"mtp_num_hidden_layers: expected a number of layers, found \[\]"),
        ({"eos_token_id": 10**12}, "eos_token_id: expected a token id or a list of them, found 1000000000000"),
        ({"eos_token_id": -1, "tie_word_embeddings": "no"}, "tie_word_embeddings: .*'no'; eos_token_id: .*found -1"),
        ({"model_type": ["qwen3_5"]}, r"model_type: .*found \['qwen3_5'\]"),
        ({"model_type": "x" * 5000}, r"model_type: .*found 'xx[^(]{50,80}\.\.\. \(5,002 characters\)"),
    ],
)
def test_a_value_of_a_wrong_kind_is_one_error_with_file_and_key(tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    ModelConfig.from_file(path)
    path.write_text(json.dumps(CONFIG | change))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}") as e:
        ModelConfig.from_file(path)
    assert len(str(e.value)) < 500


def test_null_is_the_default():
    absent = {k: v for k, v in CONFIG.items() if k not in ("tie_word_embeddings", "rms_norm_eps", "eos_token_id")}
    null = CONFIG | dict.fromkeys(("tie_word_embeddings", "rms_norm_eps", "eos_token_id", "mtp_num_hidden_layers"))
    assert ModelConfig.from_dict(null) == ModelConfig.from_dict(absent)


def test_missing_keys_are_all_named():
    with pytest.raises(CheckpointError, match="expected vocab_size, head_dim, found no such key"):
        ModelConfig.from_dict({k: v for k, v in CONFIG.items() if k not in ("vocab_size", "head_dim")})


def test_file_errors_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON file, found none"):
        ModelConfig.from_file(path)
    path.write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config\.json: expected JSON"):
        ModelConfig.from_file(path)
    path.write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json: expected JSON, found brackets nested too deeply"):
        ModelConfig.from_file(path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: .*found list"):
        ModelConfig.from_file(path)
    path.write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    with pytest.raises(CheckpointError, match=r"config\.json: .*'llama'"):
        ModelConfig.from_file(path)
    path.write_text(json.dumps(CONFIG))
    assert ModelConfig.from_file(path).layers == 4


def test_layers_are_cut_and_continued_by_the_period():
    c = ModelConfig.preset("0.8b")
    assert c.with_layers(2).layer_types == (LINEAR, LINEAR)
    assert c.with_layers(2).period == 1
    assert c.with_layers(5).layer_types == (LINEAR, LINEAR, LINEAR, FULL, LINEAR)
    assert c.with_layers(5).period == 5
    assert c.with_layers(28).layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 7
    assert c.with_layers(24) == c
    for wrong in (0, 10**9):
        with pytest.raises(CheckpointError, match=f"at most 10,000, found {wrong}"):
            c.with_layers(wrong)
