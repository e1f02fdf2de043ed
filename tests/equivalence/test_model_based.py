"""Random requests over the caches against a reference that keeps nothing; after every one all that is counted is counted anew."""

from collections import Counter
from typing import ClassVar

import hypothesis.stateful as stateful
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from qjax.caches.anchors import Anchor
from qjax.caches.keys import common
from qjax.caches.lookup import Caches
from qjax.caches.resident import ResidentPrefix
from qjax.config import GRID, TOKEN, CacheConfig
from qjax.pages import PagePool, PoolFull
from tests.bits import assert_bits_equal
from tests.equivalence.counting import ANSWER, Reference, digest, recount
from tests.models import prompt
from tests.runs import kept

HEADS = (1, 40, 63, 64, 65, 100, 128, 150, 200, 256, 300)
"""Lengths at which prompts of one text part: on and beside block and grid lines, and inside a block."""
TAILS = (1, 2, 17, 60, 64, 130)
LONGEST = 420
"""Of a prompt: the engine's limit is 448."""
BUDGETS = (0, 3, 12, 1000, 1000, 1000)
"""In pages: nothing, less than one session, a few, everything. On the smallest grid an anchor off a line takes 6.4 pages, one at a line 2.2."""


class Machine(stateful.RuleBasedStateMachine):
    """Requests of two tenants. `served`: each tenant's rows that were computed since the last clear. `past`: (tenant, prompt, answer)."""

    engine = reference = None
    seen: ClassVar[Counter] = Counter()

    @stateful.initialize(
        park=st.sampled_from(BUDGETS),
        pin=st.sampled_from(BUDGETS),
        stash=st.sampled_from(BUDGETS),
        resident=st.sampled_from(BUDGETS),
        store=st.sampled_from((0, 20, 1000)),
        guest=st.sampled_from((0, 50, 8192)),
    )
    def begin(self, park, pin, stash, resident, store, guest):
        self.engine.pool = self.pool = PagePool(self.engine.layout, self.engine.pool.pages)
        page = self.pool.layout.page_bytes / 2**30
        gb = {"park": park * page, "pin": pin * page, "stash": stash * page}
        self.config = CacheConfig(
            resident_guest_max=guest,
            resident_gb=resident * page,
            cache_budget_gb=store * page,
            **{f"resident_{role}_gb": budget for role, budget in gb.items()},
        )
        self.engine.caches = self.caches = Caches(self.pool, self.config, self.engine.level, self.engine.model.tokenizer.decode)
        self.resident = self.caches.resident
        self.served: dict[str, list[np.ndarray]] = {"a": [], "b": []}
        self.begun: dict[str, list[np.ndarray]] = {"a": [], "b": []}  # prompts, for what was found while they ran
        self.past: list[tuple[str, np.ndarray, list[int]]] = []
        self.running = []
        self.held = []  # the sequence that a caller keeps
        self.digests: dict[int, tuple[Anchor, list[bytes]]] = {}

    def teardown(self):
        if self.engine.caches is None:
            return
        for loop, generation in self.running:  # a failure left them
            loop.close()
            if generation.sequence is not None:
                self.engine.release(generation.sequence)
        for session in self.resident.sessions:
            for anchor in session.anchors:
                assert_bits_equal(kept(self.pool, anchor.sequence), self.reference.state(anchor.sequence.tokens))
        self.let_go()
        self.caches.clear()
        self.engine.caches = None
        assert self.pool.free == self.pool.pages

    def ask(self, tenant, tokens, most=ANSWER, **how):
        """One request from beginning to end, or as far as `how` lets it come."""
        finish = self.start(tenant, tokens, most, **how)
        finish()
        self.check()

    def start(self, tenant, tokens, most=ANSWER, leave=None, cancel_after=None, **marks):
        """Begins a request; what it returns runs it to its end and judges it. leave: tokens until the loop is left.

        cancel_after: questions whether it is cancelled that are answered with no.
        """
        tokens = np.asarray(tokens, np.int32)[:LONGEST]
        asked = iter(range(10_000))
        cancel = None if cancel_after is None else lambda: next(asked) >= cancel_after
        generation = self.engine.generate(tokens, max_tokens=most, tenant=tenant, cancel=cancel, **marks)
        self.begun[tenant].append(tokens)
        loop = iter(generation)
        self.running.append((loop, generation))
        done = [next(loop, None)]

        def finish():
            while done[-1] is not None and len(done) != leave:
                done.append(next(loop, None))
            loop.close()
            self.judge(generation, tenant, tokens, most)
            self.running.remove((loop, generation))

        return finish

    def judge(self, generation, tenant, tokens, most):
        record, sequence = self.caches.ledger.records[-1], generation.sequence
        served = self.served[tenant] + (self.begun[tenant] if record.source == "running" else [])
        known = max((common(tokens, rows) for rows in served), default=0)
        assert (record.tenant, record.prompt_tokens, record.start) == (tenant, tokens.size, generation.start)
        assert 0 <= record.start <= (known if record.source == "store" else record.agrees) <= known
        assert record.read_again == max(0, record.agrees - record.start)
        assert (record.finish, record.generated) == (generation.finish, len(generation.tokens))
        assert (record.source == "cold") == (record.start == 0)
        assert record.failed == []
        expected = self.reference.answer(tokens)
        whole = [*tokens, *generation.tokens]
        assert generation.tokens == expected[: len(generation.tokens)]
        assert sequence.tokens.tolist() == whole[: sequence.tokens.size]
        if generation.finish not in ("cancelled", "failed"):
            assert generation.tokens == expected[:most]
            assert sequence.tokens.size == len(whole) - (generation.finish == "length")
        assert_bits_equal(kept(self.pool, sequence), self.reference.state(sequence.tokens))
        if sequence.tokens.size <= 128:  # the pool has room for one such and two of the longest
            self.let_go()
            self.held = [sequence]
        else:
            self.engine.release(sequence)
        self.served[tenant].append(sequence.tokens)
        self.past.append((tenant, tokens, generation.tokens))
        self.seen[record.source] += 1
        self.seen[generation.finish] += 1
        self.seen["resumed inside a block"] += record.start % 64 > 0

    def let_go(self):
        """What a caller kept is as it was, whoever wrote on in its last page meanwhile."""
        for sequence in self.held:
            assert_bits_equal(kept(self.pool, sequence), self.reference.state(sequence.tokens))
            self.engine.release(sequence)

    def check(self):
        """Every count anew: between requests nobody but the sessions and the caller holds a page. And no anchor has changed."""
        anchors = recount(self.caches, self.held)
        for one, (anchor, bytes_) in self.digests.items():  # A14: also those that were dropped meanwhile stay as they were
            assert digest(anchor) == bytes_, f"the {anchor.kind} anchor at {anchor.length} was written to"
            self.seen["anchors compared again"] += one in anchors
        self.digests = {one: self.digests.get(one) or (a, digest(a)) for one, a in anchors.items()}

    tenants, heads, tails = st.sampled_from(("a", "a", "a", "b")), st.sampled_from(HEADS), st.sampled_from(TAILS)
    seeds, many = st.integers(1, 3), st.integers(0, 1000)

    def one(self, which):
        """A past request, mostly a late one: (tenant, prompt, answer as far as rows of it exist)."""
        tenant, tokens, answer = self.past[-1 - which % min(len(self.past), 4)]
        return tenant, tokens, np.array(answer[:-1], np.int32)

    @stateful.rule(tenant=tenants, head=heads, tail=tails, seed=seeds, most=st.integers(1, ANSWER), marks=st.sampled_from(("history", "user", "")))
    def new(self, tenant, head, tail, seed, most, marks):
        tokens = np.concatenate([prompt(head), prompt(tail, seed=seed)])
        self.ask(tenant, tokens, most, **({marks: head} if marks else {}))

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many, drop=st.sampled_from((0, 0, 0, 1, 3)), tail=tails, seed=seeds)
    def next_turn(self, which, drop, tail, seed):
        """The answer kept, or its last tokens dropped."""
        tenant, tokens, answer = self.one(which)
        self.ask(tenant, np.concatenate([tokens, answer[: max(0, answer.size - drop)], prompt(tail, seed=seed + 10)]))

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many, at=many, tail=tails, seed=seeds)
    def edit(self, which, at, tail, seed):
        """Anywhere in a past prompt or its answer."""
        tenant, tokens, answer = self.one(which)
        rows = np.concatenate([tokens, answer])
        self.ask(tenant, np.concatenate([rows[: at % rows.size], prompt(tail, seed=seed + 20)]))

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many, at=st.one_of(many, st.just(0)))
    def repeat(self, which, at):
        """A past prompt, or the first rows of one and its answer."""
        tenant, tokens, answer = self.one(which)
        rows = np.concatenate([tokens, answer])
        self.ask(tenant, rows[: 1 + at % rows.size] if at else tokens)

    @stateful.rule(tenant=tenants, length=st.sampled_from((1, 5, 64, 70)), seed=seeds)
    def guest(self, tenant, length, seed):
        self.ask(tenant, prompt(length, seed=seed + 30), 2)

    @stateful.rule(tenant=tenants, head=heads, tail=tails, seed=seeds, after=st.integers(0, 9), again=st.booleans())
    def cancelled(self, tenant, head, tail, seed, after, again):
        """A4: in the prefill or in the answer; then the same once more."""
        tokens = np.concatenate([prompt(head), prompt(tail, seed=seed + 40)])
        self.ask(tenant, tokens, cancel_after=after)
        if again:
            self.ask(tenant, tokens)

    @stateful.rule(tenant=tenants, head=heads, tail=tails, seed=seeds, leave=st.integers(1, ANSWER))
    def left_early(self, tenant, head, tail, seed, leave):
        self.ask(tenant, np.concatenate([prompt(head), prompt(tail, seed=seed + 50)]), leave=leave)

    @stateful.precondition(lambda self: self.past)
    @stateful.rule(which=many, cut=many, tail=tails, seed=seeds, first=st.booleans())
    def two_at_once(self, which, cut, tail, seed, first):
        """Both begin before either ends: they share a partly filled page, or are of different tenants."""
        tenant, tokens, answer = self.one(which)
        rows = np.concatenate([tokens, answer])
        ends = [
            self.start(tenant, np.concatenate([rows, prompt(tail, seed=seed + 60)])),
            self.start(tenant, np.concatenate([rows[: rows.size - cut % 20], prompt(tail, seed=seed + 70)])),
        ]
        for end in ends if first else ends[::-1]:
            end()
        self.check()

    @stateful.rule(tenant=tenants, length=st.sampled_from((100, 126, 250, 300)), seed=seeds, left=st.integers(0, 5), emptied=st.booleans())
    def pool_full(self, tenant, length, seed, left, emptied):
        """Somebody else holds all but a few pages and what is kept: PoolFull where that is not enough, and nothing stays held."""
        if emptied:
            self.caches.clear()
        spare = [self.pool.take() for _ in range(max(0, self.pool.free - left))]
        tokens = np.concatenate([prompt(64), prompt(length - 64, seed=seed + 80)])
        generation = self.engine.generate(tokens, tenant=tenant, max_tokens=ANSWER)
        try:
            list(generation)
        except PoolFull:
            self.seen["pool full"] += 1
            assert generation.finish == "failed"
        if generation.sequence is not None:  # the prompt was read: what was computed stays
            self.judge(generation, tenant, tokens, ANSWER)
        self.pool.release(spare)
        self.check()

    @stateful.rule(tenant=tenants, head=heads, tail=tails, seed=seeds, at=st.integers(0, 4))
    def progress_raises(self, tenant, head, tail, seed, at):
        calls = iter(range(100))

        def progress(_):
            if next(calls) == at:
                raise ZeroDivisionError

        generation = self.engine.generate(
            np.concatenate([prompt(head), prompt(tail, seed=seed + 90)]), tenant=tenant, max_tokens=1, progress=progress
        )
        try:
            list(generation)
            self.judge(generation, tenant, generation._prompt, 1)
        except ZeroDivisionError:
            assert generation.sequence is None
            self.seen["raised"] += 1
        self.check()

    @stateful.rule(really=st.sampled_from((False, False, True)))
    def clear(self, really):
        if really:
            self.caches.clear()
            assert self.resident.sessions == []
            self.served = {"a": [], "b": []}
            self.check()


def run(engine, examples, steps):
    """Always the same examples. A failure is not made smaller: that takes minutes, and the steps that led there are printed."""
    Machine.engine, Machine.reference, Machine.seen = engine, Reference(engine), Counter()
    more = {"suppress_health_check": list(HealthCheck), "phases": [Phase.generate], "database": None}
    config = settings(max_examples=examples, stateful_step_count=steps, derandomize=True, **more)
    try:
        stateful.run_state_machine_as_test(Machine, settings=config)
    finally:
        engine.caches, engine.pool = None, PagePool(engine.layout, engine.pool.pages)
    return Machine.seen


@pytest.mark.parametrize("level", [TOKEN, GRID])
@pytest.mark.parametrize("name", ["tiny_engine", "engine_256"])
def test_random_requests_equal_cold_runs(request, monkeypatch, name, level):
    """A20, A10, A14, A15: and most kinds of hits and of ends came up. A page is one block, then four."""
    engine = request.getfixturevalue(name)
    monkeypatch.setattr(engine, "level", level)
    seen = run(engine, examples=14, steps=20)
    assert len(seen.keys() & {"end", "prompt", "resident", "parked", "pinned", "guest", "store"}) >= 4, seen
    assert min(seen[what] for what in ("cold", "length", "cancelled", "raised")) > 0, seen
    assert seen["resumed inside a block"] > 20
    assert seen["anchors compared again"] > 100


def test_control_a_wrong_section_is_found(tiny_engine, monkeypatch):
    """A tier that hands out zeros for one section: the machine above finds it."""
    take = ResidentPrefix.take

    def broken(self, hit):
        restored = take(self, hit)
        sections = restored.sequence.sections
        wrong = {"gdn.S": jax.numpy.zeros_like(sections["gdn.S"])}
        object.__setattr__(restored, "sequence", restored.sequence.replace(sections=sections | wrong))
        return restored

    monkeypatch.setattr(ResidentPrefix, "take", broken)
    with pytest.raises(AssertionError, match="differ"):
        run(tiny_engine, examples=3, steps=10)
