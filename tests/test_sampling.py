"""Sampling against a plain reference (float64, whole sorts), exact expected frequencies over many draws, and properties that always hold."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qjax import sampling
from qjax.sampling import Sampling, sample

NONE = np.array([], np.int64)
LOGITS = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-50, 50, width=32))
DISTINCT = hnp.arrays(np.float32, st.integers(2, 300), elements=st.floats(-50, 50, width=32), unique=True)


def reference(logits, settings: Sampling, history=(), draw=0, allowed=None):
    """Probabilities [allowed] in the plainest form: one transform after another over the whole row."""
    x = np.array(logits[:allowed], np.float64)
    for token in set(history):
        x[token] = x[token] / settings.repetition_penalty if x[token] > 0 else x[token] * settings.repetition_penalty
    for token in set(history[len(history) - draw :]):
        x[token] -= settings.presence_penalty
    order = sorted(range(x.size), key=lambda i: (-x[i], i))
    kept = order[: settings.top_k or None]
    p = np.exp((x[kept] - x[order[0]]) / settings.temperature)
    count = p.size
    if settings.top_p < 1:
        count = next((n for n, held in enumerate(itertools.accumulate(p / p.sum()), start=1) if held >= settings.top_p), p.size)
    p = p[:count] * (p[:count] >= settings.min_p * p[0])
    whole = np.zeros(x.size)
    whole[kept[:count]] = p / p.sum()
    return whole


def counts(logits, settings: Sampling, draws: int, history=NONE, allowed=None):
    allowed = allowed or len(logits)
    return np.bincount([sample(logits, settings, history, draw, allowed) for draw in range(draws)], minlength=allowed)


ROW = np.float32([2.0, -1.0, 0.5, 3.0, 3.0, -4.0, 1.0, 0.0, 2.5, 1.5, 9.0, np.nan])  # the last two ids are not allowed


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.4),
        Sampling(temperature=3.0, seed=2**64 - 1),
        Sampling(temperature=1.0, top_k=4),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.5, top_k=7, top_p=0.9, min_p=0.1, seed=3),
        Sampling(temperature=1.0, repetition_penalty=1.8, seed=4),
        Sampling(temperature=0.7, top_k=8, top_p=0.95, repetition_penalty=0.6, seed=5),
    ],
)
def test_frequencies(settings):
    """20,000 draws against their exact probabilities; 45 is beyond the 1e-6 quantile of chi-square at 9 degrees of freedom."""
    history = np.array([3, 1, 3, 8, 11, 10_000])
    p = reference(ROW, settings, [3, 1, 8], allowed=10)
    seen = np.bincount([sample(ROW, settings, history, draw, 10) for draw in range(20_000)], minlength=10)
    assert seen[p == 0].sum() == 0
    expected = 20_000 * p[p > 0]
    assert ((seen[p > 0] - expected) ** 2 / expected).sum() < 45


def test_a_wrong_distribution_fails_the_frequency_test():
    p = reference(ROW, Sampling(temperature=1.1), allowed=10)
    seen = counts(ROW, Sampling(temperature=1.0), 20_000, allowed=10)
    assert ((seen - 20_000 * p) ** 2 / (20_000 * p)).sum() > 45


def test_successive_draws_are_independent():
    """Pairs of draws, 20,000 of them: chi-square at 9 degrees of freedom again."""
    tokens = np.array([sample(np.zeros(4, np.float32), Sampling(temperature=1.0), NONE, draw, 4) for draw in range(20_001)])
    seen = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert ((seen - 1250) ** 2 / 1250).sum() < 60


@pytest.mark.parametrize("settings", [Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9999), Sampling(temperature=1.0, top_p=0.5)])
def test_large_vocabulary_agrees_with_the_reference(settings):
    """248,320 nearly flat logits: sums in blocks, and top-p has to grow its sorted part."""
    logits = np.random.default_rng(0).standard_normal(248_320).astype(np.float32)
    p = reference(logits, settings)
    tokens = np.array([sample(logits, settings, NONE, draw, logits.size) for draw in range(100)])
    assert (p[tokens] > 0).all()
    # The mean of -log p over draws is the entropy; its standard error here is at most 0.1.
    entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
    assert abs(-np.log(p[tokens]).mean() - entropy) < 0.4


def test_draw_depends_on_seed_and_place_only():
    logits = np.zeros(1000, np.float32)
    places = itertools.product(range(4), range(50))
    tokens = {(seed, draw): sample(logits, Sampling(temperature=1.0, seed=seed), NONE, draw, 1000) for seed, draw in places}
    for (seed, draw), token in reversed(tokens.items()):
        assert token == sample(logits, Sampling(temperature=1.0, seed=seed), np.arange(draw), draw, 1000)
    assert len({tuple(tokens[seed, draw] for draw in range(50)) for seed in range(4)}) == 4
    assert len({tokens[0, draw] for draw in range(50)}) > 40


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 50.0, 1e30]),
    top_k=st.integers(0, 400),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    seed=st.integers(0, 2**64 - 1),
)


@given(LOGITS, SETTINGS, st.data())
def test_ids_past_the_allowed_ones_are_never_drawn(logits, settings, data):
    allowed = data.draw(st.integers(1, logits.size))
    poison = data.draw(st.sampled_from([np.inf, np.nan, 1e30, -1e30]))
    history = data.draw(hnp.arrays(np.int64, st.integers(0, 20), elements=st.integers(-(2**40), 2**40) | st.integers(0, 300)))
    poisoned = logits.copy()
    poisoned[allowed:] = poison
    token = sample(poisoned, settings, history, 5, allowed)
    assert 0 <= token < allowed
    assert token == sample(logits[:allowed], settings, history, 5, allowed)


@given(LOGITS, SETTINGS, st.integers(0, 10**6))
def test_every_drawn_id_has_a_probability(logits, settings, draw):
    mask = np.arange(logits.size) % 3 != 0
    if not mask.any():
        return
    logits[~mask] = -np.inf
    assert mask[sample(logits, settings, NONE, draw, logits.size)]


@given(DISTINCT, st.integers(0, 10**6))
def test_forms_of_greedy_agree(logits, draw):
    greedy = int(np.argmax(logits))
    for settings in [{"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": 5, "min_p": 1.0, "top_p": 0.9}]:
        assert sample(logits, Sampling(temperature=1.0, **settings), NONE, draw, logits.size) == greedy
    assert sample(logits, Sampling(), NONE, draw, logits.size) == greedy


def test_ties_go_to_the_lowest_id():
    row = np.float32([1, 5, 5, 0, 5, -0.0])
    assert sample(row, Sampling(), NONE, 0, 6) == 1
    assert {sample(row, Sampling(temperature=1.0, top_k=1), NONE, draw, 6) for draw in range(50)} == {1}
    assert {sample(row, Sampling(temperature=1.0, top_k=2), NONE, draw, 6) for draw in range(50)} == {1, 2}
    assert {sample(row, Sampling(temperature=1.0, min_p=1.0), NONE, draw, 6) for draw in range(50)} == {1, 2, 4}


@given(LOGITS, st.sampled_from([0.3, 1.0, 5.0]), st.integers(0, 20), st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.sampled_from([1, 2, 128]))
def test_filters_keep_what_the_reference_keeps(logits, temperature, top_k, top_p, min_p, first_try):
    """Between the reference with thresholds a little tighter and a little looser: a token right on one may fall on either side in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "FIRST_TRY", first_try)
        ids, weights = sampling._candidates(logits, logits.max(), Sampling(temperature, top_k, top_p, min_p))
    kept = np.isin(np.arange(logits.size), ids) if ids is not None else np.ones(logits.size, bool)
    assert kept.sum() == weights.size
    tighter = reference(logits, Sampling(temperature, top_k, top_p * (1 - 1e-5), min(min_p * (1 + 1e-5), 1.0))) > 0
    looser = reference(logits, Sampling(temperature, top_k, min(top_p * (1 + 1e-5), 1.0), min_p * (1 - 1e-5))) > 0
    assert not (tighter & ~kept).any()
    assert not (kept & ~looser).any()


def test_partial_sort_is_the_whole_sort(monkeypatch):
    logits = np.round(np.random.default_rng(1).standard_normal(2000).astype(np.float32), 1)  # many ties
    whole = np.lexsort([np.arange(logits.size), -logits])
    lengths = set()
    for first_try in (1, 3, 128, 2000):
        monkeypatch.setattr(sampling, "FIRST_TRY", first_try)
        part = sampling._candidates(logits, logits.max(), Sampling(temperature=1.0, top_p=0.7))[0]
        assert (part == whole[: part.size]).all()
        lengths.add(part.size)
    assert len(lengths) == 1
    assert 100 < lengths.pop() < 1900


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 50), (0.501, 51), (0.499, 50), (0.995, 100), (1e-6, 1)])
def test_top_p_keeps_the_fewest(top_p, kept):
    ids, _ = sampling._candidates(np.zeros(100, np.float32), np.float32(0), Sampling(temperature=1.0, top_p=top_p))
    assert ids.tolist() == list(range(kept))


def test_a_weight_of_zero_is_never_picked():
    last = float(np.nextafter(1, 0))
    assert [sampling._pick(np.float32([0, 1, 0, 2, 0]), u) for u in (0.0, 0.33, 0.34, last)] == [1, 1, 3, 3]
    for seed in range(300):  # at the end of a block, where the two sums may round to different sides
        weights = np.exp(8 * np.random.default_rng(seed).standard_normal(2 * sampling.SUM_BLOCK, np.float32))
        weights[sampling.SUM_BLOCK - 1 : sampling.SUM_BLOCK + 1] = 0
        first = weights[: sampling.SUM_BLOCK].sum(dtype=np.float64) / weights.sum(dtype=np.float64)
        for u in (first, np.nextafter(first, 0), np.nextafter(first, 1)):
            assert weights[sampling._pick(weights, u)] > 0


def test_penalties_when_greedy():
    row = np.float32([4.0, 3.0, -1.0, -2.0])
    assert sample(row, Sampling(repetition_penalty=2.0), np.array([0]), 0, 4) == 1  # 4 / 2 < 3
    assert sample(np.float32([0.5, 0.3]), Sampling(repetition_penalty=2.0), np.array([0]), 0, 2) == 1
    assert sample(np.float32([-1.0, -1.5]), Sampling(repetition_penalty=2.0), np.array([0, 0]), 0, 2) == 1  # -1 * 2 < -1.5, once
    assert sample(row, Sampling(presence_penalty=1.5), np.array([0, 0]), 2, 4) == 1
    assert sample(row, Sampling(presence_penalty=0.5), np.array([0, 0]), 2, 4) == 0  # once, not twice
    assert row.tolist() == [4.0, 3.0, -1.0, -2.0]


def test_presence_penalty_counts_generated_tokens_only():
    row, settings = np.float32([4.0, 3.0]), Sampling(presence_penalty=2.0)
    assert sample(row, settings, np.array([0, 0, 1]), 0, 2) == 0
    assert sample(row, settings, np.array([0, 0, 1]), 1, 2) == 0
    assert sample(row, settings, np.array([0, 1, 0]), 1, 2) == 1
    assert sample(row, settings, np.array([0]), 1, 2) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0.0, np.nan, np.nan], "2 of 3 logits are NaN, the first at id 1"),
        ([0.0, 1.0, np.inf], r"1 of 3 logits are \+inf, the first at id 2"),
        ([-np.inf] * 3, "all 3 allowed logits are -inf"),
    ],
)
def test_broken_rows_are_errors(row, message, temperature):
    with pytest.raises(ValueError, match=message):
        sample(np.float32(row), Sampling(temperature=temperature), NONE, 0, 3)


@pytest.mark.parametrize(("shape", "allowed"), [((4,), 0), ((4,), 5), ((1, 4), 4)])
def test_wrong_shapes_are_errors(shape, allowed):
    with pytest.raises(ValueError, match="expected \\[V\\]"):
        sample(np.zeros(shape, np.float32), Sampling(), NONE, 0, allowed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", float("nan")),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
    ],
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*, not {value!r}"):
        Sampling(**{field: value})


def test_settings_at_the_ends_are_taken():
    Sampling(temperature=1, top_k=np.int32(3), top_p=np.float32(1), min_p=1, presence_penalty=-2, repetition_penalty=100, seed=2**64 - 1)
