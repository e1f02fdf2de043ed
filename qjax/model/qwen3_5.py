"""The dense `qwen3_5` family: its layout and its forwards.

A forward maps (state, rows) to (hidden rows, state). It is one program a kind of layer, called layer by layer with that
layer's own weights, and the number under which its state lies among its kind (forward.py says why not one program a model).

The state of a running sequence: `S`, [Hv, dk, dv] float32 as of the last block line for each GDN layer, and `opened`, the open
block's scratch of all GDN layers (gdn.scratch_shapes with a leading Lg).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from qjax.model import gdn
from qjax.model.attention import attention
from qjax.model.config import ModelConfig
from qjax.model.layers import layer, mlp, product, rms_norm, rotary_angles
from qjax.state import BLOCK, Layout, Section, View, held


def layout(c: ModelConfig, grid: int = 1024) -> Layout:
    Lg, La, Hv = c.gdn_layers, c.attention_layers, c.value_heads
    return Layout(
        sections=(
            Section("gdn.S", (Lg, Hv, c.key_dim, c.value_dim), "float32"),
            Section("gdn.conv", (Lg, c.conv_channels, c.conv - 1), c.dtype),
        ),
        open=(
            Section("gdn.u", (Lg, BLOCK, c.conv_channels), c.dtype),
            Section("gdn.b", (Lg, Hv, BLOCK), "float32"),
            Section("gdn.a", (Lg, Hv, BLOCK), "float32"),
        ),
        views=(View("K", La, c.kv_heads, c.head_dim, c.dtype), View("V", La, c.kv_heads, c.head_dim, c.dtype)),
        grid=grid,
    )


def scratch_specs(c: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The open block of all GDN layers, two-byte leaves held as bits."""
    return {name: jax.ShapeDtypeStruct((c.gdn_layers, *shape), held(dtype)) for name, (shape, dtype) in gdn.scratch_shapes(c).items()}


def embed(c: ModelConfig, params, tokens, start):
    """tokens: int32 [T] at positions from `start` -> rows [T, D], cos and sin [T, rotary_dims / 2]."""
    position = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return params["embed"][tokens].astype(c.dtype), *rotary_angles(jnp.stack([position] * 3), c)


def gdn_chunk(c: ModelConfig, aligned: bool, w, x, S, opened, at, start, n):
    """GDN layer `at` over n rows of a prefill chunk, whole blocks; start on a block line where `aligned`. S: [Hv, dk, dv].

    Returns x [T, D], S at the last line, and the scratch, in which its open block has been written.
    """
    before = layer({name: opened[name] for name in ("u", "b", "a")}, at, x.dtype)
    y, S, after = gdn.chunk(w, x, S, before, 0 if aligned else start % BLOCK, n, c, aligned)
    after["u"] = lax.bitcast_convert_type(after["u"], opened["u"].dtype)
    x = x + y
    return x + mlp(w, x, c), S, {name: lax.dynamic_update_index_in_dim(opened[name], after[name], at, 0) for name in opened}


def gdn_step(c: ModelConfig, w, x, S, opened, at, start, n):
    """GDN layer `at` over n new rows of one block; S is read only. Returns x [T, D] and the scratch."""
    y, opened = gdn.step(w, x, S, opened, at, start % BLOCK, n, c)
    x = x + y
    return x + mlp(w, x, c), opened


def attention_layer(c: ModelConfig, w, x, pool, table, at, start, n, cos, sin):
    """Attention layer `at` over n rows that stay in one page. Returns x [T, D] and the pool."""
    y, pool = attention(w, x, pool, table, at, start, n, c, (cos, sin))
    x = x + y
    return x + mlp(w, x, c), pool


def final_norm(c: ModelConfig, params, x):
    """The hidden rows that the head reads: [T, D]."""
    return rms_norm(x, params["norm"], c.eps, x.dtype)


def logits(c: ModelConfig, params, x):
    """x: [T, D] after the last layer, T >= 2 -> float32 [T, V]."""
    return head(params, final_norm(c, params, x))


def head(params, hidden):
    """hidden: [T, D], T >= 2 -> float32 logits [T, V]."""
    return product(hidden, params.get("head", params["embed"]))


def head_rows(params, hidden, rows):
    """Logits of some rows of a chunk. rows: int32 [W], W >= 2 -> float32 [W, V]."""
    return head(params, jnp.take(hidden, rows, axis=0))


def unstack(S) -> tuple:
    """[Lg, Hv, dk, dv] -> each layer's own S, as the layers' programs take it: out of a stack it would be copied at every step."""
    return tuple(S[i] for i in range(S.shape[0]))


def close_block(c: ModelConfig, params, S, opened):
    """Every layer's S at the line that a full open block ends at, and the empty block past it. opened is donated."""
    S = jnp.stack(S)
    gates = {name: params["gdn"][name] for name in ("A_log", "dt_bias")}

    def one(at):
        w = layer(gates, at, jnp.dtype(c.dtype))
        rows = {name: lax.dynamic_index_in_dim(opened[name], at, 0, keepdims=False)[:, :BLOCK] for name in ("k", "b", "a", "U")}
        _, G, _ = gdn.gates(w, rows["b"], rows["a"])
        return gdn.close(lax.dynamic_index_in_dim(S, at, 0, keepdims=False), rows["k"], G, rows["U"], c)

    S = lax.map(one, jnp.arange(c.gdn_layers))
    tail = lax.slice_in_dim(opened["u"], BLOCK, BLOCK + c.conv - 1, axis=1)
    return unstack(S), opened | {"u": lax.dynamic_update_slice_in_dim(opened["u"], tail, 0, axis=1)}


def reopen_block(c: ModelConfig, params, S, conv, u, b, a):
    """The scratch of all layers from a sequence's sections and open inputs (at a line: zeros).

    conv: [Lg, C, 3], u: [Lg, BLOCK, C] bits, b, a: [Lg, Hv, BLOCK].
    """
    dtype = jnp.dtype(c.dtype)

    def one(at):
        w = layer({name: params["gdn"][name] for name in ("conv", "A_log", "dt_bias")}, at, dtype)
        w["conv"] = w["conv"].T
        here = layer({"S": S, "conv": conv, "u": u, "b": b, "a": a}, at, dtype)
        opened = gdn.reopen(w, here["S"], here["conv"], here["u"], here["b"], here["a"], c)
        return opened | {"u": lax.bitcast_convert_type(opened["u"], u.dtype)}

    return lax.map(one, jnp.arange(c.gdn_layers))


def freeze_block(c: ModelConfig, opened, rows):
    """A sequence's `gdn.conv` and open inputs, copied out of the scratch; zero past `rows`."""
    tail = c.conv - 1
    real = jnp.arange(BLOCK) < rows
    return {
        "gdn.conv": opened["u"][:, :tail].swapaxes(1, 2),
        "gdn.u": jnp.where(real[None, :, None], opened["u"][:, tail : tail + BLOCK], jnp.zeros((), opened["u"].dtype)),
        "gdn.b": jnp.where(real[None, None], opened["b"][:, :, :BLOCK], 0),
        "gdn.a": jnp.where(real[None, None], opened["a"][:, :, :BLOCK], 0),
    }
