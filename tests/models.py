"""Tiny models that the tests share: random weights that forget slowly, so that a wrong state shows, and the embedded tokenizer."""

import dataclasses

import numpy as np

from qjax.model import weights
from qjax.model.config import FULL, LINEAR, ModelConfig
from qjax.model.source import EMBEDDED, Model
from qjax.model.tokenizer import Tokenizer


def tiny_config(**changes) -> ModelConfig:
    """A hybrid of four GDN and two attention layers; its vocabulary is 64 ids larger than the embedded tokenizer's, its head is untied."""
    tiny = dict(
        vocab=1088,
        hidden=64,
        intermediate=96,
        layers=6,
        layer_types=(LINEAR, FULL, LINEAR) * 2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rotary_dims=16,
        mrope_section=(3, 3, 2),
        key_heads=2,
        value_heads=4,
        key_dim=32,
        value_dim=32,
        tied=False,
        context=2048,
        mtp_layers=0,
    )
    return dataclasses.replace(ModelConfig.preset("0.8b"), **(tiny | changes))


def wide_config() -> ModelConfig:
    """The widths of the 0.8B model, with one period of its layers and a vocabulary of 2,048."""
    return dataclasses.replace(ModelConfig.preset("0.8b").with_layers(4), vocab=2048)


def random_model(config: ModelConfig, seed: int = 0) -> Model:
    """Random weights (log decays of 0.002 to 0.03 a token) with the embedded tokenizer."""
    return Model(f"random-{seed}", config, weights.random(config, seed), Tokenizer.from_directory(EMBEDDED), None, {}, 0.0)


def prompt(length: int, seed: int = 0, vocabulary: int = 1000) -> np.ndarray:
    """Random ids, int32 [length]; a shorter prompt of one seed is a prefix of a longer one."""
    return np.random.default_rng(seed).integers(0, vocabulary, 4096, dtype=np.int32)[:length]
