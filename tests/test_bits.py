"""Counting differing bits, and the assertion that the exactness tests stand on: it must fail for every kind of difference."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qjax import bits
from tests.bits import assert_bits_equal


def test_counts_bits():
    assert bits.differing_bits(np.uint8([0, 255]), np.uint8([1, 0])) == 9
    assert bits.differing_bits(np.float32([1.0, 0.0]), np.float32([1.0, -0.0])) == 1
    assert bits.differing_bits(np.zeros((0, 4)), np.zeros((0, 4))) == 0
    assert bits.differing_bits(np.float32(2.0), np.float32(2.0)) == 0


def test_reads_bfloat16_and_transposed_arrays():
    a = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)
    assert bits.differing_bits(a, a) == 0
    assert bits.differing_bits(a, -a) == 12
    assert bits.differing_bits(np.asarray(a).T, np.ascontiguousarray(np.asarray(a).T)) == 0


def test_equal_nans_are_equal_only_in_their_payload():
    quiet, other = np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32)
    assert bits.differing_bits(quiet, quiet.copy()) == 0
    assert bits.differing_bits(quiet, other) == 1


@pytest.mark.parametrize("other", [np.zeros((2, 1), np.float32), np.zeros(2, np.int32), np.zeros(3, np.float32)])
def test_refuses_other_shapes_and_dtypes(other):
    with pytest.raises(ValueError, match="cannot compare the bits of float32"):
        bits.differing_bits(np.zeros(2, np.float32), other)


def test_refuses_objects():
    with pytest.raises(ValueError, match="object"):
        bits.as_bytes(np.array(["a", None], dtype=object))


@given(hnp.arrays(st.sampled_from([np.uint8, np.uint16, np.uint64]), hnp.array_shapes(max_dims=3, max_side=8)), st.integers(0, 2**30))
def test_one_flipped_bit_is_one_bit(array, where):
    flipped = array.copy()
    flat = flipped.reshape(-1).view(np.uint8)
    flat[where // 8 % flat.size] ^= np.uint8(1 << where % 8)
    assert bits.differing_bits(array, flipped) == 1
    with pytest.raises(AssertionError, match=r"1 of .* elements differ in 1 bits"):
        assert_bits_equal(array, flipped)


def test_blocks_add_up(monkeypatch):
    a, b = np.arange(1000, dtype=np.uint32), np.arange(1000, dtype=np.uint32)[::-1]
    whole = bits.differing_bits(a, b)
    monkeypatch.setattr(bits, "BLOCK_BYTES", 7)
    assert bits.differing_bits(a, b) == whole > 0


def test_assertion_names_leaf_count_and_first_index():
    good = {"sections": {"state": np.zeros((2, 3), np.float32)}, "length": np.int32(5)}
    bad = {"sections": {"state": np.float32([[0, 0, -0.0], [1, 0, 0]])}, "length": np.int32(5)}
    assert_bits_equal(good, {"sections": {"state": jnp.zeros((2, 3), jnp.float32)}, "length": np.int32(5)})
    message = r"\['sections'\]\['state'\]: 2 of 6 elements differ in 8 bits, first at \(0, 2\): .*-0.0.*, expected .*0.0"
    with pytest.raises(AssertionError, match=message):
        assert_bits_equal(bad, good)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({"a": np.zeros(2, np.float32)}, "structures differ"),
        ([np.zeros(3, np.float32)], r"\[0\]: float32\[3\], expected float32\[2\]"),
        ([np.zeros(2, np.float64)], r"\[0\]: float64\[2\], expected float32\[2\]"),
        ([np.zeros((1, 2), np.float32)], r"float32\[1, 2\]"),
    ],
)
def test_assertion_sees_structure_shape_and_dtype(actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_bits_equal(actual, [np.zeros(2, np.float32)])
