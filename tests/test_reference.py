"""qjax against transformers in float32: logits, GDN state, convolution tail, K and V of the tiny models of tests/reference.

What transformers computed lies in golden files beside the script that made them. It is compared with one whole forward, with the prompt in
chunks, each resumed from the sequence before it, and with the prompt token by token.
"""

import functools

import jax
import numpy as np
import pytest

from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.forward import Forward
from qjax.model import weights
from qjax.model.config import ModelConfig
from qjax.model.source import Model
from qjax.slot import Slot
from qjax.state import BLOCK
from tests.reference.configs import CASES
from tests.reference.distance import distance, faults

LENGTHS = [pytest.param(case, length, id=f"{case.name}-{length}") for case in CASES for length in case.lengths]


@pytest.fixture(scope="module")
def engines(compile_cache):
    """Case -> its engine, whose grid holds the longest prompt, so that a prompt can be one forward."""

    @functools.cache
    def engine(case):
        config = ModelConfig.from_dict(case.config)
        params = jax.device_put(weights.stack(case.tensors(), config))
        grid = next(rows for rows in (64, 128, 256, 512) if rows >= case.context)
        model = Model(case.name, config, params, tokenizer=None, template=None, generation={}, load_seconds=0.0)
        return Engine(model, EngineConfig(grid=grid, context_tokens=2 * grid, compile_cache=compile_cache))

    return engine


@functools.cache
def golden(case, length):
    """What transformers computed: arrays by name, after a check that it was for these tokens."""
    with np.load(case.golden(length)) as file:
        arrays = dict(file)
    np.testing.assert_array_equal(arrays.pop("tokens"), case.tokens(length))
    np.testing.assert_array_equal(arrays.pop("rows"), case.rows(length))
    return arrays


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    """x: [..., K], each row divided by its length (eps 1e-6 under the root)."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def recurrent_state(sequence, params, c):
    """S [Lg, Hv, dk, dv] and the convolution tail [Lg, C, 3] after the last row, float64.

    A sequence holds S as of the last block line and the inputs of the rows past it; here they are taken one by one, by the recurrence.
    """
    rows = int(sequence.length) % BLOCK
    taps, A_log, dt_bias = (np.asarray(params["gdn"][name], np.float64) for name in ("conv", "A_log", "dt_bias"))
    S, conv = (np.asarray(sequence.sections[name], np.float64) for name in ("gdn.S", "gdn.conv"))
    u, b, a = (np.asarray(sequence.open[f"gdn.{name}"], np.float64) for name in "uba")
    u = np.concatenate([conv.swapaxes(1, 2), u[:, :rows]], axis=1)
    kept = np.exp(-np.exp(A_log)[..., None] * np.log1p(np.exp(a + dt_bias[..., None])))
    group, keys = c.value_heads // c.key_heads, c.key_heads * c.key_dim
    for t in range(rows):
        mixed = np.einsum("ljc,lcj->lc", u[:, t : t + 4], taps)
        mixed = mixed * sigmoid(mixed)
        k = unit(mixed[:, keys : 2 * keys].reshape(-1, c.key_heads, c.key_dim)).repeat(group, axis=1)
        v = mixed[:, 2 * keys :].reshape(-1, c.value_heads, c.value_dim)
        S = S * kept[:, :, t, None, None]
        delta = sigmoid(b[:, :, t, None]) * (v - np.einsum("lhk,lhkv->lhv", k, S))
        S = S + k[..., None] * delta[..., None, :]
    return {"S": S, "conv": u[:, -3:].swapaxes(1, 2)}


def state(own, sequence, params):
    """The sequence's state, arrays by the golden files' names."""
    views = {name: own.pool.rows(name, sequence.pages, int(sequence.length)) for name in ("K", "V")}
    return recurrent_state(sequence, params, own.model.config) | views


def whole(own, case, length, params):
    """One forward of the whole prompt, with the logits of the golden rows."""
    slot = Slot(Forward(own.programs, params), own.pool, own.empty())
    hidden, _ = slot.prefill(case.tokens(length), own.layout.grid)
    found = {"logits": np.stack([slot.logits(hidden, int(row)) for row in case.rows(length)])} | state(own, slot.freeze(), params)
    slot.close()
    return found


@pytest.mark.parametrize(("case", "length"), LENGTHS)
def test_whole_prefill_close_to_transformers(engines, case, length):
    own = engines(case)
    assert faults(distance(whole(own, case, length, own.model.params), golden(case, length))) == []


@pytest.mark.parametrize(("case", "length"), LENGTHS)
def test_chunks_close_to_transformers(engines, case, length):
    own, tokens, expected = engines(case), case.tokens(length), golden(case, length)
    rows, sequence, compared = list(case.rows(length)), None, 0
    for _, stop in case.chunks(length):
        before, (sequence, logits) = sequence, own.prefill(tokens[:stop], sequence)
        if before is not None:
            own.release(before)
        if stop - 1 in rows:
            assert faults(distance({"logits": logits}, {"logits": expected["logits"][rows.index(stop - 1)]})) == [], f"row {stop - 1}"
            compared += 1
    assert compared >= 2
    assert faults(distance(state(own, sequence, own.model.params), {name: expected[name] for name in ("S", "conv", "K", "V")})) == []
    own.release(sequence)


@pytest.mark.parametrize(("case", "length"), LENGTHS)
def test_token_by_token_close_to_transformers(engines, case, length):
    own, logits = engines(case), []
    slot = own.open()
    for token in case.tokens(length):
        logits.append(slot.step([token])[0])
        slot.accept([token])
    found = {"logits": np.stack(logits)[case.rows(length)]} | state(own, slot.freeze(), own.model.params)
    slot.close()
    assert faults(distance(found, golden(case, length))) == []


def test_no_other_parameters_are_close_to_transformers(engines):
    """The control: no leaf can be 1% larger without leaving the tolerance."""
    case = next(case for case in CASES if case.name == "deep")
    own = engines(case)
    leaves, tree = jax.tree.flatten_with_path(own.model.params)
    unnoticed = []
    for at, (path, leaf) in enumerate(leaves):
        changed = jax.tree.unflatten(tree, [leaf * np.float32(1.01) if i == at else other for i, (_, other) in enumerate(leaves)])
        if not faults(distance(whole(own, case, 63, changed), golden(case, 63))):
            unnoticed.append(jax.tree_util.keystr(path))
    assert unnoticed == []
    assert faults(distance(whole(own, case, 63, own.model.params), golden(case, 63))) == []
