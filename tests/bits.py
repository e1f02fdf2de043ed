"""The exactness assertion: two pytrees hold the same bits."""

import jax
import numpy as np

from qjax.bits import as_bytes, differing_bits


def assert_bits_equal(actual, expected) -> None:
    """Same tree structure, and per leaf same shape, dtype and bits; the error names every leaf that differs, how much and where first."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(actual)
    wanted, wanted_structure = jax.tree_util.tree_flatten(expected)
    assert structure == wanted_structure, f"tree structures differ:\n  {structure}\n  expected {wanted_structure}"
    faults = [fault for (path, leaf), other in zip(leaves, wanted, strict=True) if (fault := _fault(leaf, other, _name(path)))]
    assert not faults, "\n".join(faults)


def _name(path) -> str:
    return jax.tree_util.keystr(path) or "the array"


def _fault(leaf, other, name: str) -> str | None:
    leaf, other = np.asarray(leaf), np.asarray(other)
    if leaf.shape != other.shape or leaf.dtype != other.dtype:
        return f"{name}: {leaf.dtype}{list(leaf.shape)}, expected {other.dtype}{list(other.shape)}"
    bits = differing_bits(leaf, other)
    if not bits:
        return None
    elements = np.flatnonzero((as_bytes(leaf) != as_bytes(other)).any(axis=1))
    first = tuple(int(i) for i in np.unravel_index(elements[0], leaf.shape))
    return f"{name}: {elements.size} of {leaf.size} elements differ in {bits} bits, first at {first}: {leaf[first]!r}, expected {other[first]!r}"
