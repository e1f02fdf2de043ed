"""The greedy gate: what passes, what is counted, what fails."""

import jax.numpy as jnp
import numpy as np
import pytest

from qjax.gate import Gate, greedy_gate, ulp


def logits(*pairs):
    """One row a token: the best two of four logits, at ids 0 and 1."""
    return np.array([[first, second, -50, -60] for first, second in pairs], np.float32)


@pytest.mark.parametrize("value", [1.0, 1.5, 1.99, 2.0, 3.0, -3.0, 0.1, 17.3, 255.0, 256.0, 1e-30])
def test_an_ulp_is_bfloat16s(value):
    below = np.float32(jnp.asarray(value, jnp.bfloat16))
    step = np.array(below).view(np.uint32) + np.uint32(1 << 16)
    assert ulp(value) == abs(float(step.view(np.float32)) - float(below))


def test_equal_answers_pass():
    assert greedy_gate([0, 0, 3], logits((9, 1), (9, 1), (9, 1)), [0, 0, 3]) == Gate(3)
    assert greedy_gate([0, 0, 3], logits((9, 1), (9, 1), (9, 1)), [0, 0]) == Gate(2)
    assert greedy_gate([], np.zeros((0, 4), np.float32), [1]) == Gate(0)


def test_a_near_tie_is_counted_and_what_follows_is_not_compared():
    assert greedy_gate([0, 0, 3], logits((9, 1), (9, 9 - 2**-4), (9, 1)), [0, 1, 2]) == Gate(2, near_tie=1)


def test_any_other_difference_fails():
    assert greedy_gate([0, 0, 3], logits((9, 1), (9, 9 - 2**-4 - 2**-6), (9, 1)), [0, 1, 2]) == Gate(2, failed=1)


def test_only_a_token_as_good_as_the_best_passes():
    row = np.array([[-1, 4, 2, 4 - 2**-6, 3]], np.float32)
    assert greedy_gate([1], row, [3]) == Gate(1, near_tie=0)
    assert greedy_gate([1], row, [4]) == Gate(1, failed=0)  # though the two best are a near tie
