"""Many slots and held sequences over few pages, used at random: at all times each has the bits of a cold run."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest

from qjax.pages import PoolFull
from tests.bits import assert_bits_equal
from tests.models import prompt
from tests.runs import cold, kept, new_pool, new_slot


class Users:
    """Slots and held sequences on a small pool, used at random; `seen` counts what came up."""

    texts = tuple(prompt(512, seed=s) for s in range(3))
    cold: ClassVar[dict] = {}  # tokens -> what a cold run keeps; shared, since it depends on nothing else

    def __init__(self, engine, seed, pages=7):
        self.engine, self.pool, self.rng = engine, new_pool(engine), np.random.default_rng(seed)
        self.spare = [self.pool.take() for _ in range(self.pool.pages - pages)]  # somebody else's, so that the pool is full now and then
        self.slots, self.held, self.seen = [], [], Counter()

    def act(self):
        name = self.rng.choice(["go_on", "prefill", "verify", "keep", "let_go", "close"], p=[0.2, 0.15, 0.35, 0.15, 0.08, 0.07])
        if name == "go_on" and len(self.slots) < 5:
            self.slots.append(new_slot(self.engine, self.pool, self.one_of(self.held) if self.held and self.rng.random() < 0.8 else None))
        elif name == "let_go" and self.held:
            self.pool.release(self.held.pop(self.rng.integers(len(self.held))).pages)
        elif name in ("prefill", "verify", "keep", "close") and self.slots:
            getattr(self, name)(self.one_of(self.slots))

    def one_of(self, some):
        return some[self.rng.integers(len(some))]

    def next_tokens(self, slot, most):
        """The next of one of three texts, so that continuations agree for a while and then part; none past the longest sequence."""
        n = min(self.rng.integers(1, most + 1), self.engine.limit - slot.length)
        return self.one_of(self.texts)[slot.length : slot.length + n]

    def prefill(self, slot):
        tokens = self.next_tokens(slot, slot.room())
        if tokens.size:
            self.unless_full(slot, lambda: slot.prefill(tokens, 64))

    def verify(self, slot):
        tokens = self.next_tokens(slot, slot.verify_room())
        if tokens.size and self.unless_full(slot, lambda: slot.step(tokens)):
            other = self.one_of(self.slots)
            if other is not slot and self.rng.random() < 0.5:  # somebody else writes before the drafts are judged
                self.prefill(other)
                self.seen["between"] += 1
            taken = self.rng.integers(tokens.size + 1)
            slot.accept(tokens[:taken])
            self.seen["rejected"] += taken < tokens.size

    def keep(self, slot):
        sequence = slot.freeze()
        if len(self.held) < 6:
            self.pool.hold(sequence.pages)
            self.held.append(sequence)

    def close(self, slot):
        self.slots.remove(slot)
        slot.close()

    def unless_full(self, slot, forward) -> bool:
        before, inside = slot.pages[-1:], slot.length % 64 > 0
        beside = inside and self.pool.holders[before[0]] > 1
        try:
            forward()
        except PoolFull:
            assert self.pool.free == 0
            self.seen["full"] += 1
            return False
        copied = inside and slot.pages[-1:] != before
        self.seen["copied"] += int(copied)
        self.seen["in place beside another holder"] += int(beside and not copied)
        self.seen["in place as the only holder"] += int(inside and not beside)
        return True

    def check(self):
        """The counts are those of who holds what; what is held has the bits of a cold run."""
        count = Counter(int(p) for holder in (*self.slots, *self.held) for p in holder.pages)
        assert {p: n for p, n in enumerate(self.pool.holders) if n} == dict(count) | dict.fromkeys(self.spare, 1)
        assert self.pool.free == self.pool.pages - len(self.spare) - len(count)
        for value in (*self.held, *(slot.freeze() for slot in self.slots)):
            key = value.tokens.tobytes()
            if key not in self.cold:
                self.cold[key] = cold(self.engine, value.tokens)
            assert_bits_equal(kept(self.pool, value), self.cold[key])
            self.seen["compared"] += 1


@pytest.mark.parametrize("seed", range(4))
def test_random_use_equals_cold_runs(tiny_engine, seed):
    """A20: many slots and held sequences over few pages; after every act each of them is compared whole."""
    users = Users(tiny_engine, seed)
    for _ in range(400):
        users.act()
        users.check()
    wanted = ("full", "between", "rejected", "copied", "in place beside another holder", "in place as the only holder")
    assert all(users.seen[what] for what in wanted), users.seen
    for slot in users.slots:
        slot.close()
    for sequence in users.held:
        users.pool.release(sequence.pages)
    assert users.pool.free == users.pool.pages - len(users.spare)
