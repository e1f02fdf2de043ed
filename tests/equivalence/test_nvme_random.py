"""Random requests, restarts and evictions over the tier on NVMe against a reference that keeps nothing; then all that is counted is counted anew."""

import shutil
from collections import Counter
from pathlib import Path
from typing import ClassVar

import hypothesis.stateful as stateful
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from qjax.caches.keys import common
from qjax.caches.nvme.filed import DISK, SPILL
from qjax.config import GRID, TOKEN
from qjax.pages import PagePool
from tests.bits import assert_bits_equal
from tests.equivalence.counting import ANSWER, Reference
from tests.equivalence.counting import recount as recount_memory
from tests.equivalence.nvme import GB, recount, same_state, spoil, started
from tests.models import prompt
from tests.runs import kept

HEADS = (40, 64, 65, 128, 150, 200, 256, 300)
TAILS = (1, 2, 60, 64, 90)
LONGEST = 400
"""Of a prompt: the engine's limit is 448."""
ROOM = (0, 12, 30, 1000, 1000, 1000)
"""Pages that a budget holds, an anchor at a line being 2: none, short heads, which take half of it at the most, a conversation, all."""


class Machine(stateful.RuleBasedStateMachine):
    """Requests of two tenants, restarts between them. `served`: each tenant's rows that were ever computed."""

    engine = reference = root = None
    seen: ClassVar[Counter] = Counter()
    number = 0

    @stateful.initialize(
        disk=st.sampled_from(ROOM),
        spill=st.sampled_from(ROOM),
        staging=st.sampled_from((0, 4, 1000)),
        after=st.integers(1, 2),
        spills=st.sampled_from((True, True, False)),
    )
    def begin(self, disk, spill, staging, after, spills):
        Machine.number += 1
        self.directory = Path(self.root) / str(Machine.number)
        page = self.engine.layout.page_bytes / GB
        self.config = {"disk_gb": disk * page, "spill_gb": spill * page, "staging_gb": staging * page, "admit_after": after, "session_spill": spills}
        self.served: dict[str, list[np.ndarray]] = {"a": [], "b": []}
        self.past: list[tuple[str, np.ndarray, list[int]]] = []
        self.start = None
        self.restart()

    def teardown(self):
        if self.start is not None:
            self.start.__exit__(None, None, None)
            self.start = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def ask(self, tenant, tokens, most=ANSWER, cancel_after=None, **marks):
        tokens, asked = np.asarray(tokens, np.int32)[:LONGEST], iter(range(10_000))
        cancel = None if cancel_after is None else lambda: next(asked) >= cancel_after
        generation = self.engine.generate(tokens, max_tokens=most, tenant=tenant, cancel=cancel, **marks)
        list(generation)
        try:
            self.judge(generation, tenant, tokens, most)
        finally:
            self.engine.release(generation.sequence)
        self.check()

    def judge(self, generation, tenant, tokens, most):
        record, sequence = self.caches.ledger.records[-1], generation.sequence
        known = max((common(tokens, rows) for rows in self.served[tenant]), default=0)
        assert record.start <= known
        assert (record.source == "cold") == (record.start == 0)
        assert all("given up meanwhile" in reason for reason in record.failed), record.failed
        assert self.caches.nvme.counts["damaged"] == 0
        expected = self.reference.answer(tokens)
        whole = np.array([*tokens, *expected], np.int32)[: sequence.tokens.size]
        state = kept(self.engine.pool, sequence)
        self.seen["wrong"] += not same_state(state, self.reference.state(whole))
        assert_bits_equal(state, self.reference.state(whole))
        assert generation.tokens == expected[: len(generation.tokens) if generation.finish == "cancelled" else most]
        self.served[tenant].append(sequence.tokens)
        self.past.append((tenant, tokens, generation.tokens))
        self.seen[record.source] += 1
        self.seen[generation.finish] += 1

    def check(self):
        """Between requests sessions hold pages, and what waits to be staged; and what is staged has room, or is one entry."""
        nvme = self.caches.nvme
        recount_memory(self.caches, nvme._backlog.sequences)
        with nvme._writer._changed:
            sizes = [nbytes for _, _, nbytes, _ in nvme._writer._pending.values() if nbytes]
        assert sum(sizes) <= nvme._writer.limit or len(sizes) == 1
        self.seen["waiting"] += len(nvme._backlog)

    tenants, heads, tails = st.sampled_from(("a", "a", "a", "b")), st.sampled_from(HEADS), st.sampled_from(TAILS)
    seeds, many = st.integers(1, 2), st.integers(0, 1000)

    def one(self, which):
        tenant, tokens, answer = self.past[-1 - which % min(len(self.past), 4)]
        return tenant, tokens, np.array(answer[:-1], np.int32)

    @stateful.rule(tenant=tenants, head=heads, tail=tails, seed=seeds, user=st.booleans())
    def new(self, tenant, head, tail, seed, user):
        self.ask(tenant, np.concatenate([prompt(head), prompt(tail, seed=seed)]), **({"user": head} if user else {}))

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many, tail=tails, seed=seeds)
    def next_turn(self, which, tail, seed):
        tenant, tokens, answer = self.one(which)
        self.ask(tenant, np.concatenate([tokens, answer, prompt(tail, seed=seed + 10)]))

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many, at=many, tail=tails, seed=seeds)
    def edit(self, which, at, tail, seed):
        tenant, tokens, answer = self.one(which)
        rows = np.concatenate([tokens, answer])
        self.ask(tenant, np.concatenate([rows[: at % rows.size], prompt(tail, seed=seed + 20)]))

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many)
    def repeat(self, which):
        tenant, tokens, _ = self.one(which)
        self.ask(tenant, tokens)

    @stateful.rule(tenant=tenants, head=heads, tail=tails, seed=seeds, after=st.integers(0, 6))
    def cancelled(self, tenant, head, tail, seed, after):
        self.ask(tenant, np.concatenate([prompt(head), prompt(tail, seed=seed + 30)]), cancel_after=after)

    @stateful.rule(pages=st.integers(4, 16))
    def evicted(self, pages):
        self.caches.make_room(lambda: self.engine.pool.free >= pages)
        self.check()

    @stateful.rule(files=st.sampled_from((False, False, False, True)))
    def clear(self, files):
        self.caches.clear(files=files)
        assert self.caches.resident.sessions == []
        if files:
            self.settle()
            assert not self.caches.nvme.index.anchors
            self.served = {"a": [], "b": []}
        self.check()

    @stateful.rule()
    def settle(self):
        """What was handed over is written: index and files agree."""
        recount(self.caches, self.directory)
        assert not self.caches.nvme._backlog
        self.check()

    @stateful.rule(tenant=tenants, head=heads, tail=tails, seed=seeds)
    def conversation(self, tenant, head, tail, seed):
        """A planned stop between two turns."""
        self.ask(tenant, np.concatenate([prompt(head), prompt(tail, seed=seed + 40)]))
        self.restart()
        self.next_turn(0, tail, seed)

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many, head=heads, tail=tails, seed=seeds)
    def another_session(self, which, head, tail, seed):
        """A stop at which no session is written, and a prompt that begins like an earlier one."""
        self.caches.resident.clear()
        self.restart()
        tenant, tokens, _ = self.one(which)
        self.ask(tenant, np.concatenate([tokens[:head], prompt(tail, seed=seed + 50)]))

    def restart(self):
        """A planned stop and a new start."""
        if self.start is not None:
            self.start.__exit__(None, None, None)
        self.start = started(self.engine, self.directory, caches={"cache_budget_gb": 0}, **self.config)
        self.caches = self.start.__enter__()
        self.settle()


def run(engine, root, examples, steps):
    """Always the same examples. A failure is not made smaller: that takes minutes, and the steps that led there are printed."""
    Machine.engine, Machine.reference, Machine.root, Machine.seen = engine, Reference(engine), root, Counter()
    more = {"suppress_health_check": list(HealthCheck), "phases": [Phase.generate], "database": None}
    try:
        stateful.run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=steps, derandomize=True, **more))
    finally:
        engine.caches, engine.pool = None, PagePool(engine.layout, engine.pool.pages)
    return Machine.seen


@pytest.mark.parametrize("level", [TOKEN, GRID])
def test_random_requests_and_restarts_equal_cold_runs(tiny_engine, memory_path, monkeypatch, level):
    """H1, A20: and hits of both uses came up, ends of all kinds, and something that waited."""
    monkeypatch.setattr(tiny_engine, "level", level)
    seen = run(tiny_engine, memory_path, examples=16, steps=14)
    assert min(seen[what] for what in (DISK, SPILL, "cold", "cancelled", "waiting")) > 2, seen


@pytest.mark.parametrize("part", ["gdn.S", "V"])
def test_control_a_wrong_part_is_found(tiny_engine, memory_path, monkeypatch, part):
    """Hypothesis runs what failed once more, and says so where the writer's threads were faster or slower then."""
    spoil(monkeypatch, tiny_engine, part)
    with pytest.raises((AssertionError, HypothesisException)):
        run(tiny_engine, memory_path, examples=6, steps=14)
    assert Machine.seen["wrong"]
