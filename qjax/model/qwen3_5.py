"""The dense `qwen3_5` family: its layout and its forwards.

A forward maps (state, rows) to (hidden rows, state). Layers are stacked by kind; a scan runs over the repeats of the layer
pattern and takes each layer's weights by its number, so one program serves any depth.

The state of a running sequence, all GDN layers stacked: `S` [Lg, Hv, dk, dv] float32 as of the last block line, and `opened`,
the open block's scratch (gdn.scratch_shapes with a leading Lg).
"""

from __future__ import annotations

from itertools import groupby

import jax
import jax.numpy as jnp
from jax import lax

from qjax.model import gdn
from qjax.model.attention import attention
from qjax.model.config import LINEAR, ModelConfig
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


def _layers(c: ModelConfig, x, carry, gdn_layer, attention_layer):
    """Runs the stack: a scan over the repeats of the pattern, and in it one over each run of equal layers, so that a program
    holds each kind's body once and one layer's weights at a time.

    The callbacks map (number among its kind, x, carry) -> (x, carry, out); `out` of the GDN layers comes back stacked.
    """
    kinds = c.layer_types[: c.period]
    each = {kind: kinds.count(kind) for kind in kinds}

    def repeat(state, r):
        outs, seen = [], dict.fromkeys(each, 0)
        for kind, run in groupby(kinds):
            count = len(list(run))
            body = gdn_layer if kind == LINEAR else attention_layer

            def one(state, i, body=body, first=r * each[kind] + seen[kind]):
                x, carry, out = body(first + i, *state)
                return (x, carry), out

            seen[kind] += count
            state, out = lax.scan(one, state, jnp.arange(count))
            outs += [] if out is None else [out]
        return state, jax.tree.map(lambda *a: jnp.concatenate(a), *outs) if outs else None

    (x, carry), outs = lax.scan(repeat, (x, carry), jnp.arange(c.layers // c.period))
    return x, carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outs)


def _rows(c: ModelConfig, params, tokens, start):
    dtype = jnp.dtype(c.dtype)
    x = params["embed"][tokens].astype(dtype)
    position = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return dtype, x, rotary_angles(jnp.stack([position] * 3), c)


def _attention_layer(c: ModelConfig, params, dtype, table, start, n, angles):
    def run(at, x, carry):
        w = layer(params["attention"], at, dtype)
        y, pool = attention(w, x, carry["pool"], table, at, start, n, c, angles)
        x = x + y
        return x + mlp(w, x, c), carry | {"pool": pool}, None

    return run


def prefill_chunk(c: ModelConfig, aligned: bool, params, pool, S, opened, table, tokens, start, n):
    """n rows from `start`, whole blocks. tokens: int32 [T], start on a block line where `aligned`.

    Never crosses a page. pool and opened are donated. Returns (hidden [T, D] after the final norm, pool, S, opened).
    """
    dtype, x, angles = _rows(c, params, tokens, start)
    off = 0 if aligned else start % BLOCK

    def gdn_layer(at, x, carry):
        w = layer(params["gdn"], at, dtype)
        before = layer({name: opened[name] for name in ("u", "b", "a")}, at, dtype)
        y, S_new, after = gdn.chunk(w, x, lax.dynamic_index_in_dim(S, at, 0, keepdims=False), before, off, n, c, aligned)
        after["u"] = lax.bitcast_convert_type(after["u"], opened["u"].dtype)
        x = x + y
        return x + mlp(w, x, c), carry, {"S": S_new, "opened": after}

    x, carry, out = _layers(c, x, {"pool": pool}, gdn_layer, _attention_layer(c, params, dtype, table, start, n, angles))
    return rms_norm(x, params["norm"], c.eps, dtype), carry["pool"], out["S"], out["opened"]


def step(c: ModelConfig, params, pool, S, opened, table, tokens, start, n):
    """n rows from `start`, all in one block: decode and verify. tokens: int32 [T], 2 <= T <= 16.

    pool and opened are donated, S is read only. Returns (hidden [T, D], logits float32 [T, V], pool, opened).
    """
    dtype, x, angles = _rows(c, params, tokens, start)

    def gdn_layer(at, x, carry):
        w = layer(params["gdn"], at, dtype)
        y, opened = gdn.step(w, x, lax.dynamic_index_in_dim(S, at, 0, keepdims=False), carry["opened"], at, start % BLOCK, n, c)
        x = x + y
        return x + mlp(w, x, c), carry | {"opened": opened}, None

    x, carry, _ = _layers(c, x, {"pool": pool, "opened": opened}, gdn_layer, _attention_layer(c, params, dtype, table, start, n, angles))
    hidden = rms_norm(x, params["norm"], c.eps, dtype)
    return hidden, head(params, hidden), carry["pool"], carry["opened"]


def head(params, hidden):
    """hidden: [T, D], T >= 2 -> float32 logits [T, V]."""
    return product(hidden, params.get("head", params["embed"]))


def head_rows(params, hidden, rows):
    """Logits of some rows of a chunk. rows: int32 [W], W >= 2 -> float32 [W, V]."""
    return head(params, jnp.take(hidden, rows, axis=0))


def close_block(c: ModelConfig, params, S, opened):
    """The state at the line that a full open block ends at, and the empty block past it. opened is donated."""
    gates = {name: params["gdn"][name] for name in ("A_log", "dt_bias")}

    def one(at):
        w = layer(gates, at, jnp.dtype(c.dtype))
        rows = {name: lax.dynamic_index_in_dim(opened[name], at, 0, keepdims=False)[:, :BLOCK] for name in ("k", "b", "a", "U")}
        _, G, _ = gdn.gates(w, rows["b"], rows["a"])
        return gdn.close(lax.dynamic_index_in_dim(S, at, 0, keepdims=False), rows["k"], G, rows["U"], c)

    S = lax.map(one, jnp.arange(c.gdn_layers))
    tail = lax.slice_in_dim(opened["u"], BLOCK, BLOCK + c.conv - 1, axis=1)
    return S, opened | {"u": lax.dynamic_update_slice_in_dim(opened["u"], tail, 0, axis=1)}


def reopen_block(c: ModelConfig, params, S, conv, u, b, a):
    """The scratch of all layers from a sequence's sections and open inputs (at a line: zeros).

    conv: [Lg, C, 3], u: [Lg, BLOCK, C] bits, b, a: [Lg, Hv, BLOCK].
    """
    dtype = jnp.dtype(c.dtype)

    def one(at):
        w = layer({name: params["gdn"][name] for name in ("conv", "A_log", "dt_bias")}, at, dtype)
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
