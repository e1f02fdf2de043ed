"""A decode step with the whole recipe for row purity left out: what the recipe costs is measured against it.

Sums in norms and softmax are plain sums, nothing is padded for purity's sake, and a GDN layer is the recurrence, its state
written at every token. What is not the recipe is as in the engine's step: the same held weights, taken layer by layer by the
same scan, and state and rows donated. Letters: W rows of the forward, the first n of them real, D hidden, C channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from qjax.model import qwen3_5
from qjax.model.attention import TILE, write_rows
from qjax.model.config import ModelConfig
from qjax.model.layers import einsum, f32, layer, product, rotary_angles, rotate
from qjax.state import BLOCK, Sequence


def plain_state(sequence: Sequence) -> dict[str, jax.Array]:
    """The recurrence's state after a sequence, copied, so that it can be donated: S [Lg, Hv, dk, dv], tail [Lg, 3, C] bits.

    ValueError where the sequence does not end on a block line: only there does it hold the whole state.
    """
    length = int(sequence.length)
    if length % BLOCK:
        raise ValueError(f"expected a sequence that ends on a block line, a multiple of {BLOCK} tokens, found {length}")
    return {"S": jnp.array(sequence.sections["gdn.S"]), "tail": jnp.array(sequence.sections["gdn.conv"].swapaxes(1, 2))}


def plain_step(c: ModelConfig, params, pool, state, table, tokens, start, n):
    """n rows from `start`, all in one page. tokens: int32 [W], n <= W; the padding only widens the products with weights.

    pool: {"K", "V"} as the engine's, state: plain_state's; both are donated. n is traced, also where it is always 1: XLA takes
    a loop of one turn apart, and then computes the convolution again for every element of S (0.7 ms a layer at the 0.8B sizes).
    Returns (logits float32 [W, V], pool, state).
    """
    dtype = jnp.dtype(c.dtype)
    position = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    angles = rotary_angles(jnp.stack([position] * 3), c)

    def gdn_layer(at, x, carry):
        w = layer(params["gdn"], at, dtype)
        y, state = _gdn(w, x, carry["state"], at, n, c)
        return _mlp(w, x + y, c), carry | {"state": state}, None

    def attention_layer(at, x, carry):
        w = layer(params["attention"], at, dtype)
        y, pool = _attention(w, x, carry["pool"], table, at, start, n, c, angles)
        return _mlp(w, x + y, c), carry | {"pool": pool}, None

    x = params["embed"][tokens].astype(dtype)
    x, carry, _ = qwen3_5._layers(c, x, {"pool": pool, "state": state}, gdn_layer, attention_layer)
    return product(_rms_norm(x, params["norm"], c, dtype), params.get("head", params["embed"])), carry["pool"], carry["state"]


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


def _gdn(w, x, state, at, n, c: ModelConfig):
    """One layer's recurrence over the first n rows of x: [W, D]."""
    W, keys, values = x.shape[0], c.key_heads * c.key_dim, c.value_heads * c.value_dim
    h = product(_rms_norm(x, w["input_norm"], c, x.dtype), w["inputs"])
    u, z, b, a = jnp.split(h, [c.conv_channels, c.conv_channels + values, c.conv_channels + values + c.value_heads], axis=-1)

    tail = lax.bitcast_convert_type(lax.dynamic_index_in_dim(state["tail"], at, 0, keepdims=False), x.dtype)
    u = jnp.concatenate([tail, u.astype(x.dtype)])
    y = jax.nn.silu(sum(u[j : j + W].astype(f32) * w["conv"].astype(f32)[None, :, j] for j in range(c.conv)))
    q, k, v = jnp.split(y, [keys, 2 * keys], axis=-1)
    q, k = (_l2_norm(m.reshape(W, c.key_heads, c.key_dim)) for m in (q, k))
    q, k = (jnp.repeat(m, c.value_heads // c.key_heads, axis=1) for m in (q * c.key_dim**-0.5, k))
    v = v.reshape(W, c.value_heads, c.value_dim)
    beta = jax.nn.sigmoid(b)
    alpha = jnp.exp(jax.nn.softplus(a + w["dt_bias"].astype(f32)[None]) * -jnp.exp(w["A_log"])[None])

    def token(i, carry):
        """S <- alpha S + k write^T with write = beta (v - k alpha S); S is read once, for k and for q together."""
        all_S, out = carry
        S = lax.dynamic_index_in_dim(all_S, at, 0, keepdims=False)
        seen = einsum("hid,hdv->hiv", jnp.stack([k[i], q[i]], axis=1) * alpha[i][:, None, None], S)
        write = beta[i][:, None] * (v[i] - seen[:, 0])
        row = seen[:, 1] + (q[i] * k[i]).sum(-1, keepdims=True) * write
        S = S * alpha[i][:, None, None] + k[i][:, :, None] * write[:, None, :]
        return lax.dynamic_update_index_in_dim(all_S, S, at, 0), out.at[i].set(row)

    S, out = lax.fori_loop(0, n, token, (state["S"], jnp.zeros_like(v)))
    rows = lax.bitcast_convert_type(lax.dynamic_slice_in_dim(u, n, c.conv - 1, axis=0), state["tail"].dtype)
    state = {"S": S, "tail": lax.dynamic_update_index_in_dim(state["tail"], rows, at, 0)}
    out = out * lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + c.eps) * w["norm"][None, None]
    return product((out.reshape(W, values) * jax.nn.silu(z)).astype(x.dtype), w["out"]).astype(x.dtype), state


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
