"""What the model-based test compares with: answers of a run that keeps nothing, and every count made anew."""

from collections import Counter

import jax
import numpy as np

from qjax.caches.anchors import NEWEST, Anchor, live_bytes
from qjax.caches.lookup import Caches
from tests.runs import cold, new_pool, new_slot, prefill

ANSWER = 6
"""Tokens of the longest answer."""


class Reference:
    """Cold runs, each made once. Nothing here reads a cache."""

    def __init__(self, engine):
        self.engine, self._states, self._answers = engine, {}, {}

    def state(self, tokens) -> dict:
        """All that a sequence of these tokens keeps."""
        tokens = np.asarray(tokens, np.int32)
        key = tokens.tobytes()
        if key not in self._states:
            self._states[key] = cold(self.engine, tokens)
        return self._states[key]

    def answer(self, tokens) -> list[int]:
        """The first ANSWER tokens, fewer where a stop token comes."""
        key = tokens.tobytes()
        if key not in self._answers:
            tokenizer, answer = self.engine.model.tokenizer, []
            slot = new_slot(self.engine, new_pool(self.engine))
            logits = prefill(slot, tokens)
            while len(answer) < ANSWER and (token := int(logits[: tokenizer.size].argmax())) not in tokenizer.stop_ids:
                answer.append(token)
                logits = slot.step([token])[0]
                slot.accept([token])
            self._answers[key] = answer
        return self._answers[key]


def digest(anchor: Anchor) -> list[bytes]:
    """Everything of an anchor but its rows."""
    sequence = anchor.sequence
    arrays = [sequence.tokens, sequence.length, *jax.tree.leaves((sequence.sections, sequence.open)), anchor.logits]
    return [np.asarray(a).tobytes() for a in arrays if a is not None]


def recount(caches: Caches, held_by_others) -> dict[int, Anchor]:
    """Holders, free pages, lengths, pages, roles and bytes, from the sessions and others' sequences alone. Anchors by their state."""
    sessions, layout = caches.resident.sessions, caches.pool.layout
    held = Counter(int(p) for holder in (*sessions, *held_by_others) for p in holder.pages)
    assert {p: n for p, n in enumerate(caches.pool.holders.tolist()) if n} == held
    assert caches.pool.free == caches.pool.pages - len(held)
    assert [s.role for s in sessions].count("resident") <= 1
    for session in sessions:
        lengths = [a.length for a in session.anchors]
        assert lengths == sorted(set(lengths))
        assert len(session.pages) == len(set(session.pages)) == -(-session.keys.size // layout.grid)
        for anchor in session.anchors:
            sequence = anchor.sequence
            assert anchor.length == int(sequence.length) == sequence.tokens.size <= session.keys.size
            assert np.array_equal(sequence.tokens, session.keys[: anchor.length])
            assert sequence.pages.tolist() == session.pages[: -(-anchor.length // layout.grid)]
    anchors = {id(a.sequence.sections): a for s in sessions for a in s.anchors}
    arrays = {id(x): x for a in anchors.values() for x in a.arrays()}
    stats = caches.stats()["resident"]
    assert stats["anchors"] == len(anchors)
    assert stats["page_bytes"] == len({p for s in sessions for p in s.pages}) * layout.page_bytes
    assert stats["anchor_bytes"] == sum(x.nbytes for x in arrays.values())
    assert sum(stats[f"{role}_sessions"] for role in ("resident", "guest", "parked", "pinned")) == len(sessions)
    check_budgets(caches)
    return anchors


def check_budgets(caches: Caches) -> None:
    """What a role keeps beyond the resident session, added up here."""
    resident, config = caches.resident, caches.config
    now = next((s for s in resident.sessions if s.role == "resident"), None)
    if now is not None:
        assert live_bytes(now.anchors) <= config.bytes("resident_gb") or len(now.anchors) <= NEWEST
    for role, budget in (("guest", "stash"), ("parked", "park"), ("pinned", "pin")):
        some = [s for s in resident.sessions if s.role == role]
        theirs = {id(a.sequence.sections) for a in now.anchors} if now else set()
        anchors = [a for s in some for a in s.anchors if id(a.sequence.sections) not in theirs]
        assert live_bytes(anchors) <= config.bytes(f"resident_{budget}_gb"), role
