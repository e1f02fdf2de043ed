"""The layout: every byte count is derived from the spec, and a sequence that does not fit it is refused by the name of its leaf."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.model.config import ModelConfig
from qjax.model.qwen3_5 import layout
from qjax.state import BLOCK, Layout, Section, Sequence, View, held
from tests.models import tiny_config


@pytest.mark.parametrize(
    ("preset", "sections", "row"),
    [("0.8b", 19_537_920, 12_288), ("4b", 51_511_296, 32_768), ("qwen3.8-27b", 153_944_064, 65_536)],
)
def test_published_byte_counts(preset, sections, row):
    found = layout(ModelConfig.preset(preset))
    assert (found.section_bytes, found.row_bytes, found.page_bytes) == (sections, row, 1024 * row)


def test_byte_counts_are_those_of_the_arrays():
    spec = layout(tiny_config(), grid=128)
    sequence = Sequence.empty(spec)
    assert spec.section_bytes == sum(np.asarray(a).nbytes for a in sequence.sections.values())
    assert spec.open_bytes == sum(np.asarray(a).nbytes for a in sequence.open.values())
    pages = [np.zeros(v.page_shape(128), held(v.dtype)) for v in spec.views]
    assert spec.page_bytes == sum(p.nbytes for p in pages) == 128 * spec.row_bytes
    assert all(v.nbytes == v.layers * v.heads * v.dim * 2 for v in spec.views)


def test_the_open_block_holds_the_inputs_of_a_block():
    """The raw projections of 64 rows in every GDN layer: what reopening needs and no more."""
    c = tiny_config()
    spec = layout(c)
    assert spec.open_bytes == c.gdn_layers * BLOCK * (2 * c.conv_channels + 2 * 4 * c.value_heads)


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", "uint16"), ("float16", "uint16"), ("float32", "float32"), ("int32", "int32")])
def test_two_byte_floats_are_held_as_bits(dtype, kept):
    assert held(dtype) == np.dtype(kept)
    section = Section("x", (2, 3), dtype)
    assert section.zeros().dtype == np.dtype(kept)
    assert section.nbytes == section.zeros().nbytes == math.prod((2, 3)) * jnp.dtype(dtype).itemsize


def test_the_empty_sequence_fits_its_layout():
    spec = layout(tiny_config(), grid=64)
    spec.check(Sequence.empty(spec))


def test_a_sequence_is_a_frozen_tree():
    sequence = Sequence.empty(layout(tiny_config(), grid=64))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sequence.length = 3
    leaves, structure = jax.tree.flatten(sequence)
    assert len(leaves) == 4 + len(sequence.sections) + len(sequence.open)  # the length is an array among them, never static
    again = jax.tree.unflatten(structure, leaves)
    assert again.sections["gdn.S"] is sequence.sections["gdn.S"]


SPEC = Layout(
    sections=(Section("a", (2, 3), "float32"), Section("b", (4,), "bfloat16")),
    open=(Section("c", (5,), "float32"),),
    views=(View("K", 1, 2, 8, "bfloat16"),),
    grid=64,
)


def sequence(**changes) -> Sequence:
    """70 tokens on two pages."""
    good = Sequence(
        tokens=np.zeros(70, np.int32),
        pages=np.zeros(2, np.int32),
        length=np.int32(70),
        sections={"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.uint16)},
        open={"c": np.zeros(5, np.float32)},
    )
    return good.replace(**changes)


def test_a_good_sequence_passes():
    SPEC.check(sequence())
    SPEC.check(sequence(tokens=np.zeros(128, np.int32), length=np.int32(128)))  # two full pages, and none for what comes next


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sections={"a": np.zeros((3, 2), np.float32), "b": np.zeros(4, np.uint16)}), r"section a: expected float32 \(2, 3\), found .*\(3, 2\)"),
        (dict(sections={"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int16)}), r"section b: expected uint16 \(4,\), found int16"),
        (dict(sections={"a": np.zeros((2, 3), np.float32)}), r"section: expected \['a', 'b'\], found \['a'\]"),
        (dict(open={"c": np.zeros(5, np.float64)}), r"open block c: expected float32 \(5,\), found float64 \(5,\)"),
        (dict(open={}), r"open block: expected \['c'\], found \[\]"),
        (dict(pages=np.zeros(3, np.int32)), r"70 tokens has 2 pages: found length 70, 3 pages"),
        (dict(pages=np.zeros(1, np.int32)), r"70 tokens has 2 pages: found length 70, 1 pages"),
        (dict(length=np.int32(69)), r"70 tokens has 2 pages: found length 69, 2 pages"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    """A10, A15: no sequence whose length, pages, tokens or state disagree gets into a slot."""
    with pytest.raises(ValueError, match=message):
        SPEC.check(sequence(**changes))
