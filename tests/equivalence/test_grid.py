"""Level grid on an engine whose steps are impure: what is called exact has a cold run's bits, and the rest is held to the greedy gate."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from qjax.bits import differing_bits
from qjax.caches.resident import ResidentPrefix
from qjax.commands.ledger import row
from qjax.config import GRID, TOKEN
from qjax.gate import greedy_gate
from qjax.probe import probe
from qjax.warmth import certify_tiers
from tests.equivalence.test_resident import answer, cached, cold, followed
from tests.impure import impure_steps
from tests.models import prompt


@pytest.fixture
def impure(tiny_engine):
    """Pages of 64 tokens."""
    with impure_steps(tiny_engine, GRID) as engine:
        yield engine


def prompt_state(engine, tokens, **more):
    """(record, what the sequence keeps at the prompt's end, before a step): an answer of one token forwards nothing."""
    record, _, state = answer(engine, tokens, max_tokens=1, **more)
    return record, state


def cold_state(engine, tokens):
    return cold(engine, tokens, max_tokens=1)[1]


def bits(a: dict, b: dict) -> int:
    return sum(differing_bits(x[name], y[name]) for x, y in ((a[kind], b[kind]) for kind in ("sections", "open", "rows")) for name in x)


def conversation(engine):
    """Three turns with answers, two edits and another session: every request that says it is exact, and the first that is not.

    Returns (record, differing bits) of each.
    """
    head = prompt(130)
    tokens, found = head, []
    for turn in range(3):
        record, state = prompt_state(engine, tokens)
        found.append((record, bits(state, cold_state(engine, tokens))))
        _, generated, _ = answer(engine, tokens, max_tokens=40)
        tokens = followed(tokens, generated, prompt(70, seed=turn + 1))
    for at in (330, 260, 150, 129, 100):  # inside the last turn, an earlier answer, the first prompt
        edited = np.concatenate([tokens[:at], prompt(80, seed=at)])
        record, state = prompt_state(engine, edited)
        found.append((record, bits(state, cold_state(engine, edited))))
    return found


def test_the_probe_finds_the_level(tiny_engine):
    assert probe(tiny_engine.forward, tiny_engine.pool).level == tiny_engine.level == TOKEN
    with impure_steps(tiny_engine, GRID) as engine:
        free = engine.pool.free
        assert probe(engine.forward, engine.pool).level == GRID
        assert engine.pool.free == free


def test_exact_means_bits_and_a_session_resume_says_so(impure):
    """The taint rules: with steps that differ, no request that is called exact differs from a cold run, and some that are not do."""
    with cached(impure):
        found = conversation(impure)
        exact = [(r.source, r.start, n) for r, n in found if r.exact and r.start]
        gated = [(r.source, r.start, n) for r, n in found if not r.exact]
        assert all(n == 0 for r, n in found if r.exact), found
        assert len(exact) >= 2, found
        assert len(gated) >= 3, found
        assert all(n > 0 for *_, n in gated), gated
        assert {s for s, *_ in gated} >= {"end", "resident"}, gated


def test_control_without_the_taint_rules_something_called_exact_differs(impure, monkeypatch):
    """Every hit is taken for exact, as if nothing were tainted."""
    find = ResidentPrefix.find

    def untainted(self, keys, tenant):
        hit = find(self, keys, tenant)
        return hit and replace(hit, exact=True)

    monkeypatch.setattr(ResidentPrefix, "find", untainted)
    with cached(impure):
        assert any(n for r, n in conversation(impure) if r.exact)


def test_control_at_level_token_the_same_engine_is_wrong(tiny_engine):
    """What the probe is there for: the rules of level token on steps that differ."""
    with impure_steps(tiny_engine, TOKEN) as engine, cached(engine):
        found = conversation(engine)
        assert all(r.exact for r, _ in found)
        assert any(n for _, n in found)


def test_without_end_anchors_everything_is_exact(impure):
    """--no-end-anchor: each turn reads the last answer again, and no state of a step is ever gone on with."""
    with cached(impure, end_anchor=False):
        found = conversation(impure)
        assert all(r.exact and n == 0 for r, n in found), found
        assert sum(r.start > 0 for r, _ in found) >= 5


def test_the_store_keeps_the_taint(impure):
    """A session that goes to the store and comes back: its end as a session resume, its head exact."""
    with cached(impure, resident_park_gb=0, resident_pin_gb=0) as caches:
        tokens = prompt(200)
        _, generated, _ = answer(impure, tokens, max_tokens=30)
        answer(impure, prompt(300, seed=5))
        assert caches.store.stats()["entries"] == 2
        following = followed(tokens, generated, prompt(20, seed=9))
        record, state = prompt_state(impure, following)
        assert (record.source, record.start, record.exact) == ("store", 229, False)
        assert bits(state, cold_state(impure, following)) > 0
        caches.resident.clear()
        other = np.concatenate([tokens, prompt(20, seed=8)])
        record, state = prompt_state(impure, other)
        assert (record.source, record.start, record.exact) == ("store", 192, True)
        assert bits(state, cold_state(impure, other)) == 0


def test_the_head_that_the_store_keeps_is_exact(impure):
    """A session went on at an answer's end, past two more lines: of its lines the last one before that serves others."""
    with cached(impure, resident_park_gb=0, resident_pin_gb=0) as caches:
        tokens = prompt(200)
        _, generated, _ = answer(impure, tokens, max_tokens=10)
        record, *_ = answer(impure, followed(tokens, generated, prompt(130, seed=3)))
        assert (record.start, record.exact) == (209, False)
        answer(impure, prompt(300, seed=5))
        caches.resident.clear()
        other = np.concatenate([tokens, prompt(20, seed=8)])
        record, state = prompt_state(impure, other)
        assert (record.source, record.start, record.exact) == ("store", 192, True)
        assert bits(state, cold_state(impure, other)) == 0


def test_an_equal_offer_with_a_taint_does_not_change_what_the_store_keeps(impure):
    """The same tokens twice, once as a prompt and once as a prompt and its answer: two states."""
    with cached(impure, resident_park_gb=0, resident_pin_gb=0) as caches:
        tokens = prompt(184)
        _, generated, _ = answer(impure, tokens, max_tokens=9)  # ends at 192, a grid line
        answer(impure, prompt(300, seed=5))
        whole = np.concatenate([tokens, np.array(generated[:-1], np.int32)])
        caches.resident.clear()
        assert whole.size == 192
        found = {hit.exact for hit in caches.find(np.append(whole, 7).astype(np.int64), "")}
        assert found == {False}
        kept = caches.store.stats()["entries"]
        caches.resident.clear()
        impure.caches, before = None, impure.caches
        done = impure.run_prompt(whole)
        impure.caches = before
        caches.store.offer(whole.astype(np.int64), "", done.slot.freeze(), done.logits)
        done.slot.close()
        assert caches.store.stats()["entries"] == kept + 1
        record, state = prompt_state(impure, whole)
        assert (record.source, record.start, record.exact) == ("store", 192, True)
        assert bits(state, cold_state(impure, whole)) == 0


def test_the_ledger_and_the_gate_in_words(impure):
    with cached(impure) as caches:
        tokens = prompt(130)
        _, generated, _ = answer(impure, tokens, max_tokens=10)
        record, *_ = answer(impure, followed(tokens, generated, prompt(5, seed=3)))
        assert (record.exact, row(record)["source"]) == (False, "end (gate)")
        assert caches.ledger.records[0].exact


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_holds_the_promise(impure, seed):
    """New prompts, next turns, edits and repeats, in a pool that is too small for them all."""
    random, sources = np.random.default_rng(seed), set()
    with cached(impure, cache_budget_gb=1e-3 if seed else 0):
        past = [prompt(100, seed=9)]
        for turn in range(30):
            base = past[-1 - random.integers(min(4, len(past)))]
            new = prompt(int(random.choice([1, 20, 64, 100])), seed=100 * seed + turn)
            what = random.choice(["new", "next", "next", "edit", "edit", "repeat"])
            at = {"new": 0, "next": base.size, "edit": int(random.integers(base.size)), "repeat": base.size}[what]
            tokens = np.concatenate([base[:at], new[: 0 if what == "repeat" else None]])[:380]
            record, state = prompt_state(impure, tokens)
            differing = bits(state, cold_state(impure, tokens))
            assert not (record.exact and differing), (turn, record, differing)
            sources.add((record.source, record.exact))
            _, generated, _ = answer(impure, tokens, max_tokens=int(random.choice([2, 30, 64])))
            past.append(followed(tokens, generated, tokens[:0]))
    assert {exact for source, exact in sources if source != "cold"} == {True, False}, sources


def greedy(engine, tokens, most):
    """A cold run's greedy answer, and the logits that it was drawn from: float32 [tokens, V]."""
    caches, engine.caches = engine.caches, None
    done = engine.run_prompt(tokens)
    engine.caches = caches
    slot, logits, tokens, rows = done.slot, done.logits, [], []
    try:
        while len(tokens) < most and (token := int(logits[: engine.model.tokenizer.size].argmax())) not in engine.model.tokenizer.stop_ids:
            tokens.append(token)
            rows.append(logits)
            logits = slot.step([token])[0]
            slot.accept([token])
        return tokens, np.array(rows)
    finally:
        slot.close()


def talk(engine, spoil=lambda: None):
    """A conversation of eight turns on the embedded model, each a session resume: the gates of all."""
    tokenizer, gates = engine.model.tokenizer, []
    text = "<|im_start|>user\nMy room is 2354. My deploy code is tiger.<|im_end|>\n<|im_start|>assistant\n<think>\n</think>\n\n"
    tokens = np.array(tokenizer.encode(text), np.int32)
    for turn in range(8):
        cold_tokens, logits = greedy(engine, tokens, 20)
        record, warm, _ = answer(engine, tokens, max_tokens=20)
        if turn:
            assert (record.source, record.exact) == ("end", False)
            gates.append(greedy_gate(cold_tokens, logits, warm))
        asks = ["What is my room?", "What is my deploy code?", f"My badge is {1000 + turn}.", "What is my badge?"]
        more = f"<|im_end|>\n<|im_start|>user\n{asks[turn % 4]}<|im_end|>\n<|im_start|>assistant\n<think>\n</think>\n\n"
        tokens = np.concatenate([tokens, np.array(warm + tokenizer.encode(more), np.int32)])
        spoil()
    return gates


def test_a_session_resume_holds_the_greedy_gate(embedded_engine):
    """The trained model's answers, whose logits are not all near ties: the same tokens as a cold run's on steps that differ."""
    with impure_steps(embedded_engine, GRID) as engine, cached(engine):
        gates = talk(engine)
    assert all(gate.failed is None for gate in gates), gates
    assert sum(gate.tokens for gate in gates) > 20


def test_control_the_gate_sees_a_damaged_state(embedded_engine):
    with impure_steps(embedded_engine, GRID) as engine, cached(engine) as caches:

        def spoil():
            session = caches.resident.resident
            for i, anchor in enumerate(session.anchors):
                zeroed = {name: jax.numpy.zeros_like(a) for name, a in anchor.sequence.sections.items()}
                session.anchors[i] = replace(anchor, sequence=anchor.sequence.replace(sections=zeroed))

        gates = talk(engine, spoil)
    assert any(gate.failed is not None for gate in gates), gates


def test_the_certificate_of_the_tiers_at_both_levels(embedded_engine):
    """At level grid all rows hold on steps that differ, session resumes by the gate; the rules of level token do not hold there."""
    with impure_steps(embedded_engine, GRID) as engine:
        checks, controls = certify_tiers(engine)
    assert all(c.differing_bits == 0 and c.hit for c in checks), checks
    gated = {c.name.split()[2].rstrip(",") for c in checks if c.near_ties is not None}
    assert gated == {"end", "guest", "parked", "store"}
    assert all(controls.values()), controls
    with impure_steps(embedded_engine, TOKEN) as engine:
        checks, _ = certify_tiers(engine)
    assert any(c.differing_bits for c in checks)
