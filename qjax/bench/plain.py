"""A decode step with the whole recipe for row purity left out: what the recipe costs is measured against it.

Sums in norms and softmax are plain sums, nothing is padded for purity's sake, and a GDN layer is the recurrence, its state
written at every token. What is not the recipe is as in the engine's step: one program a kind of layer, called with that
layer's own weights, and rows, pool and state donated. Letters: W rows of the forward, the first n of them real, D hidden,
C channels.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.forward import Forward
from qjax.model import qwen3_5, weights
from qjax.model.attention import write_rows
from qjax.model.config import ModelConfig
from qjax.model.layers import einsum, f32, product, rotate
from qjax.state import BLOCK, TILE, Sequence, held


def plain_state(sequence: Sequence) -> list[dict[str, jax.Array]]:
    """The recurrence's state after a sequence, copied, so that it can be donated: of each GDN layer S [Hv, dk, dv], tail [3, C] bits.

    ValueError where the sequence does not end on a block line: only there does it hold the whole state.
    """
    length = int(sequence.length)
    if length % BLOCK:
        raise ValueError(f"expected a sequence that ends on a block line, a multiple of {BLOCK} tokens, found {length}")
    return [{"S": jnp.array(S), "tail": jnp.array(tail.T)} for S, tail in zip(*(sequence.sections[n] for n in ("gdn.S", "gdn.conv")), strict=True)]


def plain_programs(c: ModelConfig, pool, table, width: int) -> dict[str, jax.stages.Compiled]:
    """The programs of one width, by kind. pool: {"K", "V"} as the engine's, table: int32 [pages], or their shapes.

    n is traced, also where it is always 1: XLA takes a loop of one turn apart, and then computes the convolution again for
    every element of S (0.7 ms a layer at the 0.8B sizes).
    """

    def array(shape, dtype=np.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    number, x, angle = array(()), array((width, c.hidden), jnp.dtype(c.dtype)), array((width, c.rotary_dims // 2), np.float32)
    top = {name: leaf for name, leaf in weights.spec(c).items() if name not in ("gdn", "attention")}
    state = {
        "S": array((c.value_heads, c.key_dim, c.value_dim), np.float32),
        "tail": array((c.conv - 1, c.conv_channels), held(c.dtype)),
    }
    gdn, attention = (weights.layer_spec(c, kind) for kind in ("gdn", "attention"))
    jobs = {
        "embed": (qwen3_5.embed, (), (top, array((width,)), number)),
        "gdn": (plain_gdn, (1, 2), (gdn, x, state, number)),
        "attention": (plain_attention, (1, 2), (attention, x, pool, table, number, number, number, angle, angle)),
        "logits": (plain_logits, (), (top, x)),
    }
    return {name: jax.jit(partial(f, c), donate_argnums=donate).lower(*arguments).compile() for name, (f, donate, arguments) in jobs.items()}


class PlainStep:
    """A model's plain step at one width, compiled."""

    def __init__(self, forward: Forward, pool, table, width: int):
        self._top, self._layers = forward.top, forward.layers
        self._programs = plain_programs(forward.shapes.config, pool, table, width)

    def __call__(self, pool, state, table, tokens, start, n):
        """n rows from `start`, all in one page. tokens: int32 [W], n <= W; the padding only widens the products with weights.

        pool: {"K", "V"} as the engine's, state: plain_state's; both are donated. Returns (logits float32 [W, V], pool, state).
        """
        table, tokens, start, n = jax.device_put((table, tokens, start, n))
        x, *angles = self._programs["embed"](self._top, tokens, start)
        after = []
        for kind, at, w in self._layers:
            if kind == "gdn":
                x, one = self._programs["gdn"](w, x, state[len(after)], n)
                after.append(one)
            else:
                x, pool = self._programs["attention"](w, x, pool, table, at, start, n, *angles)
        return self._programs["logits"](self._top, x), pool, after


def plain_gdn(c: ModelConfig, w, x, state, n):
    """One GDN layer over the first n rows of x: [W, D]. Returns x and the state."""
    y, state = _gdn(w, x, state, n, c)
    return _mlp(w, x + y, c), state


def plain_attention(c: ModelConfig, w, x, pool, table, at, start, n, cos, sin):
    """Attention layer `at`. Returns x [W, D] and the pool."""
    y, pool = _attention(w, x, pool, table, at, start, n, c, (cos, sin))
    return _mlp(w, x + y, c), pool


def plain_logits(c: ModelConfig, params, x):
    """x: [W, D] after the last layer -> float32 [W, V]."""
    return product(_rms_norm(x, params["norm"], c, x.dtype), params.get("head", params["embed"]))


def _rms_norm(x, weight, c: ModelConfig, dtype):
    x = x.astype(f32)
    scale = (1 + weight.astype(f32)).reshape((1,) * (x.ndim - 1) + (-1,))
    return (x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + c.eps) * scale).astype(dtype)


def _l2_norm(x):
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


def _mlp(w, x, c: ModelConfig):
    """x: [W, D] -> [W, D], x added."""
    gate, up = jnp.split(product(_rms_norm(x, w["post_norm"], c, x.dtype), w["gate_up"]), 2, axis=-1)
    return x + product((jax.nn.silu(gate) * up).astype(x.dtype), w["down"]).astype(x.dtype)


def _gdn(w, x, state, n, c: ModelConfig):
    """One layer's recurrence over the first n rows of x: [W, D]."""
    W, keys, values = x.shape[0], c.key_heads * c.key_dim, c.value_heads * c.value_dim
    h = product(_rms_norm(x, w["input_norm"], c, x.dtype), w["inputs"])
    u, z, b, a = jnp.split(h, [c.conv_channels, c.conv_channels + values, c.conv_channels + values + c.value_heads], axis=-1)

    u = jnp.concatenate([lax.bitcast_convert_type(state["tail"], x.dtype), u.astype(x.dtype)])
    y = jax.nn.silu(sum(u[j : j + W].astype(f32) * w["conv"].astype(f32)[j][None] for j in range(c.conv)))
    q, k, v = jnp.split(y, [keys, 2 * keys], axis=-1)
    q, k = (_l2_norm(m.reshape(W, c.key_heads, c.key_dim)) for m in (q, k))
    q, k = (jnp.repeat(m, c.value_heads // c.key_heads, axis=1) for m in (q * c.key_dim**-0.5, k))
    v = v.reshape(W, c.value_heads, c.value_dim)
    beta = jax.nn.sigmoid(b)
    alpha = jnp.exp(jax.nn.softplus(a + w["dt_bias"].astype(f32)[None]) * -jnp.exp(w["A_log"])[None])

    def token(i, carry):
        """S <- alpha S + k write^T with write = beta (v - k alpha S); S is read once, for k and for q together."""
        S, out = carry
        seen = einsum("hid,hdv->hiv", jnp.stack([k[i], q[i]], axis=1) * alpha[i][:, None, None], S)
        write = beta[i][:, None] * (v[i] - seen[:, 0])
        row = seen[:, 1] + (q[i] * k[i]).sum(-1, keepdims=True) * write
        return S * alpha[i][:, None, None] + k[i][:, :, None] * write[:, None, :], out.at[i].set(row)

    S, out = lax.fori_loop(0, n, token, (state["S"], jnp.zeros_like(v)))
    tail = lax.bitcast_convert_type(lax.dynamic_slice_in_dim(u, n, c.conv - 1, axis=0), state["tail"].dtype)
    out = out * lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + c.eps) * w["norm"][None, None]
    return product((out.reshape(W, values) * jax.nn.silu(z)).astype(x.dtype), w["out"]).astype(x.dtype), {"S": S, "tail": tail}


def _attention(w, x, pool, table, at, start, n, c: ModelConfig, angles):
    """One layer's attention of x: [W, D] over the rows of the pages, tile by tile with an online softmax."""
    W, H, Hk, d = x.shape[0], c.heads, c.kv_heads, c.head_dim
    h = product(_rms_norm(x, w["input_norm"], c, x.dtype), w["inputs"])
    q_gate, k, v = jnp.split(h, [2 * H * d, 2 * H * d + Hk * d], axis=-1)
    q, gate = jnp.split(q_gate.reshape(W, H, 2 * d), 2, axis=-1)
    q = rotate(_rms_norm(q, w["q_norm"], c, f32), *angles) * d**-0.5
    k = rotate(_rms_norm(k.reshape(W, Hk, d), w["k_norm"], c, f32), *angles)

    grid = pool["K"].shape[3]
    new, page, row = {"K": k, "V": v.reshape(W, Hk, d)}, table[start // grid], start % grid
    pool = {name: write_rows(pool[name], page, at, row, n, new[name].swapaxes(0, 1).astype(x.dtype)) for name in pool}

    q = q.reshape(W, Hk, H // Hk, d).transpose(1, 2, 0, 3).reshape(Hk, -1, d).astype(x.dtype)  # [Hk, groups * W, d]
    tile = min(TILE, grid)
    position = jnp.tile(start + jnp.arange(W), H // Hk)

    def read(name, i):
        where = (table[i * tile // grid], at, 0, i * tile % grid, 0)
        return lax.bitcast_convert_type(lax.dynamic_slice(pool[name], where, (1, 1, Hk, tile, d))[0, 0], x.dtype)

    def step(i, carry):
        top, total, out = carry
        score = einsum("krd,ktd->krt", q, read("K", i))
        score = jnp.where(((i * tile + jnp.arange(tile))[None] <= position[:, None])[None], score, -1e30)
        new_top = jnp.maximum(top, score.max(-1, keepdims=True))
        weight, shrink = jnp.exp(score - new_top), jnp.exp(top - new_top)
        out = out * shrink + einsum("krt,ktd->krd", weight.astype(x.dtype), read("V", i))
        return new_top, total * shrink + weight.sum(-1, keepdims=True), out

    zero = (jnp.full((*q.shape[:2], 1), -1e29, f32), jnp.zeros((*q.shape[:2], 1), f32), jnp.zeros(q.shape, f32))
    _, total, out = lax.fori_loop(0, (start + n + tile - 1) // tile, step, zero)
    out = (out / total).reshape(Hk, H // Hk, W, d).transpose(2, 0, 1, 3).reshape(W, H, d)
    return product((out * jax.nn.sigmoid(gate)).reshape(W, H * d).astype(x.dtype), w["out"]).astype(x.dtype), pool
