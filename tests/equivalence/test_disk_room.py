"""What goes from the disk tier, and where a read is not worth it."""

import os
import time

import numpy as np
import pytest

from qjax.caches.nvme.filed import DISK, PAGE
from storage import Storage
from tests.equivalence.nvme import GB, HEADS, Written, assert_restored, joined, lengths, on_disk, recount, started
from tests.equivalence.test_resident import answer
from tests.models import prompt


def test_the_budget_holds_at_every_write(tiny_engine, memory_path, monkeypatch):
    """The files that are there, counted after every entry; and what stays is served."""
    budget = 6 * tiny_engine.layout.section_bytes
    put, sums = Storage.put, []

    def counted(storage, key, arrays, /, **fields):
        entry = put(storage, key, arrays, **fields)
        sums.append(sum(on_disk(memory_path).values()))
        return entry

    with started(tiny_engine, memory_path, disk_gb=budget / GB, **HEADS) as caches:
        monkeypatch.setattr(Storage, "put", counted)
        for seed in range(5):
            answer(tiny_engine, prompt(300, seed=seed))
            recount(caches, memory_path)
        monkeypatch.undo()
        assert budget / 2 < max(sums) <= budget
        assert caches.nvme.stats()["dropped_budget"] > 0
        caches.clear()
        hits = [hit for seed in range(5) if (hit := caches.nvme.find(prompt(300, seed=seed).astype(np.int64), ""))]
        assert hits
    with started(tiny_engine, memory_path, disk_gb=budget / GB, **HEADS):
        seed = next(seed for seed in range(5) if np.array_equal(prompt(300, seed=seed), hits[0].entry[1].keys))
        assert_restored(tiny_engine, prompt(300, seed=seed), "disk", hits[0].start)


@pytest.mark.parametrize(("more", "longest"), [(0, 256), (-1, 192)])
def test_a_head_takes_half_of_the_budget_at_the_most(tiny_engine, memory_path, monkeypatch, more, longest):
    """Of one that is longer nothing is written."""
    layout, written = tiny_engine.layout, Written(monkeypatch)
    budget = 2 * (4 * layout.page_bytes + layout.section_bytes) + more
    with started(tiny_engine, memory_path, disk_gb=budget / GB, **HEADS) as caches:
        answer(tiny_engine, prompt(300))
        assert max(lengths(caches)) == longest
        assert written.of(PAGE) == longest // 64
        caches.clear()
        assert_restored(tiny_engine, prompt(300), "disk", longest)


def test_what_is_being_read_is_not_evicted(tiny_engine, memory_path, monkeypatch):
    """A restore stands between two pages while all is to go but what it needs: that stays, and nothing else. With less room nothing goes."""
    tokens = prompt(440)
    with started(tiny_engine, memory_path, **HEADS) as caches:
        for seed in range(2):
            answer(tiny_engine, prompt(440, seed=seed))
        assert len(lengths(caches)) == 8
        caches.clear()
        filed, files = caches.nvme.find(tokens.astype(np.int64), "").entry[0], on_disk(memory_path)
        needs = sum(files[key] for key in (filed.key, *filed.pages))
        index, read, calls = caches.nvme.index, caches.nvme.reader.page, []

        def evicting(key, number):
            calls.append(key)
            if len(calls) == 2:
                assert not index.evict(DISK, needs - 1)
                assert len(index.anchors) == 8
                assert index.evict(DISK, needs)
            return read(key, number)

        monkeypatch.setattr(caches.nvme.reader, "page", evicting)
        assert_restored(tiny_engine, tokens, "disk", 384)
        assert len(set(calls)) == len(calls) == 6
        assert lengths(caches) == [384]
        assert index.evict(DISK, 0)  # now it goes
        recount(caches, memory_path)


def age(directory, days, but=None):
    """Sets the times of use of all entries but one back."""
    for meta in directory.glob("*/*/meta"):
        if meta.parent.name != but:
            then = meta.stat().st_mtime - days * 86_400
            os.utime(meta, (then, then))


def test_what_was_not_used_for_days_goes_at_the_start(tiny_engine, memory_path):
    with started(tiny_engine, memory_path, **HEADS):
        for seed in range(2):
            answer(tiny_engine, prompt(200, seed=seed))
    with started(tiny_engine, memory_path, **HEADS) as caches:  # the time of use is a restart's too
        assert_restored(tiny_engine, prompt(200), "disk", 192)
        (used,) = (a.key for a in caches.nvme.index.anchors.values() if a.hits)
    age(memory_path, 8, but=used)
    with started(tiny_engine, memory_path, **HEADS) as caches:
        assert set(caches.nvme.index.anchors) == {used}
        assert caches.nvme.stats()["dropped_age"] > 0
        recount(caches, memory_path)
        assert_restored(tiny_engine, prompt(200), "disk", 192)
    age(memory_path, 3)
    for days, found in ((4, [192]), (2, [])):
        with started(tiny_engine, memory_path, disk_days=days, **HEADS) as caches:
            assert lengths(caches) == found


def test_a_smaller_budget_holds_from_the_start(tiny_engine, memory_path):
    with started(tiny_engine, memory_path, **HEADS):
        answer(tiny_engine, prompt(300))
    budget = 3 * tiny_engine.layout.section_bytes
    with started(tiny_engine, memory_path, disk_gb=budget / GB, **HEADS) as caches:
        assert 0 < sum(on_disk(memory_path).values()) <= budget
        recount(caches, memory_path)
    with started(tiny_engine, memory_path, disk_gb=0, **HEADS):
        assert on_disk(memory_path) == {}


def test_a_tier_is_read_only_where_that_costs_less_than_the_prefill(tiny_engine, memory_path):
    """Rates as they were measured; the same prompt is read from NVMe and computed."""
    tokens, layout = prompt(300), tiny_engine.layout
    size = layout.section_bytes + 4 * layout.page_bytes
    with started(tiny_engine, memory_path, **HEADS):
        answer(tiny_engine, tokens)
    for seconds, source in ((0.9, "disk"), (1.1, "cold")):  # to read it, where the prefill of 256 tokens takes one
        with started(tiny_engine, memory_path, **HEADS) as caches:
            caches.nvme.rates.read.add(size, seconds)
            caches.nvme.rates.prefill.add(256, 1.0)
            assert_restored(tiny_engine, tokens, source, 256 if source == "disk" else 0)


def test_what_memory_has_saves_nothing(tiny_engine, memory_path):
    """A head of 128 tokens is in the pool: of the 256 on NVMe the other 128 are read, and they are what that saves."""
    tokens, layout = prompt(300), tiny_engine.layout
    size = layout.section_bytes + 2 * layout.page_bytes
    with started(tiny_engine, memory_path, **HEADS):
        answer(tiny_engine, tokens)
    for seconds, expected in ((0.4, ("disk", 256)), (0.6, ("resident", 128))):
        with started(tiny_engine, memory_path, disk_min_tokens=4096, **HEADS) as caches:
            caches.nvme.find = lambda keys, tenant: None
            answer(tiny_engine, joined(tokens[:128], prompt(10, seed=8)))
            del caches.nvme.find
            caches.nvme.rates.read.add(size, seconds)
            caches.nvme.rates.prefill.add(256, 1.0)
            assert_restored(tiny_engine, tokens, *expected)


def test_the_rates_are_those_of_what_was_done(tiny_engine, memory_path):
    """Of prefills that ended, without their lookup; a cancelled one took no time, and would have made every read look slow."""
    tokens = prompt(300)
    with started(tiny_engine, memory_path, rates=True, **HEADS) as caches:
        generation = tiny_engine.generate(tokens, cancel=lambda: True)
        list(generation)
        tiny_engine.release(generation.sequence)
        assert caches.nvme.stats()["prefill_tokens_per_s"] is None
        record, *_ = answer(tiny_engine, tokens)
        rate = caches.nvme.stats()["prefill_tokens_per_s"]
        assert rate == pytest.approx(300 / (record.prefill_seconds - record.lookup_seconds))
        caches.nvme.drain()
        caches.clear()
        assert_restored(tiny_engine, tokens, "disk", 256)
        assert caches.nvme.stats()["read_bytes_per_s"] > 0
        assert caches.nvme.stats()["prefill_tokens_per_s"] == rate  # 44 tokens say little


def test_what_was_not_used_for_days_goes_while_the_engine_runs(tiny_engine, memory_path, monkeypatch):
    """A server that is not started again for weeks looks every hour."""
    with started(tiny_engine, memory_path, disk_days=1, **HEADS) as caches:
        answer(tiny_engine, prompt(300))
        caches.nvme.drain()
        old = set(caches.nvme.index.anchors)
        assert old
        caches.clear()
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 2 * 86_400)
        answer(tiny_engine, prompt(300, seed=5))
        caches.nvme.drain()
        assert old.isdisjoint(caches.nvme.index.anchors)
        assert caches.nvme.index.anchors
