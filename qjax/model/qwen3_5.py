"""The dense `qwen3_5` family: its layout and its forwards.

A forward maps (state, rows) to (hidden rows, state). It is one program a kind of layer, called layer by layer with that
layer's own weights and state (forward.py says why not one program a model).

The state of a running sequence: for each GDN layer `S`, [Hv, dk, dv] float32 as of the last block line, and `opened`, the open
block's scratch (gdn.scratch_shapes).
"""

from __future__ import annotations

from operator import itemgetter

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
    """One GDN layer's open block, two-byte leaves held as bits."""
    return {name: jax.ShapeDtypeStruct(shape, held(dtype)) for name, (shape, dtype) in gdn.scratch_shapes(c).items()}


def embed(c: ModelConfig, params, tokens, start):
    """tokens: int32 [T] at positions from `start` -> rows [T, D], cos and sin [T, rotary_dims / 2]."""
    position = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return params["embed"][tokens].astype(c.dtype), *rotary_angles(jnp.stack([position] * 3), c)


def gdn_chunk(c: ModelConfig, aligned: bool, w, x, S, opened, start, n, marks):
    """A GDN layer over n rows of a prefill chunk, whole blocks; start on a block line where `aligned`. S: [Hv, dk, dv].

    marks: int32 [M], see gdn.chunk. Returns x [T, D], S at the last line, the scratch of the block past it, and what it
    keeps at each mark: S [M, Hv, dk, dv], rows of u [M, 3, C].
    """
    before = opened | {"u": lax.bitcast_convert_type(opened["u"], x.dtype)}
    y, S, after, (caught, tails) = gdn.chunk(w, x, S, before, 0 if aligned else start % BLOCK, n, marks, c, aligned)
    x = x + y
    u, tails = (lax.bitcast_convert_type(a, opened["u"].dtype) for a in (after["u"], tails))
    return x + mlp(w, x, c), S, after | {"u": u}, (caught, tails)


def gdn_step(c: ModelConfig, w, x, S, opened, start, n):
    """A GDN layer over n new rows of one block; S is read only. Returns x [T, D] and the scratch."""
    y, opened = gdn.step(w, x, S, opened, start % BLOCK, n, c)
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


def close_block(c: ModelConfig, w, S, opened):
    """A GDN layer's S at the line that a full open block ends at, and the empty block past it. opened is donated."""
    _, G, _ = gdn.gates(w, opened["b"], opened["a"])
    tail = lax.slice_in_dim(opened["u"], BLOCK, BLOCK + c.conv - 1, axis=0)
    opened = opened | {"u": lax.dynamic_update_slice_in_dim(opened["u"], tail, 0, axis=0)}
    return gdn.close(S, opened["k"], G, opened["U"], c), opened


def reopen_block(c: ModelConfig, params, sections, inputs) -> tuple[tuple, tuple]:
    """Each GDN layer's S and scratch, from a sequence's sections and open inputs."""
    stack = {name: params["gdn"][name] for name in ("conv", "A_log", "dt_bias")}, sections | inputs
    dtype = jnp.dtype(c.dtype)

    def one(at):
        w, kept = layer(stack, at, dtype)
        w["conv"] = w["conv"].T
        opened = gdn.reopen(w, *(kept[name] for name in ("gdn.S", "gdn.conv", "gdn.u", "gdn.b", "gdn.a")), c)
        return opened | {"u": lax.bitcast_convert_type(opened["u"], inputs["gdn.u"].dtype)}

    return unstack(sections["gdn.S"]), tuple(one(at) for at in range(c.gdn_layers))  # in a loop over the stacks it takes twice as long


def place_block(c: ModelConfig, sections, inputs) -> tuple[tuple, tuple]:
    """Each GDN layer's S, and its scratch with the inputs alone: all that a prefill forward reads of an open block."""

    def one(at):
        empty = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in scratch_specs(c).items()}
        rows = jnp.concatenate([sections["gdn.conv"][at].T, inputs["gdn.u"][at]])
        return empty | {"u": empty["u"].at[: len(rows)].set(rows), "b": inputs["gdn.b"][at], "a": inputs["gdn.a"][at]}

    return unstack(sections["gdn.S"]), tuple(one(at) for at in range(c.gdn_layers))


def unstack(stacked) -> tuple:
    """A pytree of [layers, ...] -> for each layer its own."""
    return tuple(jax.tree.map(itemgetter(at), stacked) for at in range(len(jax.tree.leaves(stacked)[0])))


def freeze_sections(c: ModelConfig, S, opened) -> dict:
    """A sequence's sections, copied out of the layers' S and scratch."""
    return {"gdn.S": jnp.stack(S), "gdn.conv": jnp.stack([one["u"][: c.conv - 1].T for one in opened])}


def freeze_inputs(c: ModelConfig, opened, rows) -> dict:
    """A sequence's open inputs, copied out of the layers' scratch; zero past `rows`."""
    tail = c.conv - 1
    real = jnp.arange(BLOCK) < rows
    u, b, a = (jnp.stack([one[name] for one in opened]) for name in ("u", "b", "a"))
    return {
        "gdn.u": jnp.where(real[None, :, None], u[:, tail : tail + BLOCK], jnp.zeros((), u.dtype)),
        "gdn.b": jnp.where(real[None, None], b, 0),
        "gdn.a": jnp.where(real[None, None], a, 0),
    }


def caught_sections(caught, which) -> dict:
    """The sections at mark `which` of a chunk, from what each GDN layer caught there."""
    S, tails = (jnp.stack([lax.dynamic_index_in_dim(a, which, 0, keepdims=False) for a in some]) for some in zip(*caught, strict=True))
    return {"gdn.S": S, "gdn.conv": tails.swapaxes(1, 2)}
