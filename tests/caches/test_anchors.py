"""Which anchors stay: within a budget in bytes, at the least expected loss."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.caches.anchors import NEWEST, Anchor, Depths, live_bytes, newest, spread, thin
from qjax.state import BLOCK, Sequence

SIZE = 1000
"""Bytes of one anchor's sections here."""
OPEN = np.zeros(300, np.uint8)


def anchor(length: int, kind: str = "grid", size: int = SIZE, logits=None, **arrays) -> Anchor:
    sections = arrays or {"S": np.zeros(size, np.uint8)}
    sequence = Sequence(np.zeros(length, np.int32), np.zeros(0, np.int32), np.int32(length), sections, {"u": OPEN})
    return Anchor(kind, sequence, logits)


def at(lengths, kind="grid") -> list[Anchor]:
    return [anchor(n, kind) for n in lengths]


def lengths(anchors) -> list[int]:
    return [a.length for a in anchors]


def test_an_anchor_serves_its_open_block():
    assert [(a.length, a.line) for a in at([1, 63, 64, 65, 127, 128])] == [(1, 0), (63, 0), (64, 64), (65, 64), (127, 64), (128, 128)]


def test_live_bytes_count_what_is_kept_alive():
    """Sections, off a block line the open inputs, and logits."""
    logits = np.zeros(10, np.float32)
    assert live_bytes([]) == 0
    assert live_bytes([anchor(BLOCK)]) == SIZE
    assert live_bytes([anchor(BLOCK, logits=logits)]) == SIZE + 40
    assert live_bytes([anchor(BLOCK + 1)]) == SIZE + OPEN.nbytes
    assert live_bytes([anchor(BLOCK), anchor(2 * BLOCK)]) == 2 * SIZE


def test_live_bytes_count_shared_arrays_once():
    S, T = np.zeros(700, np.uint8), np.zeros(50, np.uint8)
    one, two = anchor(BLOCK, S=S, T=T), anchor(2 * BLOCK, S=S, T=T.copy())
    assert live_bytes([one, two]) == 700 + 50 + 50
    assert live_bytes([one, one]) == live_bytes([one]) == 750
    assert live_bytes(iter([anchor(1), anchor(2)])) == 2 * SIZE + OPEN.nbytes  # the open inputs are one array here


@given(depths=st.lists(st.integers(0, 300_000)), cuts=st.lists(st.integers(0, 2**20), min_size=1))
def test_shares_are_a_distribution(depths, cuts):
    learned = Depths()
    for depth in depths:
        learned.add(depth)
    edges = [0, *sorted(cuts), 2**31]
    parts = [learned.share(a, b) for a, b in itertools.pairwise(edges)]
    assert all(part >= 0 for part in parts)
    assert math.isclose(sum(parts), 1)
    assert all(learned.share(depth, depth + 1) > 0 for depth in edges[:-1])  # no depth is ever ruled out


def test_shares_before_requests_close_to_alike_and_then_to_what_was_seen():
    """Alike in every power of two at first; what was seen weighs more with every request."""
    learned = Depths()
    powers = [learned.share(0, 1), *(learned.share(2**p, 2 ** (p + 1)) for p in range(20))]
    assert np.allclose(powers, 1 / 32)
    for _ in range(968):
        learned.add(100)
    assert math.isclose(learned.share(64, 128), 969 / 1000)
    assert math.isclose(learned.share(64, 96), 969 / 2000)
    assert math.isclose(learned.share(2**10, 2**11), 1 / 1000)


def loss(kept: list[Anchor], gone: int, depths: Depths) -> float:
    """Expected tokens that are read again without one anchor, summed over every length at which a request can part."""
    below = kept[gone - 1].length if gone else 0
    here, above, end = kept[gone].length, kept[gone + 1].length, kept[-1].length
    return sum(depths.share(end - n, end - n + 1) for n in range(here, above)) * (here - below)


def parted(*depths: int, times: int = 200) -> Depths:
    learned = Depths()
    for depth in depths * times:
        learned.add(depth)
    return learned


@pytest.mark.parametrize("learned", [Depths(), parted(500), parted(3000), parted(5, 1500, 3900)], ids=["nothing", "500", "3000", "three"])
def test_the_cheapest_goes_first(learned):
    """One at a time, each the one whose loss a sum over all lengths finds the least."""
    kept = at(range(256, 4097, 256))
    while len(kept) > NEWEST:
        fewer = thin(kept, SIZE * (len(kept) - 1), learned)
        (gone,) = [i for i, a in enumerate(kept) if a not in fewer]
        losses = [loss(kept, i, learned) for i in range(len(kept) - NEWEST)]
        assert losses[gone] <= min(losses) * 1.05  # the sum has the ends of the intervals elsewhere
        kept = fewer


def test_where_requests_part_anchors_stay():
    """The control has learned nothing, and another one stays."""
    anchors = at(range(256, 8193, 256))
    learned = thin(anchors, 6 * SIZE, parted(5000, times=5000))
    untold = thin(anchors, 6 * SIZE, Depths())
    assert len(learned) == len(untold) == 6
    assert any(4096 < 8192 - n < 8192 for n in lengths(learned)[:2])
    assert lengths(learned) != lengths(untold)


def test_untold_gaps_grow_with_the_depth():
    gaps = np.diff([0, *lengths(thin(at(range(64, 64 * 129, 64)), 12 * SIZE, Depths()))])
    assert gaps[0] > gaps[4] > gaps[-1] == 64


@given(
    lengths_=st.sets(st.integers(1, 5000), max_size=25),
    kinds=st.lists(st.sampled_from(["grid", "prompt", "end", "history", "branch"]), min_size=25, max_size=25),
    sizes=st.lists(st.integers(1, 3000), min_size=25, max_size=25),
    budget=st.integers(0, 30_000),
    depths=st.lists(st.integers(0, 6000), max_size=10),
)
def test_what_always_holds(lengths_, kinds, sizes, budget, depths):
    """The newest stay, the order too, the budget is held where that leaves a choice, and nothing goes that had room."""
    anchors = [anchor(n, kind, size) for n, kind, size in zip(sorted(lengths_), kinds, sizes, strict=False)]
    before = list(anchors)
    kept = thin(anchors, budget, parted(*depths, times=1))
    assert anchors == before
    assert kept == [a for a in before if a in kept]
    assert kept[-1:] == before[-1:]
    assert set(newest(before)) <= set(kept)
    assert live_bytes(kept) <= budget or kept == newest(before)
    if live_bytes(before) <= budget:
        assert kept == before


def test_the_newest_do_not_count_what_is_superseded():
    """Each turn leaves a prompt's end and its own: four of these alone would leave an edit in the last turn no anchor below it."""
    anchors = [
        anchor(n, kind) for n, kind in [(64, "grid"), (128, "grid"), (192, "branch"), (200, "prompt"), (210, "end"), (230, "prompt"), (240, "end")]
    ]
    assert lengths(newest(anchors)) == [128, 192, 230, 240]
    assert lengths(newest(anchors[:4])) == [64, 128, 192, 200]
    assert newest([]) == []


@pytest.mark.parametrize("kind", ["prompt", "end", "history"])
def test_superseded_go_first(kind):
    """Though what they are worth is more than any grid line's; a kind that has no later one stays, and so do grid lines otherwise."""
    old = anchor(4000, kind)
    anchors = [*at(range(256, 3841, 256)), old, *at(range(8000, 8003)), anchor(8003, kind)]
    room = live_bytes(anchors) - 1
    assert old not in thin(anchors, room, Depths())
    assert old in thin([*anchors[:-1], anchor(8003, "branch")], room, Depths())
    assert set(thin(anchors, room, Depths())) == set(anchors) - {old}


def test_no_budget_leaves_the_newest():
    assert lengths(thin(at(range(1, 10)), 0, Depths())) == [6, 7, 8, 9]
    assert thin([], 0, Depths()) == []


def test_spread_keeps_the_last_and_others_evenly():
    anchors = at(range(100, 10_001, 100))
    assert lengths(spread(anchors, 1)) == [10_000]
    assert lengths(spread(anchors, 4)) == [2500, 5000, 7500, 10_000]
    assert spread(anchors[:3], 3) == anchors[:3]
    assert spread([], 3) == []


@given(chosen=st.sets(st.integers(1, 3000), min_size=1, max_size=20), most=st.integers(1, 12))
def test_spread_is_a_selection(chosen, most):
    anchors = at(sorted(chosen))
    some = spread(anchors, most)
    assert 1 <= len(some) <= most
    assert some == [a for a in anchors if a in some]
    assert some[-1] is anchors[-1]
