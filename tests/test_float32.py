"""The float32 model dtype, which comparisons with other programs use: the same engine, with float32 rows and weights."""

import numpy as np
import pytest

from qjax.config import EngineConfig
from qjax.engine import Engine
from tests.bits import assert_bits_equal
from tests.models import prompt, random_model, tiny_config
from tests.runs import decode, new_pool, new_slot, run


@pytest.fixture(scope="module")
def float32_engine(compile_cache):
    return Engine(random_model(tiny_config(dtype="float32")), EngineConfig(grid=64, context_tokens=448, compile_cache=compile_cache))


def test_float32_end_to_end(float32_engine, tiny_engine):
    """The rows are float32 in the pages and in the sections, a resume works, and the same call twice has the same bits."""
    engine = float32_engine
    assert {a.dtype.name for a in engine.pool.views.values()} == {"float32"}
    assert engine.layout.row_bytes == 2 * tiny_engine.layout.row_bytes
    first, logits = run(engine, prompt(200))
    again, found = run(engine, prompt(200))
    assert_bits_equal(found, logits)
    assert_bits_equal(again, first)
    assert first["sections"]["gdn.conv"].dtype == np.float32
    generated = list(engine.generate(prompt(200), max_tokens=8))
    assert len(generated) == 8
    assert engine.pool.free == engine.pool.pages - 4  # the generation's end state
    engine.pool = new_pool(engine)


def test_float32_rows_close_to_each_other_under_other_cuts(float32_engine):
    """float32 products are pure from 64 rows up only, so other cuts agree to rounding; a resume at a line of the grid is exact."""
    engine = float32_engine
    tokens = prompt(200)
    expected, logits = run(engine, tokens)
    slot = new_slot(engine, new_pool(engine))
    np.testing.assert_allclose(decode(slot, tokens)[-1], logits, atol=1e-3)
    np.testing.assert_allclose(slot.freeze().sections["gdn.S"], expected["sections"]["gdn.S"], atol=1e-4)
    head, _ = engine.prefill(tokens[:128])
    found, warm = run(engine, tokens, head)
    assert_bits_equal(warm, logits)
    assert_bits_equal(found, expected)
    engine.release(head)


def test_float32_and_bfloat16_close_to_each_other(float32_engine, tiny_engine):
    """One seed draws the same weights up to rounding: the two engines compute the same model."""
    _, fine = run(float32_engine, prompt(100))
    _, coarse = run(tiny_engine, prompt(100))
    assert np.corrcoef(fine, coarse)[0, 1] > 0.99
    assert not np.array_equal(fine, coarse)
