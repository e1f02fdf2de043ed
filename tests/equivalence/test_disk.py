"""Warm against cold over the disk tier: heads that are read from files, mostly by a new start of the program, have a cold run's bits."""

import numpy as np
import pytest

from qjax.caches.nvme.filed import PAGE
from qjax.parallel import Parallel
from tests.bits import assert_bits_equal
from tests.equivalence.nvme import HEADS, assert_restored, joined, on_disk, recount, same_state, spoil, started
from tests.equivalence.test_resident import answer, cold, followed
from tests.models import prompt
from tests.runs import kept

pytestmark = pytest.mark.usefixtures("level")


@pytest.mark.parametrize("past", [0, 1, 2, 63, 64, 65, 255])
def test_a_restart_resumes_at_the_last_line(engine_256, tmp_path, past):
    """A12's lengths: on a line, beside it, beside a block line and before the next one. On the line the prompt's own anchor has its logits."""
    tokens = prompt(512 + past)
    with started(engine_256, tmp_path, **HEADS) as caches:
        record, _ = assert_restored(engine_256, tokens, "cold", 0)
        recount(caches, tmp_path)
    with started(engine_256, tmp_path, **HEADS) as caches:
        assert caches.resident.sessions == []
        record, _ = assert_restored(engine_256, tokens, "disk", 512)
        assert (record.exact, record.why, record.read_again) == (True, "none", 0)
        recount(caches, tmp_path)


@pytest.mark.parametrize("past", [0, 1, 2, 63])
def test_a_longer_prompts_head_serves_shorter_ones(tiny_engine, tmp_path, past):
    """On the line itself the anchor has no logits: the prompt's last token must be forwarded, from the line below."""
    with started(tiny_engine, tmp_path, **HEADS):
        answer(tiny_engine, prompt(440))
    with started(tiny_engine, tmp_path, **HEADS):
        assert_restored(tiny_engine, prompt(320 + past), "disk", 320 if past else 256)


def test_the_same_prompt_on_a_line_needs_no_forward(tiny_engine, tmp_path, monkeypatch):
    """D2: the right first token out of the anchor's logits, read from the file."""
    tokens = prompt(256)
    with started(tiny_engine, tmp_path, **HEADS):
        answer(tiny_engine, tokens)
    with started(tiny_engine, tmp_path, **HEADS):
        monkeypatch.setattr(tiny_engine.forward, "chunk", None)
        monkeypatch.setattr(tiny_engine.forward, "step", None)
        record, *warm = answer(tiny_engine, tokens, max_tokens=1)
        monkeypatch.undo()
        assert (record.source, record.start) == ("disk", 256)
        expected = cold(tiny_engine, tokens, max_tokens=1)
        assert warm[0] == expected[0]
        assert_bits_equal(warm[1], expected[1])


def test_b9_b8_every_tier_writes_and_serves(tiny_engine, tmp_path):
    """B9: with everything on, each tier shows a write and a hit. B8: what the pool gave up is found on NVMe, and both counters move."""
    with started(tiny_engine, tmp_path, caches={"cache_budget_gb": 0, "resident_pin_gb": 0}) as caches:
        tokens = prompt(300)
        _, generated, _ = answer(tiny_engine, tokens)
        assert_restored(tiny_engine, tokens, "prompt", 300)
        for seed in range(1, 5):
            answer(tiny_engine, prompt(300, seed=seed))
        assert caches.resident.dropped["pool"] > 0
        assert_restored(tiny_engine, followed(tokens, generated, prompt(20, seed=9)), "spill", 304)
        caches.nvme.drain()
        caches.clear()
        assert_restored(tiny_engine, joined(tokens[:150], prompt(20, seed=9)), "disk", 128)
        stats = caches.nvme.stats()
        assert min(stats[name] for name in ("written", "disk_hits", "spill_hits", "spilled", "read_tokens")) > 0
        assert (stats["damaged"], stats["failed"], stats["skipped"]) == (0, 0, 0)


def test_a1_read_twice_both_answers_are_cold_ones(tiny_engine, tmp_path):
    """A1: given up from memory, read, gone on with, given up and read once more."""
    tokens = prompt(300)
    with started(tiny_engine, tmp_path, **HEADS) as caches:
        answer(tiny_engine, tokens)
        caches.nvme.drain()
        for _ in range(2):
            caches.clear()
            assert tiny_engine.pool.free == tiny_engine.pool.pages
            _, generated = assert_restored(tiny_engine, tokens, "disk", 256, most=8)
            assert_restored(tiny_engine, followed(tokens, generated, prompt(70, seed=3)), "end", 307)
        assert caches.nvme.stats()["disk_hits"] == 2


def test_side_slots_read_it_too(tiny_engine, tmp_path):
    """Two prompts of different heads at once: the second, which runs beside the first, is restored into pages of its own."""
    heads = [prompt(200), prompt(200, seed=1)]
    with started(tiny_engine, tmp_path, **HEADS):
        for head in heads:
            answer(tiny_engine, head)
    with started(tiny_engine, tmp_path, **HEADS) as caches:
        runs = Parallel(tiny_engine, 2)
        prompts = [joined(head, prompt(40, seed=7)) for head in heads]
        generations = [runs.submit(tokens, max_tokens=5) for tokens in prompts]
        order = [generations.index(generation) for generation, token in runs if token]
        assert order.index(1) < len(order) - 1 - order[::-1].index(0)  # side by side
        assert [(r.source, r.start) for r in caches.ledger.records] == [("disk", 192)] * 2
        for generation, tokens in zip(generations, prompts, strict=True):
            expected = cold(tiny_engine, tokens)
            assert generation.tokens == expected[0]
            assert_bits_equal(kept(tiny_engine.pool, generation.sequence), expected[1])
            tiny_engine.release(generation.sequence)


def test_f4_another_tenant_does_not_find_it(tiny_engine, tmp_path):
    """F4: equal tokens of another tenant are read cold, at once and after a restart; the same tenant's are found."""
    tokens = prompt(300)
    with started(tiny_engine, tmp_path, **HEADS) as caches:
        answer(tiny_engine, tokens, tenant="a")
        caches.nvme.drain()
        caches.clear()
        assert_restored(tiny_engine, tokens, "cold", 0, tenant="b")
    with started(tiny_engine, tmp_path, **HEADS) as caches:
        keys = [key for key in on_disk(tmp_path) if key.startswith(PAGE)]
        assert len(keys) == 8  # not one page in common
        for tenant, source in (("c", "cold"), ("", "cold"), ("a", "disk")):
            assert_restored(tiny_engine, tokens, source, 256 if source == "disk" else 0, tenant=tenant)


def ask(engine, tokens, keys):
    """(record, logits, state) of a prompt whose key ids are not its tokens."""
    request = engine.caches.begin(tokens, keys=keys)
    done = engine.run_prompt(tokens, request=request)
    sequence = engine.hold(done.slot.freeze())
    done.slot.close()
    request.finish(sequence, done.logits)
    state = kept(engine.pool, sequence)
    engine.release(sequence)
    return request.record, done.logits, state


def test_key_ids_are_compared_and_not_tokens(tiny_engine, tmp_path):
    """An image's rows have one token and ids of their own: the same pixels are found, with their tokens; others part where they begin, at 70."""
    tokens = prompt(300)
    tokens[70:130] = 7
    keys = {name: tokens.astype(np.int64) for name in ("cat", "dog")}
    keys["cat"][70:130] = 2**40 + np.arange(60)
    keys["dog"][70:130] = 2**41 + np.arange(60)
    with started(tiny_engine, tmp_path, **HEADS):
        expected = ask(tiny_engine, tokens, keys["cat"])[1:]
    for name, start in (("cat", 256), ("dog", 64), ("cat", 256)):
        with started(tiny_engine, tmp_path, disk_min_tokens=4096, **HEADS):
            record, logits, state = ask(tiny_engine, tokens, keys[name])
            assert (record.source, record.start) == ("disk", start)
            assert_bits_equal((logits, state), expected)
    with started(tiny_engine, tmp_path, **HEADS):
        assert ask(tiny_engine, tokens, tokens.astype(np.int64))[0].start == 64


@pytest.mark.parametrize("part", ["gdn.S", "gdn.conv", "K", "V"])
def test_control_a_part_that_comes_back_wrong_changes_the_state(tiny_engine, tmp_path, monkeypatch, part):
    """One section, or one view's rows, zeroed while they are restored: the comparisons of this file would have seen it."""
    tokens = prompt(300)
    assert {part} <= {s.name for s in (*tiny_engine.layout.sections, *tiny_engine.layout.views)}
    with started(tiny_engine, tmp_path, **HEADS):
        answer(tiny_engine, tokens)
    with started(tiny_engine, tmp_path, **HEADS):
        expected = cold(tiny_engine, tokens)[1]
        spoil(monkeypatch, tiny_engine, part)
        record, _, state = answer(tiny_engine, tokens)
        assert (record.source, record.start) == ("disk", 256)
        new = [{view: rows[:, :, 256:] for view, rows in one["rows"].items()} for one in (state, expected)]
        assert not same_state(*new)
