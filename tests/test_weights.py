"""Random weights: which numbers they depend on, and that their scales are what a test of states needs."""

import dataclasses
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from qjax.model import source
from qjax.model.checkpoint import CheckpointError
from qjax.model.config import FULL, LINEAR, ModelConfig
from qjax.model.weights import layer_spec, layers, random, spec
from tests import tiny_checkpoint as tiny
from tests.bits import assert_bits_equal

CONFIG = ModelConfig.from_dict(tiny.CONFIG)
WIDE = dataclasses.replace(CONFIG, hidden=256, intermediate=128, value_heads=64, key_heads=32, vocab=1024, dtype="float32")


def test_they_have_the_form_that_is_held():
    for config in (CONFIG, WIDE, dataclasses.replace(CONFIG, tied=True), CONFIG.with_layers(2)):
        made = jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(partial(random, config, 0)))
        assert made == jax.tree.map(lambda s: (s.shape, s.dtype), spec(config))
    assert spec(CONFIG.with_layers(2))["attention"]["down"].shape == (0, 16, 24)


def test_a_layers_own_weights_are_the_stacks_memory():
    """On a CPU the layers' matrices lie in the stacks: no second copy of the model."""
    config = dataclasses.replace(CONFIG.with_layers(8), hidden=256, intermediate=128)
    params = random(config, 3)
    seen = {"gdn": 0, "attention": 0}
    found = list(layers(params, config))
    assert [kind for kind, _, _ in found] == ["gdn" if kind == LINEAR else "attention" for kind in config.layer_types]
    for kind, at, own in found:
        assert (at, at.dtype) == (seen[kind], np.int32)
        seen[kind] += 1
        assert {name: (a.shape, a.dtype) for name, a in own.items()} == {name: (s.shape, s.dtype) for name, s in layer_spec(config, kind).items()}
        for name, a in own.items():
            stack = params[kind][name]
            one = np.asarray(stack)[at]
            assert_bits_equal(np.asarray(a).view(stack.dtype), one.T if name == "conv" else one)
            if name in ("inputs", "out", "gate_up", "down"):
                assert a.unsafe_buffer_pointer() == stack.unsafe_buffer_pointer() + int(at) * one.nbytes


def test_they_depend_on_seed_leaf_and_layer_only():
    p = random(CONFIG, 3)
    assert_bits_equal(random(CONFIG, 3), p)
    longer = random(CONFIG.with_layers(8), 3)
    assert_bits_equal(jax.tree.map(lambda x: x[:3], longer["gdn"]), p["gdn"])
    assert_bits_equal(longer["embed"], p["embed"])
    other = random(CONFIG, 4)
    leaves = [(a, b) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(other), strict=True)]
    assert all((np.asarray(a) != np.asarray(b)).any() for a, b in leaves)
    assert (np.asarray(p["gdn"]["out"][0]) != np.asarray(p["gdn"]["out"][1])).any()
    for bad in (-1, 2**32):
        with pytest.raises(CheckpointError, match=f"seed: .*found {bad}"):
            random(CONFIG, bad)


def test_bfloat16_is_the_rounded_float32():
    exact, rounded = random(dataclasses.replace(CONFIG, dtype="float32"), 1), random(CONFIG, 1)
    assert_bits_equal(rounded["gdn"]["out"], np.asarray(exact["gdn"]["out"]).astype(ml_dtypes.bfloat16).view(np.uint16))
    assert_bits_equal(rounded["gdn"]["A_log"], exact["gdn"]["A_log"])


def test_rows_keep_their_size_and_states_forget_slowly():
    p = jax.tree.map(np.asarray, random(WIDE, 0))
    x = np.random.default_rng(0).standard_normal((200, WIDE.hidden), dtype=np.float32)
    g, a = p["gdn"], p["attention"]
    parts = np.split(x @ g["inputs"][0].T, [WIDE.conv_channels, WIDE.conv_channels + 768, WIDE.conv_channels + 832], axis=1)
    for rows, size in zip([*parts, x @ a["inputs"][0].T, x @ g["gate_up"][2].T, x @ p["head"].T], [1, 1, 1, 0.1, 1, 1, 2], strict=True):
        assert rows.std() == pytest.approx(size, rel=0.1)
        assert rows.mean() == pytest.approx(0, abs=0.1 * size)
    assert p["embed"].std() == pytest.approx(1, rel=0.05)
    assert random(dataclasses.replace(WIDE, tied=True), 0)["embed"].std() == pytest.approx(2 / 16, rel=0.05)
    assert (g["norm"].mean(), g["input_norm"].mean(), a["q_norm"].std()) == pytest.approx((1, 0, 0.1), abs=0.03)
    decay = np.exp(g["A_log"][0]) * np.logaddexp(0, parts[3] + g["dt_bias"][0])
    assert decay.mean() == pytest.approx(0.01, rel=0.2)
    assert 0.001 < decay.min() < 0.003 < 0.025 < decay.max() < 0.05


def test_numbers_are_spread_evenly_and_do_not_repeat():
    u = np.asarray(random(WIDE, 5)["gdn"]["gate_up"]).reshape(-1)
    counts = np.histogram(u, 64)[0]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 120  # chi squared of 63 degrees: 1 in 100,000 above
    for step in (1, 2, 256, 256 * 128, u.size // 3):
        assert abs(np.corrcoef(u[:-step], u[step:])[0, 1]) < 0.02


def test_a_random_model_speaks_through_the_embedded_tokenizer(monkeypatch):
    monkeypatch.setattr(ModelConfig, "preset", classmethod(lambda cls, name: dataclasses.replace(CONFIG, vocab=2048)))
    model = source.load("random:small@5", seed=9)
    assert (model.name, model.config.layer_types) == ("random:small@5", (LINEAR, LINEAR, LINEAR, FULL, LINEAR))
    assert_bits_equal(model.params, random(dataclasses.replace(CONFIG, vocab=2048).with_layers(5), 9))
    embedded = source.load("embedded")
    assert model.tokenizer.encode("hello") == embedded.tokenizer.encode("hello")
    assert model.tokenizer.stop_ids == (embedded.tokenizer.special["<|im_end|>"], embedded.tokenizer.special["<|endoftext|>"])
    assert source.load("random:small@4", dtype="float32").config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
