"""Attention over pages: what it computes, where it writes, and that neither a page's place nor a stale row enters a row's bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.model import weights
from qjax.model.attention import attention, write_rows
from qjax.model.config import FULL, LINEAR
from qjax.model.layers import layer, rotary_angles
from qjax.state import held
from tests.bits import assert_bits_equal
from tests.models import tiny_config

pytestmark = pytest.mark.usefixtures("compile_cache")

run = partial(jax.jit, static_argnums=7)(
    lambda w, x, pool, table, at, start, n, c: attention(
        w, x, pool, table, at, start, n, c, rotary_angles(jnp.stack([start + jnp.arange(x.shape[0], dtype=jnp.int32)] * 3), c)
    )
)


def config(**changes):
    return tiny_config(layers=2, layer_types=(LINEAR, FULL), **changes)


def layer_weights(c):
    return layer(weights.random(c, 3)["attention"], 0, jnp.dtype(c.dtype))


def rows(n, c, seed=0):
    """numpy, because jax compiles a slice for each new start."""
    return np.random.default_rng(seed).standard_normal((n, c.hidden)).astype(jnp.dtype(c.dtype))


class Attention:
    """One layer's rows in a pool of two layers, of which the second is `at`; `fill` is what every element of the pool begins as."""

    def __init__(self, c, grid, table, pages=6, fill=0):
        dtype = held(c.dtype)
        self.pool = {name: jnp.full((pages, 2, c.kv_heads, grid, c.head_dim), dtype.type(fill)) for name in ("K", "V")}
        self.c, self.grid, self.table, self.w, self.length = c, grid, np.array(table, np.int32), layer_weights(c), 0

    def __call__(self, x, shape=None, padding=0.0):
        """Forwards all of x: [n, D] at once, padded to `shape` rows. Returns [n, D]."""
        n = len(x)
        padded = np.pad(x, ((0, (shape or n) - n), (0, 0)), constant_values=padding)
        out, self.pool = run(self.w, padded, self.pool, self.table, np.int32(1), np.int32(self.length), np.int32(n), self.c)
        self.length += n
        return np.asarray(out)[:n]

    def pieces(self, x, size):
        """Forwards of `size` rows, none of which crosses a page: each starts at a multiple of a size that divides the grid."""
        return np.concatenate([self(x[i : i + size], size) for i in range(0, len(x), size)])

    def written(self):
        """The rows so far in the order of the tokens: {"K", "V"} of [Hk, length, d]."""
        return {name: np.concatenate([np.asarray(a[p, 1]) for p in self.table], axis=1)[:, : self.length] for name, a in self.pool.items()}


@pytest.mark.parametrize("grid", [64, 128, 192, 256, 512, 768])
def test_attention_close_to_the_formula(grid):
    """Every kind of grid that the engine's config allows; keys lie on several pages and, from 512 on, in more than one tile a page."""
    c = config(dtype="float32", head_dim=48, kv_heads=2, heads=6)
    n = 2 * grid + 64
    x = rows(n, c)
    layer = Attention(c, grid, [3, 0, 5])
    found = np.concatenate([layer.pieces(x[: 2 * grid], grid), layer.pieces(x[2 * grid :], 64)])

    w = {name: np.asarray(a, np.float64) for name, a in layer_weights(c).items()}

    def norm(a, scale):
        return a / np.sqrt((a**2).mean(-1, keepdims=True) + c.eps) * (1 + scale)

    def turn(a):
        half = c.rotary_dims // 2
        angle = np.arange(n)[:, None] * c.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        one, two = a[..., :half], a[..., half : 2 * half]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin, a[..., 2 * half :]], -1)

    y = norm(np.asarray(x, np.float64), w["input_norm"]) @ w["inputs"].T
    H, Hk, d = c.heads, c.kv_heads, c.head_dim
    q_gate = y[:, : 2 * H * d].reshape(n, H, 2, d)  # a head's query, then its gate
    q, gate = turn(norm(q_gate[:, :, 0], w["q_norm"])), q_gate[:, :, 1]
    k, v = (np.repeat(a.reshape(n, Hk, d), H // Hk, axis=1) for a in np.split(y[:, 2 * H * d :], 2, axis=-1))
    k = turn(norm(k, w["k_norm"]))
    score = np.einsum("thd,shd->hts", q, k) / np.sqrt(d)
    score = np.where(np.tril(np.ones((n, n), bool))[None], score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    out = np.einsum("hts,shd->thd", weight / weight.sum(-1, keepdims=True), v) / (1 + np.exp(-gate))
    np.testing.assert_allclose(found, out.reshape(n, H * d) @ w["out"].T, atol=2e-4)


def naive(view, page, layer, row, new):
    """What a plain dynamic_update_slice of all the rows does."""
    return jax.lax.dynamic_update_slice(view, new[None, None], (page, layer, 0, row, 0))


@pytest.mark.parametrize("T", [2, 4, 8, 16, 64])
def test_a_padded_forward_writes_its_own_rows_only(T):
    """Every offset near a page's end, and every number of real rows that fits; all but those rows keep their bits."""
    grid, Hk, d = 64, 2, 8
    rng = np.random.default_rng(T)
    view = rng.integers(0, 2**16, (3, 2, Hk, grid, d), dtype=np.uint16)
    new = jnp.asarray(rng.standard_normal((Hk, T, d)), jnp.bfloat16)
    bits = np.asarray(jax.lax.bitcast_convert_type(new, jnp.uint16))
    written, clamped = jax.jit(write_rows), jax.jit(naive)
    over = 0
    for row in range(max(0, grid - T - 3), grid):
        for n in range(1, min(T, grid - row) + 1):
            expected = view.copy()
            expected[1, 1, :, row : row + n] = bits[:, :n]
            found = written(view, np.int32(1), np.int32(1), np.int32(row), np.int32(n), new)
            assert_bits_equal(np.asarray(found), expected)
        over += not np.array_equal(np.asarray(clamped(view, np.int32(1), np.int32(1), np.int32(row), bits))[1, 1, :, :row], view[1, 1, :, :row])
    assert over == T - 1  # control: the plain update damages earlier rows at all of the last T - 1 offsets


def test_the_cut_does_not_enter_a_row():
    c = config()
    x = rows(320, c)
    whole = Attention(c, 64, [0, 1, 2, 3, 4])
    expected = whole.pieces(x, 64)
    for size in (2, 8, 16):
        cut = Attention(c, 64, [0, 1, 2, 3, 4])
        assert_bits_equal(cut.pieces(x, size), expected)
        assert_bits_equal(cut.pool, whole.pool)
    padded = Attention(c, 64, [0, 1, 2, 3, 4])
    found = [padded(x[i : i + 1], 2, padding=7.0) for i in range(128)]
    found += [padded(x[i : i + 5], 8, padding=-7.0) for i in (128, 133, 138, 143, 148, 153, 158, 163, 168, 173, 178, 183)]
    assert_bits_equal(np.concatenate(found), expected[:188])
    assert_bits_equal(padded.written(), {name: a[:, :188] for name, a in whole.written().items()})


def test_rows_that_walk_the_tiles_apart_are_the_same():
    """A chunk of 512 rows goes through the tiles in two parts; its rows are those of 64 at a time."""
    c = config()
    x = rows(1024, c)
    whole, cut = Attention(c, 512, [1, 0], pages=2), Attention(c, 512, [1, 0], pages=2)
    assert_bits_equal(whole.pieces(x, 512), cut.pieces(x, 64))
    assert_bits_equal(whole.pool, cut.pool)


def test_a_pages_place_does_not_enter_a_row():
    c = config()
    x = rows(320, c)
    one, other = Attention(c, 64, [0, 1, 2, 3, 4]), Attention(c, 64, [5, 0, 3, 1, 4])
    assert_bits_equal(one.pieces(x, 64), other.pieces(x, 64))
    assert_bits_equal(one.written(), other.written())
    wrong = Attention(c, 64, [5, 0, 3, 1, 4])
    wrong.pieces(x[:256], 64)
    wrong.table = wrong.table[[1, 0, 2, 3, 4]]  # control: pages read in another order are another sequence
    one.length = 256
    assert not np.array_equal(wrong(x[256:], 64), one(x[256:], 64))


@pytest.mark.parametrize("fill", [0x7FC0, 0xFFC1, 0x7F80, 0xC2AB], ids=["NaN", "negative NaN", "inf", "a number"])
def test_stale_rows_past_the_end_do_not_leak(fill):
    """A5: a page's earlier owner left these bits in every row, also in those that the tiles reach past the end."""
    c = config()
    x = rows(200, c)
    clean, dirty = Attention(c, 64, [0, 1, 2, 3]), Attention(c, 64, [0, 1, 2, 3], fill=fill)
    assert np.isnan(np.asarray(jax.lax.bitcast_convert_type(dirty.pool["V"], jnp.bfloat16), np.float32)).all() == (fill in (0x7FC0, 0xFFC1))
    for a in (clean, dirty):
        a.outs = [a.pieces(x[:128], 64), a(x[128:131], 8), a(x[131:132], 2), a(x[132:172], 64), a(x[172:180], 8)]
    assert_bits_equal(dirty.outs, clean.outs)
    assert np.isfinite(np.concatenate(dirty.outs).astype(np.float32)).all()
    assert_bits_equal(dirty.written(), clean.written())
    for name in ("K", "V"):  # control: the same bits in a real row do show
        poisoned = dirty.pool | {name: dirty.pool[name].at[1, 1, :, 5].set(np.uint16(fill))}
        out, _ = run(dirty.w, x[180:182], poisoned, dirty.table, np.int32(1), np.int32(180), np.int32(2), c)
        expected, _ = run(dirty.w, x[180:182], dirty.pool, dirty.table, np.int32(1), np.int32(180), np.int32(2), c)
        assert not np.array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


def test_only_this_layers_rows_are_written():
    c = config()
    a = Attention(c, 64, [2, 4], fill=0x1234)
    a.pieces(rows(128, c), 64)
    for view in a.pool.values():
        touched = np.asarray(view != 0x1234).any(axis=(2, 3, 4))
        assert {tuple(int(i) for i in where) for where in np.argwhere(touched)} == {(2, 1), (4, 1)}
