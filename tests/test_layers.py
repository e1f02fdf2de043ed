"""Norms, rotary positions, products: what they compute, and that a row does not see how many rows there are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.model import layers
from qjax.model.config import ModelConfig
from tests.bits import assert_bits_equal
from tests.models import tiny_config


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_rotary_axes_of_the_published_section():
    axes = layers.rotary_axes(ModelConfig.preset("0.8b"))
    wanted = {
        0: {0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30},
        1: {1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31},
        2: {2, 5, 8, 11, 14, 17, 20, 23, 26, 29},
    }
    assert {axis: set(np.flatnonzero(axes == axis).tolist()) for axis in range(3)} == wanted


@pytest.mark.parametrize("section", [(2, 1, 1), (3, 3, 2), (8, 0, 0), (6, 5, 5)])
def test_rotary_axes_take_as_many_frequencies_as_the_section_says(section):
    axes = layers.rotary_axes(tiny_config(mrope_section=section, rotary_dims=2 * sum(section)))
    assert tuple(np.bincount(axes, minlength=3)) == section


def test_rotation_close_to_the_formula():
    """Each pair (i, i + half) turns by position[axis of i] * theta^(-i / half); the other dims pass through bit for bit."""
    c = dataclasses.replace(ModelConfig.preset("0.8b"), head_dim=96)
    positions = np.array([[0, 1, 2, 500, 9000], [0, 7, 3, 20, 1], [0, 5, 40, 2, 300]], np.int32)
    x = normal(5, 3, 96)
    out = np.asarray(layers.rotate(x, *layers.rotary_angles(jnp.asarray(positions), c)))
    half, axis = c.rotary_dims // 2, {i: (1 if i % 3 == 1 else 2 if i % 3 == 2 else 0) for i in range(32)}
    wide = np.asarray(x, np.float64)
    expected = wide.copy()
    for i in range(half):
        turn = positions[axis[i]][:, None] * 1e7 ** (-i / half)
        a, b = wide[:, :, i], wide[:, :, i + half]
        expected[:, :, i], expected[:, :, i + half] = a * np.cos(turn) - b * np.sin(turn), b * np.cos(turn) + a * np.sin(turn)
    np.testing.assert_allclose(out, expected, atol=3e-3)  # an angle of 9,000 has 11 bits left of float32's 24 behind the point
    np.testing.assert_allclose(out[:3], expected[:3], atol=1e-5)
    assert_bits_equal(out[..., 2 * half :], np.asarray(x)[..., 2 * half :])
    assert_bits_equal(out[0], np.asarray(x)[0])  # position 0 turns nothing


def test_equal_positions_are_plain_rotary_positions():
    c = ModelConfig.preset("0.8b")
    position = jnp.arange(40, dtype=jnp.int32)
    plain = dataclasses.replace(c, mrope_section=(32, 0, 0))
    three = jnp.stack([position] * 3)
    assert_bits_equal(layers.rotary_angles(three, c), layers.rotary_angles(three, plain))
    other = three.at[1].add(1)
    assert not np.array_equal(layers.rotary_angles(other, c)[0], layers.rotary_angles(three, c)[0])


def test_norms_close_to_their_formulas():
    x, weight = normal(7, 3, 40), normal(40, seed=1, dtype=jnp.bfloat16)
    wide, scale = np.asarray(x, np.float64), 1 + np.asarray(weight, np.float64)
    root = np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-2)
    np.testing.assert_allclose(layers.rms_norm(x, weight, 1e-2, jnp.float32), wide / root * scale, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layers.l2_norm(x), wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-5)
    small = 1e-4 * x
    np.testing.assert_allclose(
        layers.l2_norm(small), 1e-4 * wide / np.sqrt((1e-8 * wide**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-5
    )  # here the 1e-6 counts


@pytest.mark.parametrize("x", [-1e4, -100.0, -1.5, 0.0, 2.0, 1e4])
def test_silu_close_to_its_formula(x):
    np.testing.assert_allclose(layers.silu(jnp.float32(x)), x / (1 + np.exp(-np.float64(min(max(x, -700), 700)))), rtol=1e-6, atol=1e-30)


def test_mlp_close_to_its_formula():
    c = tiny_config(dtype="float32")
    w = {"post_norm": normal(64, seed=1), "gate_up": normal(192, 64, seed=2) / 8, "down": normal(64, 96, seed=3) / 10}
    x = normal(5, 64)
    wide = {name: np.asarray(a, np.float64) for name, a in w.items()}
    h = np.asarray(x, np.float64)
    h = h / np.sqrt((h**2).mean(-1, keepdims=True) + c.eps) * (1 + wide["post_norm"])
    gate, up = np.split(h @ wide["gate_up"].T, 2, axis=-1)
    np.testing.assert_allclose(layers.mlp(w, x, c), (gate / (1 + np.exp(-gate)) * up) @ wide["down"].T, rtol=1e-4, atol=1e-4)


def test_layer_slices_a_stack_and_gives_back_the_dtype():
    stack = {"held": normal(3, 4, 5, dtype=jnp.bfloat16), "plain": normal(3, 2)}
    held = stack | {"held": jax.lax.bitcast_convert_type(stack["held"], jnp.uint16)}
    for at in range(3):
        assert_bits_equal(layers.layer(held, np.int32(at), jnp.bfloat16), {name: a[at] for name, a in stack.items()})


@pytest.mark.parametrize("width", [32, 64, 128, 1024])
def test_sum_of_squares_does_not_see_the_number_of_rows_and_is_close_to_its_formula(width):
    x = normal(256, width)
    whole = layers.sum_of_squares(x)
    np.testing.assert_allclose(whole, (np.asarray(x, np.float64) ** 2).sum(-1, keepdims=True), rtol=1e-5)
    jitted = jax.jit(layers.sum_of_squares)
    for rows in (1, 2, 3, 5, 8, 15, 16, 17, 64):
        assert_bits_equal(jitted(x[:rows]), whole[:rows])
        assert_bits_equal(jitted(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize(("width", "out"), [(64, 192), (128, 324), (1024, 256)])
def test_products_of_two_byte_rows_do_not_see_the_number_of_rows_and_are_close_to_float64(width, out):
    x, w = normal(256, width, dtype=jnp.bfloat16), normal(out, width, seed=1, dtype=jnp.bfloat16)
    jitted = jax.jit(layers.product)
    whole = jitted(x, w)
    assert whole.dtype == jnp.float32
    np.testing.assert_allclose(whole, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, atol=1e-3)
    for rows in (2, 3, 4, 8, 16, 64):
        assert_bits_equal(jitted(x[-rows:], w), whole[-rows:])
