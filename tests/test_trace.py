"""Traces: the two formats, what is wrong with a line, and the generated agent traffic."""

import json
from itertools import combinations

import numpy as np
import pytest

from qjax.bench.trace import BAILIAN_TOKENS, BLOCK_TOKENS, read, write
from qjax.bench.traffic import AGENTS, ANSWER, CONTEXT, MOST_SESSIONS, PROJECT, SHARED, agent_trace, named
from qjax.caches.keys import common

LINE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 9, 2]}


@pytest.fixture
def trace(tmp_path):
    """Writes lines, texts or objects, and reads them as a trace."""

    def of(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return read(path)

    return of


def test_equal_ids_are_equal_keys_and_no_others(trace):
    first, second, third = trace(LINE, LINE | {"input_length": 1100, "hash_ids": [4, 9, 3]}, LINE | {"input_length": 512, "hash_ids": [9]})
    assert [call.prompt for call in (first, second, third)] == [1030, 1100, 512] == [call.keys().size for call in (first, second, third)]
    assert all(np.unique(call.keys()).size == call.prompt for call in (first, second, third))
    assert common(first.keys(), second.keys()) == 1024
    assert np.array_equal(first.keys()[512:1024], third.keys())
    assert first.keys().dtype == np.int64
    assert (first.keys() >= 0).all()


def test_what_the_trace_can_tell_is_full_blocks(trace):
    call, short = trace(LINE, LINE | {"input_length": 300, "hash_ids": [1]})
    assert (call.at, call.answer, call.known, call.history, call.user) == (1.5, 7, 1024, 1024, None)
    assert (short.known, short.history) == (0, None)


def test_answers_are_nobody_elses(trace):
    calls = trace(LINE, LINE | {"output_length": 0}, LINE | {"output_length": 5})
    assert [call.answer_keys().size for call in calls] == [7, 0, 5]
    every = np.concatenate([call.answer_keys() for call in calls])
    assert np.unique(every).size == every.size
    assert (every < 0).all()
    assert calls[0].spans()[-1] == (int(calls[0].answer_keys()[0]), 7)


def test_requests_come_by_time(trace):
    assert [call.at for call in trace(LINE, LINE | {"timestamp": 3.5}, "", LINE | {"timestamp": 700})] == [0.0035, 0.7, 1.5]


def test_a_chat_id_tells_the_other_format(trace):
    line = {"chat_id": 3, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 2, "type": "text", "turn": 1}
    first, full, other = trace(line | {"hash_ids": [5, 6, 7]}, line | {"hash_ids": [5, 6]}, line | {"hash_ids": [5, 6]})
    assert (first.at, first.prompt, first.known) == (61.114, 40, 2 * BAILIAN_TOKENS)
    # ids of full blocks only: what follows them is each prompt's own
    assert full.prompt == 40
    assert [common(a.keys(), b.keys()) for a, b in ((first, full), (first, other), (full, other))] == [32] * 3


WRONG = [
    ("no json", "expected a JSON object, found no json"),
    ("[1]", "expected a JSON object, found [1]"),
    *(({k: v for k, v in LINE.items() if k != name}, f"{name}: expected ") for name in LINE),
    (LINE | {"timestamp": -1}, "timestamp: expected a number, 0 or more, found -1"),
    (LINE | {"timestamp": float("nan")}, "timestamp: expected a number, 0 or more, found NaN"),
    (LINE | {"timestamp": True}, "timestamp: expected a number, 0 or more, found true"),
    (LINE | {"input_length": 0}, "input_length: expected a whole number, 1 to 16,777,216, found 0"),
    (LINE | {"input_length": 10.0}, "input_length: expected a whole number, 1 to 16,777,216, found 10.0"),
    (LINE | {"output_length": "7"}, 'output_length: expected a whole number, 0 to 16,777,216, found "7"'),
    (LINE | {"hash_ids": 4}, "hash_ids: expected a list of whole numbers, found 4"),
    (LINE | {"hash_ids": [4, 9, "2"]}, "hash_ids: expected a list of whole numbers, found "),
    (LINE | {"hash_ids": [4]}, "hash_ids: expected 3 for input_length 1,030, one for each 512 tokens, found 1"),
    (LINE | {"hash_ids": [4, 9, 2, 1]}, "hash_ids: expected 3 for input_length 1,030, one for each 512 tokens, found 4"),
    (LINE | {"chat_id": 1}, "hash_ids: expected 65 for input_length 1,030, one for each 16 tokens, found 3"),
]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_a_wrong_line_is_named(trace, tmp_path, line, says):
    with pytest.raises(ValueError, match="line 3: ") as error:
        trace(LINE, "", line)
    assert str(error.value).startswith(f"{tmp_path / 'trace.jsonl'}, line 3: {says}")


def test_an_empty_file_is_no_trace(trace):
    with pytest.raises(ValueError, match="expected a request a line, found none"):
        trace("")


def test_written_traces_agree_as_far_as_blocks_tell(tmp_path):
    calls = agent_trace(6, seed=3)
    write(calls, tmp_path / "agent.jsonl")
    again = read(tmp_path / "agent.jsonl")
    assert [(c.prompt, c.answer) for c in again] == [(c.prompt, c.answer) for c in calls]
    assert max(abs(a.at - b.at) for a, b in zip(calls, again, strict=True)) <= 0.0005
    lengths = set()
    for i, j in combinations(range(0, len(calls), 3), 2):
        exact, blocks = (common(of[i].keys(), of[j].keys()) for of in (calls, again))
        assert blocks == (exact if exact == calls[i].prompt == calls[j].prompt else exact // BLOCK_TOKENS * BLOCK_TOKENS)
        lengths.add(exact)
    assert len(lengths) > 3


def test_agents_go_on_from_their_answers():
    calls = agent_trace(12, seed=1)
    assert [call.at for call in calls] == sorted(call.at for call in calls)
    going_on, first = 0, 0
    for i, call in enumerate(calls):
        keys = call.keys()
        before = [c for c in calls[:i] if common(np.concatenate([c.keys(), c.answer_keys()]), keys) == c.prompt + c.answer == call.user]
        assert len(before) <= 1
        going_on += len(before)
        first += call.user == SHARED + PROJECT
        assert np.array_equal(keys[:SHARED], calls[0].keys()[:SHARED])
        assert call.prompt < CONTEXT
        assert call.known == call.prompt + call.answer
    assert first == 12
    assert going_on == len(calls) - 12 > 12
    shared = {common(calls[0].keys(), call.keys()) for call in calls}
    assert SHARED in shared  # another project's
    running = [calls[:n] for n in range(1, len(calls))]
    assert max(len({call.bases[2] for call in some[-AGENTS:]}) for some in running) == AGENTS


def test_the_seed_decides():
    one, same, other = agent_trace(5, 7), agent_trace(5, 7), agent_trace(5, 8)
    assert [(c.at, c.spans()) for c in one] == [(c.at, c.spans()) for c in same]
    assert [(c.at, c.spans()) for c in one] != [(c.at, c.spans()) for c in other]


def test_answers_have_the_published_median_close_to():
    answers = sorted(call.answer for call in agent_trace(200))
    assert answers[len(answers) // 2] == pytest.approx(ANSWER[1], rel=0.05)
    assert answers[-1] <= ANSWER[2]


def test_names_of_generated_traces():
    assert [(c.at, c.spans()) for c in named("agent:5:7")] == [(c.at, c.spans()) for c in agent_trace(5, 7)]
    assert len(named("agent:2")) == len(agent_trace(2))
    assert named("trace.jsonl") is None


@pytest.mark.parametrize("name", ["agent:", "agent:0", "agent:x", "agent:1:2:3", "agent:-1", f"agent:{MOST_SESSIONS + 1}", "agent:1.5"])
def test_wrong_names_are_told(name):
    with pytest.raises(ValueError, match=r"expected agent\[:SESSIONS\[:SEED\]\] with 1 to 100,000 sessions, found "):
        named(name)
