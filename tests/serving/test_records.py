"""The store of answers: found by what stands before them, bounded, shared out, and forgotten leaf by leaf."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from qjax.serving.records import EACH, LOOKED, Chain, canonical
from tests.serving.talk import Server, rows, spell

USER = {"role": "user", "content": "Go on."}
TOKENS = spell("A thought.\n</think>\n\nDone.")


def talk(server: Server, turns: int, *, tenant: str = "", first: str = "Go on.", tokens=TOKENS) -> list:
    """The records of a conversation."""
    messages, records = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": first if not turn else "And?"})
        record, message = server.answer(server.align(messages, tenant=tenant), tokens)
        records.append(record)
        messages.append({**message, "reasoning_content": ""})
    return records


def known(server: Server, record) -> bool:
    """Whether a record is found."""
    return record in server.records.after(record.after)


def test_a_record_counts_for_what_its_base_has_not():
    server = Server()
    records = talk(server, 4)
    assert [record.base for record in records] == [None, *records[:-1]]
    for record, base in zip(records[1:], records, strict=False):
        assert rows(record)[: len(rows(base))] == rows(base)
    last = records[-1]
    assert server.records.tokens == last.prompt.size + last.tokens.size + len(records) * EACH
    assert len(server.records) == 4


def test_over_the_limit_the_least_recently_used_goes_and_the_end_of_a_conversation_first():
    full = Server()
    talk(full, 3, first="One."), talk(full, 3, first="Two.")
    server = Server(limit=full.records.tokens)
    one, two = talk(server, 3, first="One."), talk(server, 3, first="Two.")
    talk(server, 1, first="One.")  # generated again: used
    assert all(known(server, record) for record in [*one, *two])
    talk(server, 1, first="Three.")  # as much as the last two of the six
    assert [known(server, record) for record in one] == [True, False, False]
    assert [known(server, record) for record in two] == [True, True, True]
    for first in ("Four.", "Five.", "Six."):
        talk(server, 1, first=first)
        kept = [known(server, record) for record in one], [known(server, record) for record in two]
        assert all(sorted(found, reverse=True) == found for found in kept)  # none without its base
        assert known(server, one[0]) or not known(server, two[0])
    assert not known(server, two[2])
    assert server.records.tokens <= server.records.limit


def test_the_tenant_that_has_most_makes_room():
    probe = Server()
    talk(probe, 4)
    server = Server(limit=3 * probe.records.tokens)
    few = talk(server, 4, tenant="few")
    for number in range(40):
        talk(server, 2, tenant="many", first=f"{number}.")
    assert all(known(server, record) for record in few)
    assert server.records.tokens <= server.records.limit
    for number in range(40):
        talk(server, 1, tenant=f"salt {number}", first="One.")
    assert server.records.tokens <= server.records.limit


def test_an_answer_that_was_generated_before_is_one_record():
    server = Server()
    assert talk(server, 2) == talk(server, 2)
    assert len(server.records) == 2
    other = talk(server, 1, tokens=spell("A thought.\n</think>\n\nDone.", (1,)))  # the same text in other tokens
    assert known(server, other[0])
    assert len(server.records) == 3


def test_only_the_newest_of_a_key_are_looked_at():
    server = Server()
    records = [talk(server, 1, tokens=spell(f"{n}.\n</think>\n\nDone."))[0] for n in range(LOOKED + 3)]
    assert server.records.after(records[0].after) == server.records.before(records[0].before) == records[: -LOOKED - 1 : -1]


def test_a_base_that_went_while_its_answer_was_generated_comes_back_with_it():
    server = Server()
    first, second = talk(server, 2)
    message = {"role": "assistant", "content": "Done."}
    messages = [USER, message, {"role": "user", "content": "And?"}, message, USER]
    prompt = server.align(messages)
    assert prompt.base is second
    server.records.clear()
    assert (len(server.records), server.records.tokens) == (0, 0)
    assert not known(server, first)
    third, _ = server.answer(prompt, TOKENS)
    assert all(known(server, record) for record in (first, second, third))
    assert server.records.tokens == third.prompt.size + third.tokens.size + 3 * EACH


def test_threads():
    server = Server(limit=3000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: talk(server, 3, tenant=str(n % 3), first=f"{n % 7}."), range(60)))
    assert server.records.tokens <= 3000
    server.records.clear()
    talk(server, 1)
    assert len(server.records) == 1


@pytest.mark.parametrize(
    ("a", "b"), [({"b": 1.0, "a": [2.0, "x"]}, {"a": [2, "x"], "b": 1}), (-0.0, 0), (1e3, 1000), ({"a": {"c": 1, "b": 2}}, {"a": {"b": 2, "c": 1}})]
)
def test_values_that_are_the_same(a, b):
    assert canonical(a) == canonical(b)


@pytest.mark.parametrize(
    ("a", "b"), [(1, True), (1, "1"), (0, None), ([1, 2], [2, 1]), (2**53, 2**53 + 1), ({"a": 1}, {"a": 1, "b": None}), ("a", "a "), (1.5, 1)]
)
def test_values_that_are_not(a, b):
    assert canonical(a) != canonical(b)


def test_keys_tell_all_that_a_template_could_write():
    loose, exact = Chain(True), Chain(False)
    start = loose.start("", None, {})
    assert start == loose.start("", [], {}) != loose.start("a", None, {})
    call = {"id": "1", "function": {"name": "f", "arguments": '{"k": 1}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "assistant", "content": "a", "tool_calls": [call, call]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "g", "arguments": {"k": 1}}}]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "fg", "arguments": {"k": 1}}}]},
        {"role": "assistant", "content": "af", "tool_calls": [{"function": {"name": "g", "arguments": {"k": 1}}}]},
    ]
    for chain in (loose, exact):
        assert len({chain.extend(start, message) for message in messages}) == len(messages)
        twice = chain.keys(start, [messages[0], messages[2]])
        assert twice != chain.keys(start, [messages[2], messages[0]])
    edges = {"role": "user", "content": " a\n"}
    assert loose.extend(start, edges) == loose.extend(start, messages[0])
    assert exact.extend(start, edges) != exact.extend(start, messages[0])
    renamed = {**messages[5], "tool_calls": [{**call, "id": "2"}]}
    assert loose.extend(start, renamed) == loose.extend(start, messages[5])
    assert exact.extend(start, renamed) != exact.extend(start, messages[5])
