"""The session spill at level grid on steps that are impure: what was read back is a session resume, and is held to the greedy gate."""

import numpy as np
import pytest

from qjax.config import GRID
from qjax.gate import greedy_gate
from tests.equivalence.nvme import joined, started
from tests.equivalence.test_grid import bits, cold_state, greedy, prompt_state
from tests.equivalence.test_resident import answer, followed
from tests.impure import impure_steps
from tests.models import prompt


def test_at_level_grid_a_session_resume_says_that_it_is_one(tiny_engine, tmp_path):
    """Impure steps: what was read back is gone on with, is not called exact and is not; below the answer it is exact, and has a cold run's bits."""
    with impure_steps(tiny_engine, GRID) as engine:
        tokens = prompt(200)
        with started(engine, tmp_path):
            _, generated, _ = answer(engine, tokens, max_tokens=30)
        with started(engine, tmp_path) as caches:
            assert [a.tainted for a in caches.resident.resident.anchors] == [False] * 3 + [True]
            following = followed(tokens, generated, prompt(20, seed=9))
            record, state = prompt_state(engine, following)
            assert (record.source, record.start, record.exact) == ("spill", 229, False)
            assert bits(state, cold_state(engine, following)) > 0
            edited = joined(tokens[:195], prompt(70, seed=4))
            record, state = prompt_state(engine, edited)
            assert (record.start, record.exact) == (192, True)
            assert bits(state, cold_state(engine, edited)) == 0


def talk(engine, directory, spoiled=lambda: None):
    """A conversation of five turns on the embedded model, with a restart before each: the gates of all but the first."""
    tokenizer, gates = engine.model.tokenizer, []
    text = "<|im_start|>user\nMy room is 2354. My deploy code is tiger. " + "Please remember both of them. " * 12
    text += "<|im_end|>\n<|im_start|>assistant\n<think>\n</think>\n\n"
    tokens = np.array(tokenizer.encode(text), np.int32)
    assert tokens.size >= 128
    for turn in range(5):
        with started(engine, directory):
            spoiled()
            cold_tokens, logits = greedy(engine, tokens, 20)
            record, warm, _ = answer(engine, tokens, max_tokens=20)
            if turn:
                assert (record.source, record.exact) == ("spill", False), record
                gates.append(greedy_gate(cold_tokens, logits, warm))
        asks = ["What is my room?", "What is my deploy code?", f"My badge is {1000 + turn}.", "What is my badge?"]
        more = f"<|im_end|>\n<|im_start|>user\n{asks[turn % 4]}<|im_end|>\n<|im_start|>assistant\n<think>\n</think>\n\n"
        tokens = joined(tokens, np.array(warm + tokenizer.encode(more), np.int32))
    return gates


@pytest.mark.parametrize("damaged", [False, True])
def test_a_restored_session_holds_the_greedy_gate(embedded_engine, tmp_path, damaged):
    """The trained model's answers on steps that differ; control: the states that were read back are zeros."""
    with impure_steps(embedded_engine, GRID) as engine:

        def spoiled():
            session = engine.caches.resident.resident
            for anchor in session.anchors if damaged and session else ():
                for name, a in anchor.sequence.sections.items():
                    anchor.sequence.sections[name] = a * 0

        gates = talk(engine, tmp_path, spoiled)
    assert any(gate.failed is not None for gate in gates) == damaged, gates
    assert sum(gate.tokens for gate in gates) > 10
