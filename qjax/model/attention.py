"""Gated attention over pages, in fixed tiles with an online softmax.

Tiles are walked in ascending order and a wholly masked tile leaves maximum, sum and accumulator as they are, bit for bit, so
neither the number of tiles nor the page a row lies in enters a row's arithmetic. Letters: T rows, H query heads, Hk key-value
heads, R = T * H / Hk query rows a key-value head, d head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from qjax.model.config import ModelConfig
from qjax.model.layers import einsum, f32, product, rms_norm, rotate
from qjax.state import TILE

QUERY_ROWS = 256
"""Rows that walk the tiles together: a first chunk's early rows need not pass its late tiles."""


def attention(w, x, pool, table, at, start, n, c: ModelConfig, angles):
    """One layer's attention of rows start .. start + n.

    x: [T, D] (n real rows). pool: {"K", "V"} of `[pages, layers, Hk, grid, d]`. table: int32 [pages of the sequence].
    at: this layer's number among the attention layers. Returns [T, D] and the pool with the rows written.
    """
    T, H, Hk, d = x.shape[0], c.heads, c.kv_heads, c.head_dim
    h = rms_norm(x, w["input_norm"], c.eps, x.dtype)
    q_gate, k, v = jnp.split(product(h, w["inputs"]), [2 * H * d, 2 * H * d + Hk * d], axis=-1)
    q, gate = jnp.split(q_gate.reshape(T, H, 2 * d), 2, axis=-1)
    q = rotate(rms_norm(q, w["q_norm"], c.eps, f32), *angles) * d**-0.5
    k = rotate(rms_norm(k.reshape(T, Hk, d), w["k_norm"], c.eps, f32), *angles)

    grid = pool["K"].shape[3]
    page, row = table[start // grid], start % grid
    new = {"K": k, "V": v.reshape(T, Hk, d)}
    pool = {name: write_rows(pool[name], page, at, row, n, new[name].swapaxes(0, 1).astype(x.dtype)) for name in pool}

    q = q.reshape(T, Hk, H // Hk, d).transpose(1, 2, 0, 3).astype(x.dtype)  # [Hk, groups, T, d]
    outs = []
    for i in range(0, T, QUERY_ROWS):
        some = q[:, :, i : i + QUERY_ROWS]
        end = start + jnp.minimum(i + QUERY_ROWS, n)
        outs.append(walk(some.reshape(Hk, -1, d), pool, table, at, start + i, end, some.shape[2]))
    out = jnp.concatenate([o.reshape(Hk, H // Hk, -1, d) for o in outs], axis=2).transpose(2, 0, 1, 3).reshape(T, H, d)
    return product((out * jax.nn.sigmoid(gate)).reshape(T, H * d).astype(x.dtype), w["out"]).astype(x.dtype), pool


def write_rows(view, page, layer, row, n, rows):
    """Writes the first n of rows [Hk, T, d] at `row` of a page, and nothing else.

    The window is moved back where T rows would pass the page's end: `dynamic_update_slice` clamps its start, and would write
    over earlier rows.
    """
    T, grid = rows.shape[1], view.shape[3]
    begin = jnp.minimum(row, grid - T)
    shift = row - begin
    where = (page, layer, 0, begin, 0)
    old = lax.dynamic_slice(view, where, (1, 1, rows.shape[0], T, rows.shape[2]))
    bits = lax.bitcast_convert_type(rows, view.dtype)
    moved = lax.dynamic_slice_in_dim(jnp.concatenate([bits, bits], axis=1), T - shift, T, axis=1)  # rolled by shift
    i = jnp.arange(T)
    mine = ((i >= shift) & (i < shift + n)).reshape(1, 1, 1, T, 1)
    return lax.dynamic_update_slice(view, jnp.where(mine, moved[None, None], old), where)


def walk(q, pool, table, layer, start, end, rows: int):
    """Softmax attention of query rows at positions start .. start + rows over keys 0 .. end.

    q: [Hk, R, d], scaled, R = groups * rows, group-major. Returns float32 [Hk, R, d].
    """
    Hk, R, d = q.shape
    grid = pool["K"].shape[3]
    tile = min(TILE, grid)
    position = jnp.tile(start + jnp.arange(rows), R // rows)

    def read(name, i, real=None):
        key = i * tile
        bits = lax.dynamic_slice(pool[name], (table[key // grid], layer, 0, key % grid, 0), (1, 1, Hk, tile, d))[0, 0]
        if real is not None:  # a weight of 0 times a stale NaN is NaN: rows past the end read as zero
            bits = jnp.where(real, bits, jnp.zeros((), bits.dtype))
        return lax.bitcast_convert_type(bits, q.dtype)

    def step(i, carry):
        top, total, out = carry
        key = i * tile + jnp.arange(tile)
        score = einsum("krd,ktd->krt", q, read("K", i))
        # a padding row sees no further than the last real key: a stale NaN would spread from it to real rows, in sums over rows
        seen = key[None] <= jnp.minimum(position, end - 1)[:, None]
        score = jnp.where(seen[None], score, -1e30)
        new_top = jnp.maximum(top, score.max(-1, keepdims=True))
        weight = jnp.exp(score - new_top).astype(q.dtype)
        shrink = jnp.exp(top - new_top)
        ones = jnp.ones((Hk, tile, 8), q.dtype)  # the denominator is a product: a fused sum is not row-pure
        total = total * shrink + einsum("krt,kto->kro", weight, ones)[..., :1]
        values = read("V", i, (key < end)[None, :, None])
        return new_top, total, out * shrink + einsum("krt,ktd->krd", weight, values)

    zero = (jnp.full((Hk, R, 1), -1e29, f32), jnp.zeros((Hk, R, 1), f32), jnp.zeros((Hk, R, d), f32))
    _, total, out = lax.fori_loop(0, (end + tile - 1) // tile, step, zero)
    return out / jnp.where(total > 0, total, 1)  # a padding row may see no key at all
