"""Checkpoints: what is read lands in its rows bit for bit, and what does not fit is named."""

import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qjax.model import source
from qjax.model.checkpoint import CheckpointError, read_tensors
from qjax.model.config import ModelConfig
from qjax.model.weights import spec, stack
from tests import tiny_checkpoint as tiny
from tests.bits import assert_bits_equal

CONFIG = ModelConfig.from_dict(tiny.CONFIG)
TIED = ModelConfig.from_dict(tiny.CONFIG | {"tie_word_embeddings": True})


def bits(x):
    return np.asarray(x).view(np.uint16)


def test_every_tensor_lands_in_its_rows():
    t = tiny.tensors()
    p = stack(t, CONFIG)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), p) == jax.tree.map(lambda s: (s.shape, s.dtype), spec(CONFIG))
    assert (p["embed"].dtype, p["norm"].dtype, p["head"].dtype) == (ml_dtypes.bfloat16,) * 3
    for ours, name in {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}.items():
        assert_bits_equal(p[ours], t[name])
    for layer in range(3):
        at, g = f"model.layers.{layer}.", {k: v[layer] for k, v in p["gdn"].items()}
        parts = [t[f"{at}linear_attn.in_proj_{x}.weight"] for x in ("qkv", "z", "b", "a")]
        assert_bits_equal(g["inputs"], bits(np.concatenate(parts)))
        assert_bits_equal(g["conv"], bits(t[at + "linear_attn.conv1d.weight"])[:, 0])
        assert_bits_equal(g["A_log"], t[at + "linear_attn.A_log"])
        assert_bits_equal(g["norm"], t[at + "linear_attn.norm.weight"])
        assert_bits_equal(g["dt_bias"], bits(t[at + "linear_attn.dt_bias"]))
        assert_bits_equal(g["out"], bits(t[at + "linear_attn.out_proj.weight"]))
    at, a = "model.layers.3.", {k: v[0] for k, v in p["attention"].items()}
    assert_bits_equal(a["inputs"], bits(np.concatenate([t[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"])))
    for ours, name in {"q_norm": "q_norm", "k_norm": "k_norm", "out": "o_proj"}.items():
        assert_bits_equal(a[ours], bits(t[f"{at}self_attn.{name}.weight"]))
    for layer, block in ((2, {k: v[2] for k, v in p["gdn"].items()}), (3, a)):
        at = f"model.layers.{layer}."
        assert_bits_equal(block["input_norm"], bits(t[at + "input_layernorm.weight"]))
        assert_bits_equal(block["post_norm"], bits(t[at + "post_attention_layernorm.weight"]))
        assert_bits_equal(block["gate_up"], bits(np.concatenate([t[at + "mlp.gate_proj.weight"], t[at + "mlp.up_proj.weight"]])))
        assert_bits_equal(block["down"], bits(t[at + "mlp.down_proj.weight"]))
    assert all(leaf.ctypes.data % 64 == 0 for leaf in jax.tree.leaves(p))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_files_give_what_the_tensors_give(tmp_path, prefix, shards):
    aside = {"model.visual.blocks.0.attn.qkv.weight": np.ones((3, 2), np.float32), "mtp.fc.weight": np.ones((16, 32), np.float32)}
    directory = tiny.write(tmp_path / "c", tiny.tensors(prefix) | aside, shards=shards)
    assert_bits_equal(read_tensors(directory, CONFIG), stack(tiny.tensors(), CONFIG))


@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_other_float_types_are_converted_but_a_log_and_the_gdn_norm_keep_float32(tmp_path, stored):
    t = tiny.tensors(dtype=stored)
    p = read_tensors(tiny.write(tmp_path / "c", t), CONFIG)
    assert_bits_equal(p["gdn"]["A_log"][1], t["model.layers.1.linear_attn.A_log"])
    assert_bits_equal(p["gdn"]["norm"][1], t["model.layers.1.linear_attn.norm.weight"])
    rounded = t["model.layers.1.linear_attn.A_log"].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (p["gdn"]["A_log"][1] != rounded).any()  # the control: rounding would show
    assert_bits_equal(p["gdn"]["dt_bias"][1], bits(t["model.layers.1.linear_attn.dt_bias"].astype(ml_dtypes.bfloat16)))
    assert_bits_equal(p["embed"], t["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16))


def test_float32_is_held_as_float32(tmp_path):
    t = tiny.tensors(dtype=np.float32)
    model = source.load(tiny.write(tmp_path / "c", t), dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(model.params)} == {np.dtype("float32")}
    assert_bits_equal(model.params["gdn"]["out"][2], t["model.layers.2.linear_attn.out_proj.weight"])


def test_all_faults_come_in_one_error(tmp_path):
    t = tiny.tensors()
    del t["model.layers.2.linear_attn.A_log"], t["model.norm.weight"]
    t["model.layers.3.self_attn.q_proj.weight"] = np.zeros((64, 16), ml_dtypes.bfloat16)
    t["model.layers.0.mlp.down_proj.weight"] = np.zeros((16, 24), np.int8)
    t["model.layers.4.input_layernorm.weight"] = t["model.language_model.embed_tokens.weight"] = np.zeros((16,), ml_dtypes.bfloat16)
    directory = tiny.write(tmp_path / "c", t)
    with pytest.raises(CheckpointError) as e:
        read_tensors(directory, CONFIG)
    for part in (
        f"{directory}: tensors do not fit the config (6 faults)",
        "missing tensor layers.2.linear_attn.A_log [4]",
        "missing tensor norm.weight [16]",
        "model.layers.3.self_attn.q_proj.weight: expected shape [128, 16], found [64, 16]",
        "model.layers.0.mlp.down_proj.weight: expected dtype float32, float16 or bfloat16, found I8",
        "unexpected tensor model.layers.4.input_layernorm.weight [16]",
        "expected once, found as model.",
    ):
        assert part in str(e.value)


def test_sizes_that_do_not_fit_the_tensors_are_named(tmp_path):
    directory = tiny.write(tmp_path / "c", config=tiny.CONFIG | {"intermediate_size": 32})
    with pytest.raises(CheckpointError, match=r"12 faults") as e:
        source.load(directory)
    assert "model.layers.1.mlp.gate_proj.weight: expected shape [32, 16], found [24, 16]" in str(e.value)


def test_a_tied_head_may_repeat_the_embedding_and_nothing_else(tmp_path):
    t = tiny.tensors(head=False)
    plain = read_tensors(tiny.write(tmp_path / "plain", t), TIED)
    assert "head" not in plain
    t["lm_head.weight"] = t["model.embed_tokens.weight"].copy()
    assert_bits_equal(read_tensors(tiny.write(tmp_path / "same", t), TIED), plain)
    t["lm_head.weight"][3, 5] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected the embedding .* found 1 rows that differ"):
        read_tensors(tiny.write(tmp_path / "other", t), TIED)
    t["lm_head.weight"] = t["lm_head.weight"][:-1]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected shape \[512, 16\], found \[511, 16\]"):
        read_tensors(tiny.write(tmp_path / "short", t), TIED)
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head\.weight"):
        read_tensors(tmp_path / "plain", CONFIG)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -5000])
def test_a_truncated_file_is_named_with_its_lengths(tmp_path, keep):
    path = tiny.write(tmp_path / "c") / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError) as e:
        source.load(tmp_path / "c")
    assert str(path) in str(e.value)
    assert f"expected {len(whole)} bytes, found {len(whole) + keep}" in str(e.value) or keep >= 0
    assert "found" in str(e.value)


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    path = tiny.write(tmp_path / "c") / "model.safetensors"
    whole = path.read_bytes()
    for content, message in (
        (b"<html>not found</html>", "no header length"),
        (whole[:8] + b"#" * (len(whole) - 8), "none"),
        (whole + b"x", "too long"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            source.load(tmp_path / "c")


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(CheckpointError, match=r'expected a directory, "embedded" or .*found nothing there'):
        source.load(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="found a file"):
        source.load(tmp_path / "file")
    for name, found in (("", r"model: .*found an empty name"), ("x" * 5000, r"^x{60}\.\.\. \(5,000 characters\): .*found nothing there$")):
        with pytest.raises(CheckpointError, match=found):
            source.load(name)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON file, found none"):
        source.load(tmp_path)
    directory = tiny.write(tmp_path / "c")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*found .*pytorch_model\.bin"):
        source.load(directory)
    for bad in ("random:", "random:0.8b@", "random:0.8b@x", "random:0.8b@0", "random:7b", "random:0.8b@" + "9" * 5000, "random:0.8b@999999999"):
        with pytest.raises(CheckpointError, match="expected"):
            source.load(bad)


def test_shards_are_checked_against_their_index(tmp_path):
    directory = tiny.write(tmp_path / "c", shards=3)
    lost = directory / "model-00002-of-00003.safetensors"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(CheckpointError, match=r"found no model-00002-of-00003\.safetensors"):
        read_tensors(directory, CONFIG)
    lost.write_bytes(content)
    twice = load_file(directory / "model-00003-of-00003.safetensors")
    save_file(load_file(lost) | dict(list(twice.items())[:1]), lost)
    with pytest.raises(CheckpointError, match=r"00003.*expected .* in one file, found it in an earlier one too"):
        read_tensors(directory, CONFIG)
    for weight_map, message in (({"a": "../x.safetensors"}, r"found \.\./x\.safetensors"), ([], "weight_map")):
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            read_tensors(directory, CONFIG)


def test_reading_takes_one_copy_of_the_model(tmp_path):
    big = tiny.CONFIG | {"num_hidden_layers": 64, "layer_types": ["linear_attention"] * 64}
    block = {k.removeprefix("model.layers.0."): v for k, v in tiny.tensors().items() if k.startswith("model.layers.0.")}
    t = {k: v for k, v in tiny.tensors().items() if ".layers." not in k} | {f"model.layers.{i}.{k}": v for i in range(64) for k, v in block.items()}
    config = ModelConfig.from_dict(big)
    directory = tiny.write(tmp_path / "c", t, big)
    read_tensors(directory, config)
    tracemalloc.start()
    p = read_tensors(directory, config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(p))
    assert size < peak < 1.5 * size + 500_000  # the names of 900 tensors take some of it


def test_source_gives_the_parts_of_a_directory(tmp_path):
    model = source.load(tiny.write(tmp_path / "named"))
    assert (model.name, model.config, model.generation) == ("named", CONFIG, {"temperature": 0.7, "top_k": 20})
    assert set(model.tokenizer.stop_ids) == {model.tokenizer.special["<|im_end|>"], model.tokenizer.special["<|endoftext|>"], 0, 3, 5}
    assert model.tokenizer.decode(model.template.render([{"role": "user", "content": "x"}])) == "<|im_start|>user\nx<|im_end|>\n"
    assert model.load_seconds > 0
    assert_bits_equal(model.params, stack(tiny.tensors(), CONFIG))


def test_source_refuses_small_files_that_do_not_fit(tmp_path):
    directory = tiny.write(tmp_path / "c", config=tiny.CONFIG | {"vocab_size": 300})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected ids below vocab_size = 300, found \d+"):
        source.load(directory)
    for name, content, message in (
        ("chat_template.jinja", "{% if %}", r"chat_template\.jinja: chat template: expected Jinja, found in line 1"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: expected UTF-8 text"),
        ("generation_config.json", '{"top_p": "high"}', r"generation_config\.json: top_p: expected a number, found 'high'"),
        ("generation_config.json", '{"eos_token_id": [9999]}', r"eos_token_id: expected ids below \d+, found \[9999\]"),
        ("generation_config.json", '{"eos_token_id": "x"}', r"generation_config\.json: eos_token_id"),
        ("generation_config.json", '{"temperature": -1}', r"generation_config\.json: temperature must be .*, not -1"),
        ("generation_config.json", '{"temperature": NaN, "top_p": 0, "top_k": 2.5}', r"_config\.json: temperature: .*nan; top_k must.*; top_p must"),
        ("generation_config.json", '{"temperature": 1' + "0" * 400 + "}", r"generation_config\.json: temperature: expected a number, found 100"),
        ("generation_config.json", '{"do_sample": "false"}', r"generation_config\.json: do_sample: expected true or false, found 'false'"),
        ("generation_config.json", "[" * 200_000, r"generation_config\.json: expected JSON, found brackets"),
        ("generation_config.json", "{", r"generation_config\.json: expected JSON"),
        ("tokenizer.json", "{}", r"tokenizer\.json: expected a tokenizer"),
    ):
        directory = tiny.write(tmp_path / "c")
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(CheckpointError, match=message):
            source.load(directory)
    (tiny.write(tmp_path / "c") / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer, found no such file"):
        source.load(directory)


def test_a_template_may_stand_in_the_tokenizer_config_or_nowhere(tmp_path):
    directory = tiny.write(tmp_path / "c")
    (directory / "chat_template.jinja").unlink()
    assert source.load(directory).template is None
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    model = source.load(directory)
    assert model.tokenizer.decode(model.template.render([{"content": "x"}])) == "x"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": "x"}]}))
    with pytest.raises(CheckpointError, match="expected one template, found list"):
        source.load(directory)


def test_a_model_without_full_attention_is_refused_before_its_weights(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("weights were made or read")

    monkeypatch.setattr(source.weights, "random", never)
    monkeypatch.setattr(source, "read_tensors", never)
    with pytest.raises(ValueError, match="expected at least one full-attention layer, found 2 layers of linear attention"):
        source.load("random:0.8b@2")
    with pytest.raises(ValueError, match="expected at least one full-attention layer, found 4 layers of linear attention"):
        source.load(tiny.write(tmp_path / "c", config=tiny.CONFIG | {"layer_types": ["linear_attention"] * 4}))
    with pytest.raises(AssertionError, match="weights were made"):
        source.load("random:0.8b@4")
