"""Products, norms, rotary embedding and the MLP, written so that a row's bits depend on its own tokens only.

What makes them row-pure on XLA's CPU backend: no sum is fused with its consumer (a fused sum is vectorised differently at
different shapes), so sums are products with a column of ones; products with weights take two-byte operands and give float32,
from two rows up. Letters: T rows, D hidden, F intermediate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.model.config import ModelConfig

f32 = jnp.float32
EXACT = lax.Precision.HIGHEST


def product(x, w):
    """x: [T, in], w: [out, in] as checkpoints store it -> float32 [T, out]."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=f32)


def einsum(spec: str, *operands):
    return jnp.einsum(spec, *operands, precision=EXACT, preferred_element_type=f32)


def layer(stack, index, dtype):
    """The weights of one layer of a held stack: uint16 leaves become `dtype` again after the slice."""

    def one(a):
        a = lax.dynamic_index_in_dim(a, index, 0, keepdims=False)
        return lax.bitcast_convert_type(a, dtype) if a.dtype == jnp.uint16 else a

    return jax.tree.map(one, stack)


def sum_of_squares(x):
    """float32 [..., D] -> [..., 1]. The product is row-pure in whole sixteens of rows, so others are padded."""
    rows = x.reshape(-1, x.shape[-1])
    padded = jnp.pad(rows, ((0, -len(rows) % 16), (0, 0)))
    return product(padded * padded, jnp.ones((1, x.shape[-1]), f32))[: len(rows)].reshape(*x.shape[:-1], 1)


def rms_norm(x, weight, eps: float, dtype):
    """The zero-centred norm: `x * rsqrt(mean(x^2) + eps) * (1 + weight)` in float32, then `dtype`. x: [..., D], weight: [D]."""
    x = x.astype(f32)
    scale = 1 + weight.astype(f32)
    return (x * lax.rsqrt(sum_of_squares(x) / x.shape[-1] + eps) * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(dtype)


def l2_norm(x):
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last axis, float32."""
    return x * lax.rsqrt(sum_of_squares(x) + 1e-6)


def silu(x):
    """`x / (1 + exp(-x))`: a division on purpose.

    Where a multiplication feeds an addition, XLA's CPU backend contracts the two to one rounding if it happens to fuse them,
    and to two if it does not: `x * sigmoid(x)` before a subtraction changed a quarter of a step's elements by a bit against a
    chunk's. A quotient is never contracted.
    """
    return x / (1 + jnp.exp(-x))


def mlp(w, x, c: ModelConfig):
    """x: [T, D] -> [T, D], `down(silu(gate x) * (up x))` of the normed rows. w: post_norm [D], gate_up [2F, D], down [D, F]."""
    h = rms_norm(x, w["post_norm"], c.eps, x.dtype)
    gate, up = jnp.split(product(h, w["gate_up"]), 2, axis=-1)
    return product((silu(gate) * up).astype(x.dtype), w["down"]).astype(x.dtype)


def rotary_axes(c: ModelConfig) -> np.ndarray:
    """Which of the three position axes (time, height, width) each frequency takes: int [rotary_dims / 2].

    Interleaved M-RoPE: of a section [t, h, w] frequency i is height's where i % 3 == 1 and i < 3h, width's where i % 3 == 2
    and i < 3w, else time's.
    """
    i = np.arange(c.rotary_dims // 2)
    _, h, w = c.mrope_section
    return np.where((i % 3 == 1) & (i < 3 * h), 1, np.where((i % 3 == 2) & (i < 3 * w), 2, 0))


def rotary_angles(positions, c: ModelConfig):
    """positions: int32 [3, T] -> cos, sin: float32 [T, rotary_dims / 2]."""
    half = c.rotary_dims // 2
    frequency = (c.rope_theta ** (-np.arange(half, dtype=np.float64) / half)).astype(np.float32)
    angle = positions.astype(f32).T[:, rotary_axes(c)] * frequency[None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x, cos, sin):
    """Rotates the first dims of x: float32 [T, heads, dim]; dim i pairs with i + rotary_dims / 2, the rest passes through."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
