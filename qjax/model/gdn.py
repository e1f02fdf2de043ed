"""Gated DeltaNet on 64-row blocks aligned to absolute positions.

The state S is kept as of the last block line, the open block keeps its inputs; each row of the block's inverse is made by
forward substitution, so a row never depends on the rows after it. `chunk` computes whole blocks (prefill), `step` only the
new rows of one block (decode, verify): the same products on the same operands, hence the same bits.

Formulas: the chunked form of the gated delta rule. With G = cumsum(g) in the block and D[i, j] = exp(G_i - G_j), i >= j:
A = strict_lower(beta K K^T * D), T = (I + A)^-1, rhs = beta (V - exp(G) K S), U = T rhs,
out = exp(G) Q S + (Q K^T * D) U, and at the line S <- exp(G_63) S + (exp(G_63 - G) K)^T U.

Letters: N rows of whole blocks, B blocks, Hk key heads, Hv value heads, dk, dv, C = 2 Hk dk + Hv dv channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from qjax.model.config import ModelConfig
from qjax.model.layers import einsum, f32, l2_norm, product, rms_norm, silu, sum_of_squares
from qjax.state import BLOCK

SLACK = 16
"""Most rows of a step. Rows past a block in the scratch of u, so that a step's padding never clamps onto real rows."""
COLUMNS = 64
"""Products with S and with U are row-pure where their columns are a multiple of this (found by trial: 16, 32 and 48 are not, 64 and
128 are, float32 on a CPU), so narrower value heads are padded inside; the family's real heads have 128."""


def pad_columns(a):
    return jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, -a.shape[-1] % COLUMNS),))


def scratch_shapes(c: ModelConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """One layer's open block: name -> (shape, dtype).

    u, b, a: raw projections, the inputs (u from three rows before the line on); k, T, rhs, U: what the next row needs of the
    rows before it, derived from the inputs. k lies as columns: a step's product with rows would pack all of it anew, 60 against
    25 us a layer at the 0.8B sizes.
    """
    B, Hk, Hv, dk, C = BLOCK, c.key_heads, c.value_heads, c.key_dim, c.conv_channels
    dv = c.value_dim + -c.value_dim % COLUMNS
    return {
        "u": ((c.conv - 1 + B + SLACK, C), c.dtype),
        "b": ((Hv, B), "float32"),
        "a": ((Hv, B), "float32"),
        "k": ((Hk, dk, B), "float32"),
        "T": ((Hv, B, B), "float32"),
        "rhs": ((Hv, B, dv), "float32"),
        "U": ((Hv, B, dv), "float32"),
    }


def project(w, x, c: ModelConfig):
    """x: [T, D] -> u: [T, C] in the model's dtype, z: [T, Hv dv], b, a: [T, Hv] float32, all raw."""
    Z = c.conv_channels + c.value_heads * c.value_dim
    h = rms_norm(x, w["input_norm"], c.eps, x.dtype)
    u, z, b, a = jnp.split(product(h, w["inputs"]), [c.conv_channels, Z, Z + c.value_heads], axis=-1)
    return u.astype(x.dtype), z, b, a


def gates(w, b, a):
    """Raw b, a: [..., Hv, BLOCK] -> beta, G = cumsum(g) and exp(G).

    Always of whole blocks: from jax 0.12 on, a loop over a few numbers takes another exponential than a vectorised one, and a
    step's gates would differ from a chunk's.
    """
    dt, A_log = (w[name].astype(f32).reshape((1,) * (b.ndim - 2) + (-1, 1)) for name in ("dt_bias", "A_log"))
    g = jax.nn.softplus(a + dt) / -jnp.exp(-A_log)
    G = jnp.cumsum(g, axis=-1)
    return jax.nn.sigmoid(b), G, jnp.exp(G)


def heads_first(a):
    """[..., R, Hv] -> [..., Hv, R], as a product with ones and zeros, so that rows do lie next to each other (see gates)."""
    return einsum("...ih,ij->...hj", a, jnp.eye(a.shape[-2], dtype=f32))


def pick(a, rows):
    """Rows of [heads, BLOCK]: [heads, R], as a product with ones and zeros, so that `a` is computed whole (see gates)."""
    return einsum("hj,ij->hi", a, jax.nn.one_hot(jnp.minimum(rows, BLOCK - 1), BLOCK, dtype=f32))


def windows(u, at, n: int, c: ModelConfig):
    """What each tap of the convolution reads for n rows: [n, C] of u from row `at` on, from the next row on, and so forth.

    Each a slice of its own: XLA takes 40 us a layer, not 4, for slices of one slice that begins at a traced row.
    """
    return [lax.dynamic_slice_in_dim(u, at + j, n, axis=0) for j in range(c.conv)]


def convolve(w, u, c: ModelConfig, arrange):
    """u: `windows` of N rows -> q scaled, k: `arrange` of [N, Hk, dk], v: of [N, Hv, dv], float32.

    Arranged before they are normed: the convolution then writes each element once, where it stays.
    """
    N = len(u[0])
    taps = w["conv"].astype(f32)  # [taps, C]: a channel's taps next to each other would be read one by one
    y = sum(one.astype(f32) * tap[None] for one, tap in zip(u, taps, strict=True))
    qk, v = jnp.split(silu(y), [2 * c.key_heads * c.key_dim], axis=-1)
    q, k = jnp.split(l2_norm(arrange(qk.reshape(N, 2 * c.key_heads, c.key_dim))), 2, axis=-3)
    return q * c.key_dim**-0.5, k, arrange(v.reshape(N, c.value_heads, c.value_dim))


def output(w, out, z, c: ModelConfig, dtype):
    """The gated norm and the output product. out: float32 [T, Hv, dv], z: [T, Hv dv] -> [T, D]."""
    y = out * lax.rsqrt(sum_of_squares(out) / c.value_dim + c.eps) * w["norm"][None, None]
    return product((y.reshape(z.shape) * silu(z)).astype(dtype), w["out"]).astype(dtype)


def decay(G, rows):
    """exp(G_i - G_j) where j <= i, else 0. G: [..., Hv, BLOCK] cumulated over the block, rows: int [R] -> [..., Hv, R, BLOCK]."""
    Gi = jnp.take(G, jnp.minimum(rows, BLOCK - 1), axis=-1)
    seen = jnp.arange(BLOCK)[None] <= rows[:, None]
    seen = seen.reshape((1,) * (G.ndim - 1) + seen.shape)
    return jnp.exp(jnp.where(seen, Gi[..., :, None] - G[..., None, :], -jnp.inf))


def by_value_head(a, c: ModelConfig):
    """[..., Hk, R, X] -> [..., Hv, R, X]: value head h reads key head h // (Hv / Hk)."""
    each = c.value_heads // c.key_heads
    return a if each == 1 else jnp.repeat(a, each, axis=-3)


def substitute(A, T, first, last):
    """Rows first .. last of T = (I + A)^-1 by forward substitution, from the rows above.

    A: [..., R, BLOCK], its row i is the block's row first + i. T: [..., BLOCK, BLOCK]. A row is `e_t - A_t T`: a
    product, because a fused sum is impure and slower.
    """
    shape = T.shape
    A, T = A.reshape(-1, *A.shape[-2:]), T.reshape(-1, *T.shape[-2:])

    def row(t, T):
        a = lax.dynamic_index_in_dim(A, t - first, 1, keepdims=True)
        new = jax.nn.one_hot(t, BLOCK, dtype=f32)[None, None] - einsum("bij,bjk->bik", a, T)
        return lax.dynamic_update_slice_in_dim(T, new, t, axis=1)

    return lax.fori_loop(first, last, row, T).reshape(shape)


def pairs(kk, qk, beta, G, rows, c: ModelConfig):
    """A and (Q K^T) * D of block rows `rows`. kk, qk: K K^T and Q K^T of these rows [..., Hk, R, BLOCK], beta: [..., Hv, R]."""
    kk, qk = (by_value_head(a, c) for a in (kk, qk))
    D = decay(G, rows)
    before = (jnp.arange(BLOCK)[None] < rows[:, None]).reshape((1,) * (G.ndim - 1) + (len(rows), BLOCK))
    return jnp.where(before, kk * D * beta[..., None], 0), qk * D


def read(S, k, q, grown, c: ModelConfig):
    """exp(G) K S and exp(G) Q S in one pass over S, one above the other: [Hv, 2R, dv]. k, q: [Hk, R, dk], grown: exp(G) [Hv, R].

    The rows are scaled before the product, so that no multiplication feeds the subtraction `v - exp(G) K S` (layers.silu).
    """
    rows = jnp.concatenate([by_value_head(k, c), by_value_head(q, c)], axis=1)
    return einsum("hid,hdv->hiv", rows * jnp.concatenate([grown, grown], axis=1)[..., None], S)


def close(S, k, G, U, c: ModelConfig):
    """The state at the block's end line. S: [Hv, dk, dv], k: [Hk, dk, BLOCK], G: [Hv, BLOCK], U: [Hv, BLOCK, padded dv]."""
    last = G[:, -1]
    aged = by_value_head(k, c) * jnp.exp(last[:, None] - G)[:, None]
    return jnp.exp(last)[:, None, None] * S + einsum("hdj,hjv->hdv", aged, U)[..., : S.shape[-1]]


def whole_blocks(q, k, v, beta, G, grown, S, ends, marks, c: ModelConfig):
    """All rows of B blocks that follow one another.

    q, k: [B, Hk, BLOCK, dk], v: [B, Hv, BLOCK, dv], beta, G, grown: [B, Hv, BLOCK], S: [Hv, dk, dv] at the first line. ends: int32,
    blocks before it are full and move the state. marks: int32 [M], different blocks, 1 to `ends`, or -1. Returns out
    [B, Hv, BLOCK, dv], S, S at the first line of each mark [M, Hv, dk, dv] (of a -1: anything), and T, rhs, U of block `ends`.
    """
    v, S = pad_columns(v), pad_columns(S)
    A, attend = pairs(*(einsum("...id,...jd->...ij", a, k) for a in (k, q)), beta, G, jnp.arange(BLOCK), c)
    T = substitute(A, jnp.zeros_like(A), 0, BLOCK)

    def block(carry, i):
        S, rhs_kept, U_kept, caught = carry
        seen = read(S, k[i], q[i], grown[i], c)
        rhs = beta[i][..., None] * (v[i] - seen[:, :BLOCK])
        U = einsum("hij,hjv->hiv", T[i], rhs)
        out = seen[:, BLOCK:] + einsum("hij,hjv->hiv", attend[i], U)
        mine = i == ends
        kept = jnp.where(mine, rhs, rhs_kept), jnp.where(mine, U, U_kept)
        S = jnp.where(i < ends, close(S, k[i].swapaxes(1, 2), G[i], U, c), S)
        # here and not before S moves on, or XLA copies S at every block (16 MB a layer for 1,024 rows at the 0.8B sizes)
        marked = marks == i + 1
        caught = lax.cond(marked.any(), lambda: lax.dynamic_update_index_in_dim(caught, S, jnp.argmax(marked), 0), lambda: caught)
        return (S, *kept, caught), out

    none, caught = jnp.zeros_like(v[0]), jnp.zeros((len(marks), *S.shape), f32)
    (S, rhs, U, caught), out = lax.scan(block, (S, none, none, caught), jnp.arange(q.shape[0]))
    derived = {"T": lax.dynamic_index_in_dim(T, jnp.minimum(ends, q.shape[0] - 1), 0, keepdims=False), "rhs": rhs, "U": U}
    return *(a[..., : c.value_dim] for a in (out, S, caught)), derived


def chunk(w, x, S, opened, off, n, marks, c: ModelConfig, aligned: bool):
    """A prefill chunk of n real rows of x: [T, D], beginning `off` rows past a block line (0 where aligned).

    S: [Hv, dk, dv] at that line; opened: u, b, a of the open block (scratch shapes). marks: int32 [M], blocks counted from that
    line, none twice, from 1 to the last one that the rows reach, or -1. Returns [T, D], S at that last line, the open block past
    it, and what a sequence keeps at the first line of each mark: S [M, Hv, dk, dv] and the last three rows of u before it [M, 3, C].
    """
    T, tail = x.shape[0], c.conv - 1
    B = T // BLOCK + (0 if aligned else 1)
    raw, z, b, a = project(w, x, c)

    def place(rows, before, at):
        """Puts `rows` at row `at` behind the rows of the open block: [lead + B * BLOCK, ...]."""
        lead = before.shape[0] - BLOCK
        if aligned:
            return jnp.concatenate([before[:lead], rows])
        room = jnp.zeros((lead + B * BLOCK, *rows.shape[1:]), rows.dtype)
        return lax.dynamic_update_slice_in_dim(room.at[: lead + BLOCK].set(before[: lead + BLOCK]), rows, lead + at, axis=0)

    u = place(raw, opened["u"][: tail + BLOCK], off)
    b, a = (place(new, opened[name].T, off) for name, new in (("b", b), ("a", a)))

    def blocks(a):
        """[B * BLOCK, heads, ...] -> [B, heads, BLOCK, ...]"""
        return jnp.moveaxis(a.reshape(B, BLOCK, *a.shape[1:]), 2, 1)

    q, k, v = convolve(w, windows(u, 0, B * BLOCK, c), c, blocks)
    b, a = (heads_first(raw.reshape(B, BLOCK, -1)) for raw in (b, a))
    ends = (off + n) // BLOCK
    out, S, caught, derived = whole_blocks(q, k, v, *gates(w, b, a), S, ends, marks, c)
    out = jnp.moveaxis(out, 1, 2).reshape(B * BLOCK, c.value_heads, c.value_dim)
    if not aligned:
        out = lax.dynamic_slice_in_dim(out, off, T, axis=0)

    at = jnp.minimum(ends, B - 1)  # where every block is full the open one is empty, and what stands here is never read
    opened = {name: lax.dynamic_index_in_dim(all_, at, 0, keepdims=False) for name, all_ in {"b": b, "a": a, "k": k.swapaxes(2, 3)}.items()}
    tails = jnp.stack([lax.dynamic_slice_in_dim(u, mark * BLOCK, tail, axis=0) for mark in marks])
    opened |= derived | {"u": lax.dynamic_slice_in_dim(jnp.pad(u, ((0, BLOCK + SLACK), (0, 0))), ends * BLOCK, tail + BLOCK + SLACK, axis=0)}
    return output(w, out, z, c, x.dtype), S, opened, (caught, tails)


def reopen(w, S, conv, u, b, a, c: ModelConfig):
    """The open block's scratch, made again from its inputs. conv: [C, 3], u: [BLOCK, C], b, a: [Hv, BLOCK]."""
    u = jnp.concatenate([conv.T, u])
    q, k, v = convolve(w, windows(u, 0, BLOCK, c), c, lambda rows: rows.swapaxes(0, 1)[None])
    *_, derived = whole_blocks(q, k, v, *gates(w, b[None], a[None]), S, 0, jnp.full(1, -1), c)
    return {"u": jnp.pad(u, ((0, SLACK), (0, 0))), "b": b, "a": a, "k": k[0].swapaxes(1, 2)} | derived


def step(w, x, S, opened, off, n, c: ModelConfig):
    """n new rows of x: [T, D], T <= SLACK, all in one block from its row `off`.

    S: [Hv, dk, dv], read only. opened: this layer's scratch, whose rows are written in place. Returns [T, D] and the scratch.
    """
    T, tail = x.shape[0], c.conv - 1
    raw, z, b, a = project(w, x, c)
    rows = off + jnp.arange(T)
    opened = dict(opened)

    opened["u"] = lax.dynamic_update_slice_in_dim(opened["u"], lax.bitcast_convert_type(raw, opened["u"].dtype), tail + off, axis=0)
    u = [lax.bitcast_convert_type(one, x.dtype) for one in windows(opened["u"], off, T, c)]
    q, k, v = convolve(w, u, c, lambda a: a.swapaxes(0, 1))
    v, S = pad_columns(v), pad_columns(S)
    b, a = jnp.split(heads_first(jnp.concatenate([b, a], axis=1)), 2)

    def put(name, new, axis=1):
        opened[name] = put_rows(opened[name], new, off, n, axis)

    put("k", k.swapaxes(1, 2), axis=2)
    put("b", b)
    put("a", a)
    beta, G, grown = gates(w, opened["b"], opened["a"])
    beta, grown = jnp.split(pick(jnp.concatenate([beta, grown]), rows), 2)
    both = einsum("hid,hdj->hij", jnp.concatenate([k, q], axis=1), opened["k"])  # one pass over the keys
    A, attend = pairs(*jnp.split(both, 2, axis=1), beta, G, rows, c)
    opened["T"] = substitute(A, opened["T"], off, off + n)
    seen = read(S, k, q, grown, c)
    put("rhs", beta[..., None] * (v - seen[:, :T]))
    put("U", einsum("hij,hjv->hiv", take_rows(opened["T"], rows), opened["rhs"]))
    out = seen[:, T:] + einsum("hij,hjv->hiv", attend, opened["U"])
    return output(w, out[..., : c.value_dim].swapaxes(0, 1), z, c, x.dtype), opened


def put_rows(kept, new, row, n, axis):
    """The first n rows of `new` at `row` of `kept`, and nothing else. axis: that of the rows, T in `new`, BLOCK in `kept`.

    The window is moved back where T rows would pass the block's end (`dynamic_update_slice` clamps its start, and would write
    over earlier rows).
    """
    T = new.shape[axis]
    begin = jnp.minimum(row, BLOCK - T)
    shift = row - begin
    old = lax.dynamic_slice_in_dim(kept, begin, T, axis)
    moved = lax.dynamic_slice_in_dim(jnp.concatenate([new, new], axis), T - shift, T, axis)  # rolled by shift
    i = jnp.arange(T)
    mine = ((i >= shift) & (i < shift + n)).reshape([T if d == axis else 1 for d in range(new.ndim)])
    return lax.dynamic_update_slice_in_dim(kept, jnp.where(mine, moved, old), begin, axis)


def take_rows(a, rows):
    """Rows of [heads, BLOCK, ...]; a padding row past the block takes the last one."""
    return jnp.take(a, jnp.minimum(rows, BLOCK - 1), axis=1)
