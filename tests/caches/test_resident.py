"""The resident tier on made up states: what a running request's anchors take beside those that it shares."""

import numpy as np
import pytest

from qjax.caches.anchors import NEWEST, live_bytes
from qjax.caches.resident import Plan, ResidentPrefix
from qjax.config import CacheConfig
from qjax.pages import PagePool
from tests.caches.snapshots import LAYOUT
from tests.caches.test_anchors import SIZE, anchor, at

GB = 2**30


@pytest.mark.parametrize("shared", [0, 3, 9])
def test_a_running_requests_anchors_fit_the_budget_with_what_it_inherits(shared):
    """10 anchors have room: at every moment no more are there, as long as they are more than the newest."""
    tier = ResidentPrefix(PagePool(LAYOUT, 4), CacheConfig(resident_gb=10 * SIZE / GB))
    plan, anchors = Plan("resident", at(range(64, 64 * (shared + 1), 64)), None), []
    for line in range(64 * (shared + 1), 64 * (shared + 21), 64):
        tier.fit(plan, anchors, new := anchor(line), GB)
        assert anchors[-1] is new
        assert live_bytes([*plan.inherited, *anchors]) <= 10 * SIZE or len(anchors) <= NEWEST + 1
    assert len(anchors) == max(NEWEST + 1, 10 - shared)
    assert tier.dropped["thinned"] == 20 - len(anchors)
    assert np.all(np.diff([a.length for a in anchors]) > 0)
