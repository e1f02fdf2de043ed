"""Gated DeltaNet: close to the plain recurrence, and the same bits whichever forwards a row went through."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.model import gdn, qwen3_5, weights
from qjax.model.config import FULL, LINEAR
from qjax.state import BLOCK, held
from tests.bits import assert_bits_equal
from tests.models import tiny_config

pytestmark = pytest.mark.usefixtures("compile_cache")

chunk = partial(jax.jit, static_argnums=(7, 8))(gdn.chunk)
step = partial(jax.jit, static_argnums=6)(gdn.step)
close = partial(jax.jit, static_argnums=0)(qwen3_5.close_block)
reopen = partial(jax.jit, static_argnums=0)(qwen3_5.reopen_block)
place = partial(jax.jit, static_argnums=0)(qwen3_5.place_block)
freeze_sections = partial(jax.jit, static_argnums=0)(qwen3_5.freeze_sections)
freeze_inputs = partial(jax.jit, static_argnums=0)(qwen3_5.freeze_inputs)

INPUTS = ("u", "b", "a")  # of the open block's scratch; the rest is derived from them
HEADS = [(2, 2, 64, 32), (1, 3, 32, 64), (2, 6, 32, 128)]  # key heads, value heads, key dim, value dim
ids = ["x".join(map(str, h)) for h in HEADS]


def config(heads=HEADS[2], dtype="bfloat16"):
    Hk, Hv, dk, dv = heads
    return tiny_config(layers=2, layer_types=(LINEAR, FULL), key_heads=Hk, value_heads=Hv, key_dim=dk, value_dim=dv, dtype=dtype)


def rows(n, c, seed=0):
    """numpy, because jax compiles a slice for each new start."""
    return np.random.default_rng(seed).standard_normal((n, c.hidden)).astype(jnp.dtype(c.dtype))


class Layer:
    """One GDN layer and its state. `stale` is what the scratch's rows hold that nobody has written."""

    def __init__(self, c, stale=0.0):
        self.c, self.dtype = c, jnp.dtype(c.dtype)
        self.params = weights.random(c, 5)
        self.w = next(w for kind, _, w in weights.layers(self.params, c) if kind == "gdn")
        self.S = jnp.zeros((c.value_heads, c.key_dim, c.value_dim), jnp.float32)
        self.opened = {}
        for name, (shape, dtype) in gdn.scratch_shapes(c).items():
            a = np.full(shape, stale, jnp.dtype(dtype))
            if name == "u":
                a[: c.conv - 1] = 0  # what stood before the first token
            self.opened[name] = jnp.asarray(a.view(held(dtype)))
        self.length = 0

    def chunk(self, x, shape, aligned=False, marks=(-1, -1)):
        """A prefill forward of x: [n, D], its padding large numbers. Returns [n, D]; `caught` is then what it caught at the marks."""
        n, c = len(x), self.c
        one = {name: self.opened[name] for name in INPUTS}
        one["u"] = jax.lax.bitcast_convert_type(one["u"], self.dtype)
        padded = np.pad(x, ((0, shape - n), (0, 0)), constant_values=9)
        off = np.int32(0 if aligned else self.length % BLOCK)
        out, self.S, after, self.caught = chunk(self.w, padded, self.S, one, off, np.int32(n), np.array(marks, np.int32), c, aligned)
        self.opened = after | {"u": jax.lax.bitcast_convert_type(after["u"], self.opened["u"].dtype)}
        self.length += n
        return np.asarray(out)[:n]

    def step(self, x, accepted=None):
        """A forward of x: [n, D] within the block, of which the first `accepted` rows are taken."""
        n, off = len(x), self.length % BLOCK
        taken = n if accepted is None else accepted
        width = next(w for w in (2, 8, 16) if w >= n)
        padded = np.pad(x, ((0, width - n), (0, 0)), constant_values=9)
        out, self.opened = step(self.w, padded, self.S, self.opened, np.int32(off), np.int32(n), self.c)
        self.length += taken
        if taken and self.length % BLOCK == 0:
            self.S, self.opened = close(self.c, self.w, self.S, self.opened)
        return np.asarray(out)[:n]

    def sequence(self):
        """The sections and open inputs that a sequence of this one layer keeps."""
        return freeze_sections(self.c, (self.S,), (self.opened,)), freeze_inputs(self.c, (self.opened,), np.int32(self.length % BLOCK))

    def frozen(self):
        sections, inputs = self.sequence()
        return jax.tree.map(np.asarray, sections | inputs)

    def derived(self):
        """What a next row reads of the open block's rows: k, T, rhs, U and the inputs, real rows only."""
        off, tail = self.length % BLOCK, self.c.conv - 1
        by_rows = self.opened | {"k": self.opened["k"].swapaxes(1, 2)}
        real = {name: np.asarray(a)[:, :off] for name, a in by_rows.items() if name != "u"}
        return real | {"u": np.asarray(self.opened["u"])[: tail + off]}

    def reopened(self, at_line=False):
        """The same layer, its scratch made again from what a sequence keeps; at_line: by what a step takes only at a block line."""
        other = Layer(self.c)
        sections, inputs = self.sequence()
        (other.S,), (other.opened,) = place(self.c, sections, inputs) if at_line else reopen(self.c, self.params, sections, inputs)
        other.length = self.length
        return other


def recurrence(w, x, c):
    """The token-by-token definition in float64. x: [T, D] -> out [T, D], S [Hv, dk, dv] after the last token."""
    w = {name: np.asarray(a, np.float64) for name, a in w.items()}
    x, T = np.asarray(x, np.float64), len(x)
    Hk, Hv, dk, dv = c.key_heads, c.value_heads, c.key_dim, c.value_dim
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.eps) * (1 + w["input_norm"])
    u, z, b, a = np.split(h @ w["inputs"].T, np.cumsum([2 * Hk * dk + Hv * dv, Hv * dv, Hv]), axis=-1)
    beta, g = 1 / (1 + np.exp(-b)), -np.exp(w["A_log"]) * np.log1p(np.exp(a + w["dt_bias"]))
    past = np.concatenate([np.zeros((3, u.shape[1])), u])
    y = sum(w["conv"][j] * past[j : j + T] for j in range(4))
    q, k, v = np.split(y / (1 + np.exp(-y)), [Hk * dk, 2 * Hk * dk], axis=-1)
    q, k = (np.repeat(a.reshape(T, Hk, dk), Hv // Hk, axis=1) for a in (q, k))
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    q, v = q / np.sqrt(dk), v.reshape(T, Hv, dv)
    S, outs = np.zeros((Hv, dk, dv)), []
    for t in range(T):
        S = S * np.exp(g[t])[:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hd,hdv->hv", k[t], S))
        S = S + np.einsum("hd,hv->hdv", k[t], delta)
        outs.append(np.einsum("hd,hdv->hv", q[t], S))
    out = np.stack(outs)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + c.eps) * w["norm"]
    return (out.reshape(T, Hv * dv) * (z / (1 + np.exp(-z)))) @ w["out"].T, S


@pytest.mark.parametrize("heads", HEADS, ids=ids)
def test_chunks_and_steps_close_to_recurrence(heads):
    c = config(heads, "float32")
    x = rows(192, c)
    chunks = Layer(c)
    expected, S = recurrence(chunks.w, x, c)
    out = np.concatenate([chunks.chunk(x[:128], 128, aligned=True), chunks.chunk(x[128:], 64)])
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(chunks.S, S, atol=1e-5)
    steps = Layer(c)
    out = np.concatenate([steps.step(x[i : i + 8]) for i in range(0, 192, 8)])
    np.testing.assert_allclose(out, expected, atol=1e-4)
    np.testing.assert_allclose(steps.S, S, atol=1e-5)
    # control: the state counts here, so a wrong one would have shown
    assert np.abs(recurrence(chunks.w, x[64:], c)[0] - expected[64:])[64:].max() > 1e-2


def test_a_tail_past_the_last_line_close_to_recurrence():
    """Every length around a line: rows past it do not move S, and what they add is in the rows' outputs."""
    c = config(dtype="float32")
    x = rows(133, c)
    whole = Layer(c)
    expected, _ = recurrence(whole.w, x, c)
    for n in (1, 2, 63, 64, 65, 127, 128, 129, 133):
        one = Layer(c)
        out = [one.chunk(x[i : min(i + 64, n)], 64) for i in range(0, n, 64)]
        np.testing.assert_allclose(np.concatenate(out), expected[:n], atol=1e-4)
        line = n // BLOCK * BLOCK
        np.testing.assert_allclose(one.S, recurrence(whole.w, x[:line], c)[1] if line else 0, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=ids)
def test_chunks_equal_steps(heads):
    c = config(heads)
    x = rows(200, c)
    whole = Layer(c)
    expected = np.concatenate([whole.chunk(x[:128], 128, aligned=True), whole.chunk(x[128:192], 64), whole.chunk(x[192:], 64)])
    assert np.asarray(whole.S).any()
    steps, at, out = Layer(c, stale=3.0), 0, []
    for n in (1, 5, 8, 16, 2, 16, 16, 1) * 4:  # some of these end at a line, others are cut there
        n = min(n, BLOCK - at % BLOCK, 200 - at)
        if n:
            out.append(steps.step(x[at : at + n]))
            at += n
    cut = Layer(c, stale=-3.0)
    pieces = [cut.chunk(x[:50], 64), cut.chunk(x[50:114], 64), cut.step(x[114:115]), cut.chunk(x[115:117], 64), cut.chunk(x[117:181], 64)]
    pieces += [cut.step(x[181:192]), cut.step(x[192:200])]
    for found, run in ((np.concatenate(out), steps), (np.concatenate(pieces), cut)):
        assert run.length == 200
        assert_bits_equal(found, expected)
        assert_bits_equal(run.frozen(), whole.frozen())
        assert_bits_equal(run.derived(), whole.derived())


def broken(run, *zeroed):
    """A copy of the layer with some parts of its state zeroed."""
    other = Layer(run.c)
    other.length = run.length
    other.S = jnp.zeros_like(run.S) if "S" in zeroed else run.S
    other.opened = {name: jnp.zeros_like(a) if name in zeroed else jnp.copy(a) for name, a in run.opened.items()}
    return other


def test_every_part_of_the_state_counts():
    """Control: one part zeroed, the next rows differ. b of earlier rows is kept for reopening only, which must then differ."""
    c = config()
    x = rows(104, c)
    whole = Layer(c)
    whole.chunk(x[:64], 64)
    whole.chunk(x[64:100], 64)
    expected = broken(whole).step(x[100:104])
    assert_bits_equal(broken(whole).reopened().step(x[100:104]), expected)
    for part in ("S", "u", "a", "k", "T", "rhs", "U"):
        assert not np.array_equal(broken(whole, part).step(x[100:104]), expected), part
    for part in ("S", *INPUTS):
        assert not np.array_equal(broken(whole, part).reopened().step(x[100:104]), expected), part


def test_rejected_rows_leave_nothing():
    """Wrong rows forwarded and not taken at every offset of a block: later rows, S and inputs are those of a run without them."""
    c = config()
    x, wrong = rows(130, c), rows(16, c, seed=9)
    plain, drafted = Layer(c), Layer(c)
    for t in range(130):
        expected = plain.step(x[t : t + 1])
        room = min(16, BLOCK - t % BLOCK)
        found = drafted.step(np.concatenate([x[t : t + 1], wrong[: room - 1]]), accepted=1)
        assert_bits_equal(found[:1], expected)
        assert_bits_equal(drafted.frozen(), plain.frozen())
    assert plain.length == drafted.length == 130


@pytest.mark.parametrize("heads", HEADS[1:], ids=ids[1:])
def test_an_open_block_comes_back_from_its_inputs(heads):
    c = config(heads)
    x = rows(140, c)
    for n in (0, 1, 2, 3, 33, 63, 64, 65, 96, 127, 128):
        by_step, by_chunk = Layer(c, stale=2.0), Layer(c, stale=2.0)
        for i in range(0, n, 8):
            by_step.step(x[i : min(i + 8, n)])
        for i in range(0, n, 64):
            by_chunk.chunk(x[i : min(i + 64, n)], 64)
        for run in (by_step, by_chunk):
            again = run.reopened()
            assert_bits_equal(again.derived(), run.derived())
            assert len(again.derived()["k"][0]) == n % BLOCK
            assert_bits_equal(again.step(x[n : n + 8][: BLOCK - n % BLOCK]), run.step(x[n : n + 8][: BLOCK - n % BLOCK]))
            assert_bits_equal(again.frozen(), run.frozen())


@pytest.mark.parametrize("heads", HEADS, ids=ids)
def test_at_a_line_the_sections_are_enough(heads):
    """Without the open inputs, the rows after a line are those of the general way, by steps to the next line and by a chunk over it."""
    c = config(heads)
    x = rows(300, c)
    for n in (0, 64, 128):
        run = Layer(c, stale=2.0)
        for i in range(0, n, 64):
            run.chunk(x[i : i + 64], 64)
        by_step, by_chunk, expected = run.reopened(at_line=True), run.reopened(at_line=True), run.reopened()
        for i in range(n, n + 72, 8):
            assert_bits_equal(by_step.step(x[i : i + 8]), expected.step(x[i : i + 8]))
            assert_bits_equal(by_step.derived(), expected.derived())
        by_chunk.chunk(x[n : n + 72], 128)
        assert_bits_equal(by_chunk.frozen(), expected.frozen())
        assert_bits_equal(by_step.frozen(), expected.frozen())
    off = Layer(c)
    off.step(x[:8])
    with pytest.raises(AssertionError, match="elements differ"):  # control: off a line they are not
        assert_bits_equal(off.reopened(at_line=True).step(x[8:16]), off.step(x[8:16]))


@pytest.mark.parametrize("heads", HEADS, ids=ids)
@pytest.mark.parametrize(
    ("start", "n", "shape", "aligned", "marks"), [(0, 256, 256, True, (1, 3)), (36, 250, 256, False, (4, 1)), (63, 2, 64, False, (-1, 1))]
)
def test_a_chunk_catches_what_a_run_to_that_line_keeps(heads, start, n, shape, aligned, marks):
    """At the first and last lines inside it, in any order; neither its rows nor its end depend on what is caught."""
    c = config(heads)
    x = rows(300, c)
    run, plain = Layer(c), Layer(c, stale=3.0)
    for one in (run, plain):
        if start:
            one.chunk(x[:start], 64)
    assert_bits_equal(run.chunk(x[start : start + n], shape, aligned, marks), plain.chunk(x[start : start + n], shape, aligned))
    assert_bits_equal(run.frozen(), plain.frozen())
    S, tails = (np.asarray(a) for a in run.caught)
    ended = {}
    for which, mark in enumerate(marks):
        if mark >= 0:
            line = Layer(c)
            for i in range(0, mark * BLOCK, BLOCK):
                line.chunk(x[i : i + BLOCK], 64)
            ended[which] = line.frozen()
            assert_bits_equal({"gdn.S": S[which], "gdn.conv": tails[which].T.view(np.uint16)}, {k: ended[which][k][0] for k in ("gdn.S", "gdn.conv")})
    if len(ended) == 2:  # control: the two states differ
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bits_equal(S[0], ended[1]["gdn.S"][0])


def test_frozen_inputs_are_zero_past_the_length():
    c = config()
    run = Layer(c, stale=5.0)
    run.step(rows(10, c), accepted=7)
    kept = run.frozen()
    for name, axis in (("gdn.u", 1), ("gdn.b", 2), ("gdn.a", 2)):
        a = np.moveaxis(kept[name], axis, 0)
        assert a[:7].any(axis=tuple(range(1, a.ndim))).all()
        assert not a[7:].any()
