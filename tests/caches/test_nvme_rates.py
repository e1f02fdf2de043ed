"""Rates: a read is worth it where it takes less time than the prefill that it saves."""

import pytest

from qjax.caches.nvme.rates import FORGOTTEN, KEPT, Rate, Rates


def rates(read: float | None, prefill: float | None) -> Rates:
    """Bytes and tokens a second."""
    of = Rates()
    for rate, per_second in ((of.read, read), (of.prefill, prefill)):
        if per_second is not None:
            rate.add(int(per_second), 1.0)
    return of


@pytest.mark.parametrize(
    ("read", "prefill", "pays"),
    [(None, None, True), (None, 10, True), (1000, None, True), (1001, 10, True), (999, 10, False), (1000, 10, False)],
)
def test_a_thousand_bytes_for_ten_tokens(read, prefill, pays):
    assert rates(read, prefill).pays(1000, 10) == pays


def test_the_last_measurements_count_most_and_small_ones_little():
    rate = Rate()
    assert rate.per_second is None
    rate.add(100, 1.0)
    rate.add(300, 1.0)
    assert rate.per_second == pytest.approx((KEPT * 100 + 300) / (KEPT + 1))
    before = rate.per_second
    rate.add(1, 1.0e-4)
    assert rate.per_second == pytest.approx(before, rel=0.01)
    for _ in range(30):
        rate.add(50, 1.0)
    assert rate.per_second == pytest.approx(50, rel=0.01)


def test_no_time_is_no_division_by_zero():
    rate = Rate()
    rate.add(0, 0.0)
    rate.add(10, 0.0)
    assert rate.per_second > 0


def test_a_disk_that_was_slow_once_is_measured_again():
    of = rates(1, 10)
    answers = [of.pays(1000, 10) for _ in range(2 * FORGOTTEN)]
    assert answers == [False] * FORGOTTEN + [True] * FORGOTTEN
