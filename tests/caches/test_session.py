"""A session: where a prompt resumes in it, against every anchor and length, and who holds its pages."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qjax.caches.anchors import Anchor
from qjax.caches.session import Session
from qjax.config import TOKEN
from qjax.pages import PagePool
from qjax.state import BLOCK, Layout, Section, Sequence, View

LAYOUT = Layout((Section("S", (2,), "float32"),), (Section("u", (BLOCK,), "float32"),), (View("K", 1, 1, 1, "float32"),), 128)
LOGITS = np.zeros(3, np.float32)


def state(keys, pages, length: int) -> Sequence:
    at = -(-length // LAYOUT.grid)
    arrays = {"S": np.zeros(2, np.float32)}, {"u": np.zeros(BLOCK, np.float32)}
    return Sequence(keys[:length].astype(np.int32), np.array(pages[:at], np.int32), np.int32(length), *arrays)


def session(pool, keys, anchors, tenant="") -> Session:
    """anchors: length -> logits. The session holds its pages alone."""
    pages = [pool.take() for _ in range(-(-keys.size // LAYOUT.grid))]
    given = [Anchor("grid", state(keys, pages, n), logits) for n, logits in anchors.items()]
    made = Session(pool, keys, tenant, state(keys, pages, keys.size), given, keys.size, "resident")
    pool.release(pages)
    return made


def by_trying(anchors: dict, kept: np.ndarray, keys: np.ndarray) -> tuple[int, bool, int]:
    """(start, whole, agrees): every anchor and every length tried."""
    agrees = next((i for i, (a, b) in enumerate(zip(kept, keys, strict=False)) if a != b), min(kept.size, keys.size))
    found = [(0, False)]
    for length, logits in anchors.items():
        least = max(length // BLOCK * BLOCK, min(BLOCK, length))  # fewer tokens are no hit, unless they are all that the anchor has
        found += [(n, False) for n in range(least, length + 1) if n <= agrees and n < keys.size]
        if logits is not None and length == agrees == keys.size:
            found.append((length, True))
    return *max(found), agrees


lengths = st.integers(1, 400)


@settings(max_examples=300)
@given(
    size=lengths,
    anchors=st.dictionaries(lengths, st.sampled_from([None, LOGITS]), max_size=8),
    same=st.integers(0, 450),
    more=st.integers(0, 200),
)
@example(size=200, anchors={128: None}, same=128, more=0)  # the prompt ends at a line whose logits are not known: the line serves nothing
@example(size=200, anchors={128: LOGITS}, same=128, more=0)
@example(size=190, anchors={150: LOGITS, 190: None}, same=150, more=0)  # whole, though a later anchor serves all but one token
@example(size=200, anchors={199: None, 200: None}, same=200, more=0)
@example(size=1, anchors={1: None}, same=1, more=0)
@example(size=1, anchors={1: LOGITS}, same=1, more=0)
@example(size=64, anchors={63: None, 64: None}, same=63, more=5)
@example(size=50, anchors={50: None}, same=10, more=5)  # a few tokens that all prompts begin with are no hit
def test_best_is_the_best_of_all(size, anchors, same, more):
    kept = np.arange(size)
    keys = np.concatenate([np.arange(same), np.full(more, -1)])
    if not keys.size:
        return
    anchors = {n: logits for n, logits in anchors.items() if n <= size}
    found, reached, agrees = session(PagePool(LAYOUT, 4), kept, anchors).best(keys, TOKEN)
    start, whole, exact = reached or (0, False, True)
    assert (start, whole, agrees) == by_trying(anchors, kept, keys)
    assert (found is None) == (start == 0)
    assert exact
    if found is not None:
        assert found.line <= start <= found.length
        found.sequence.cut(start, LAYOUT.grid)  # raises where it does not serve that length
        assert not whole or found.logits is not None


def test_anchors_are_ascending_and_keys_are_compared():
    pool, keys = PagePool(LAYOUT, 4), np.arange(300)
    made = session(pool, keys, {256: None, 64: None, 300: LOGITS, 128: None})
    assert [a.length for a in made.anchors] == [64, 128, 256, 300]
    other = keys.copy()
    other[70] += 1 << 40  # the low bits agree
    assert made.best(other, TOKEN)[1:] == ((64, False, True), 70)


def test_anchors_get_the_pages_that_the_session_holds():
    """An anchor that was taken before its last page was copied names the old page."""
    pool, keys = PagePool(LAYOUT, 4), np.arange(300)
    pages = [pool.take() for _ in range(4)]
    old = [Anchor("grid", state(keys, pages, 128)), Anchor("prompt", state(keys, pages[:3], 290), LOGITS)]
    made = Session(pool, keys, "", state(keys, [*pages[:2], pages[3]], 300), old, 300, "resident")
    pool.release(pages)
    assert pool.free == 1
    assert [a.sequence.pages.tolist() for a in made.anchors] == [pages[:1], [*pages[:2], pages[3]]]
    assert [a.sequence.tokens.tolist() for a in made.anchors] == [keys[:128].tolist(), keys[:290].tolist()]
    assert (made.anchors[1].logits is LOGITS, made.anchors[1].kind) == (True, "prompt")
    assert old[1].sequence.pages.tolist() == pages[:3]  # values stay what they are


def test_it_holds_its_pages_until_it_is_closed():
    pool = PagePool(LAYOUT, 4)
    pages = [pool.take() for _ in range(3)]
    made = Session(pool, np.arange(300), "", state(np.arange(300), pages, 300), [], 300, "resident")
    assert pool.holders.tolist().count(2) == 3
    pool.release(pages)
    assert pool.free == 1
    made.close()
    assert pool.free == 4
    made.close()  # holds nothing any more
    assert pool.free == 4


def test_a_session_of_released_pages_is_refused():
    pool = PagePool(LAYOUT, 4)
    page = pool.take()
    pool.release([page])
    with pytest.raises(ValueError, match="held by nobody"):
        Session(pool, np.arange(5), "", state(np.arange(5), [page], 5), [], 5, "resident")
    assert pool.free == 4


@pytest.mark.parametrize(
    ("length", "left", "pages"), [(300, 300, 3), (299, 256, 2), (256, 256, 2), (255, 130, 2), (129, 128, 1), (128, 128, 1), (127, 0, 0), (0, 0, 0)]
)
def test_cut_keeps_what_an_anchor_reaches(length, left, pages):
    """Rows that no anchor can be resumed at are given up with their pages; what stays can be resumed."""
    pool, keys = PagePool(LAYOUT, 4), np.arange(300)
    made = session(pool, keys, {128: None, 130: None, 256: None, 300: LOGITS})
    made.cut(length)
    assert (made.length, len(made.pages), pool.free) == (left, pages, 4 - pages)
    assert all(a.length <= left for a in made.anchors)
    reached = made.best(np.append(keys[:left], -1), TOKEN)[1]
    assert (reached.start if reached else 0) == left
    made.close()
    assert pool.free == 4
