"""The response cache: an identical greedy request, and nothing that differs in anything an answer depends on."""

import tracemalloc

import numpy as np
import pytest

from qjax.caches.response import ResponseCache
from qjax.sampling import Sampling
from tests.bits import assert_bits_equal
from tests.models import prompt

KEYS = prompt(200).astype(np.int64)
REQUEST = dict(keys=KEYS, tenant="a", sampling=Sampling(), max_tokens=50, stop=["\n", "END"])
ANSWER = dict(tokens=[5, 6, 7], finish="stop")


def filled(limit=1 << 20) -> ResponseCache:
    cache = ResponseCache(limit)
    assert cache.put(**REQUEST, **ANSWER)
    return cache


def test_an_identical_request_gets_the_answer():
    cache = filled()
    found = cache.get(**REQUEST)
    assert_bits_equal(found.tokens, np.array([5, 6, 7], np.int32))
    assert found.finish == "stop"
    stats = cache.stats()
    assert (stats["hits"], stats["misses"], stats["offers"], stats["entries"]) == (1, 0, 1, 1)
    assert cache.get(**REQUEST | {"keys": KEYS.copy(), "stop": ("\n", "END")}) is found
    with pytest.raises(ValueError, match="read-only"):
        found.tokens[0] = 1


def changed(at, to):
    keys = KEYS.copy()
    keys[at] = to
    return keys


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "b"},
        {"tenant": ""},
        {"max_tokens": 51},
        {"stop": []},
        {"stop": ["\n"]},
        {"stop": ["\nEND"]},
        {"sampling": Sampling(presence_penalty=0.5)},
        {"sampling": Sampling(repetition_penalty=1.5)},
        {"keys": KEYS[:-1]},
        {"keys": np.append(KEYS, 0)},
        {"keys": changed(0, KEYS[0] + 1)},
        {"keys": changed(199, KEYS[199] + 2**32)},
    ],
)
def test_another_request_does_not(change):
    cache = filled()
    assert cache.get(**REQUEST | change) is None
    assert cache.stats()["misses"] == 1
    assert cache.get(**REQUEST) is not None


def test_what_a_greedy_answer_does_not_depend_on_is_not_compared():
    assert filled().get(**REQUEST | {"sampling": Sampling(seed=3, top_k=5, top_p=0.5, min_p=0.1, presence_penalty=-0.0)}) is not None


def test_keys_with_equal_hashes_are_told_apart():
    """F5: the hash only finds the candidate."""

    class Forged(bytes):
        def __hash__(self):
            return 0

    cache = filled()
    ((key, entry),) = cache._entries.items()
    cache._entries = {(Forged(key[0]), *key[1:]): entry}
    other = (Forged(changed(3, 9999).tobytes()), *key[1:])
    assert hash(other) == hash(next(iter(cache._entries)))
    assert other not in cache._entries
    assert (Forged(key[0]), *key[1:]) in cache._entries


def test_sampling_is_refused():
    cache = ResponseCache(1 << 20)
    warm = REQUEST | {"sampling": Sampling(temperature=0.5)}
    assert not cache.put(**warm, **ANSWER)
    assert cache.get(**warm) is None
    stats = cache.stats()
    assert (stats["refused_sampling"], stats["misses"], stats["entries"]) == (2, 0, 0)


def test_a_cancelled_answer_is_refused():
    cache = ResponseCache(1 << 20)
    assert not cache.put(**REQUEST, tokens=[1], finish="cancelled")
    assert cache.get(**REQUEST) is None
    assert cache.stats()["refused_unfinished"] == 1


def test_a_later_answer_replaces_the_first():
    cache = filled()
    size = cache.nbytes
    assert cache.put(**REQUEST, tokens=[5, 6, 7, 8], finish="length")
    assert cache.get(**REQUEST).finish == "length"
    assert (cache.stats()["entries"], cache.nbytes) == (1, size + 4)


def test_the_least_recently_used_goes_first():
    size = filled().nbytes
    cache = ResponseCache(3 * size)
    requests = [REQUEST | {"keys": changed(0, at)} for at in range(5)]
    for request in requests[:3]:
        assert cache.put(**request, **ANSWER)
    assert cache.get(**requests[0]) is not None
    assert cache.put(**requests[3], **ANSWER)
    assert [cache.get(**r) is not None for r in requests] == [True, False, True, True, False]
    assert cache.stats()["evicted"] == 1
    assert cache.nbytes == 3 * size


def test_what_is_larger_than_the_limit_is_refused_and_nothing_is_evicted():
    cache = filled(filled().nbytes)
    assert not cache.put(**REQUEST | {"max_tokens": 51}, tokens=[1] * 100, finish="stop")
    assert cache.stats()["refused_too_large"] == 1
    assert cache.get(**REQUEST) is not None
    assert not ResponseCache(0).put(**REQUEST, **ANSWER)
    with pytest.raises(ValueError, match="0 or more"):
        ResponseCache(-1)


def test_bytes_are_the_live_ones():
    """G2: within 1 % at 4,000 keys an answer; cleared, nothing is left."""
    cache = ResponseCache(1 << 30)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for seed in range(20):
            assert cache.put(prompt(4000, seed=seed), "a", Sampling(), 50, ("END",), range(300), "length")
        live = tracemalloc.get_traced_memory()[0] - before
        assert abs(live - cache.stats()["bytes"]) <= 0.01 * live
        cache.clear()
        assert cache.stats()["bytes"] == cache.stats()["entries"] == 0
        assert tracemalloc.get_traced_memory()[0] - before < 5000
    finally:
        tracemalloc.stop()
