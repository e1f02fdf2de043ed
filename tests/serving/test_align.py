"""The rows' own tokens are served where a client's copy says what they say, and nowhere else."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.serving.talk import PHRASE, SPECIAL, TOKENIZER, Server, call, rows, says, spell, thoughts

OFF = {"enable_thinking": False}
USER = {"role": "user", "content": "Go on."}

edge = st.sampled_from(["", " ", "\n", "\n\n", " \n\t", "\u2003"])
word = st.text('abé e\u0301ñ漢🙂 \n<>{}".,:1', max_size=12)
value = word | st.integers(-9, 99) | st.floats(-9, 9) | st.booleans() | st.none() | st.lists(st.integers(0, 9), max_size=2)
calls = st.lists(st.tuples(st.sampled_from(["look", "run"]), st.dictionaries(st.sampled_from("sno"), value, max_size=3)), max_size=2)
chops = st.lists(st.integers(1, 9), min_size=1, max_size=5)
# what a model writes: reasoning, hidden phrase, content, calls, and how it cuts them into tokens
answer = st.fixed_dictionaries(
    {"reasoning": word, "hidden": st.booleans(), "content": word, "calls": calls, "edges": st.lists(edge, min_size=3, max_size=3), "chops": chops}
)
# what a client makes of it
copied = st.fixed_dictionaries(
    {
        "reasoning": st.sampled_from(["kept", "dropped", "empty", "trimmed", "padded", "other name"]),
        "content": st.sampled_from(["kept", "trimmed", "padded", "parts"]),
        "arguments": st.sampled_from(["kept", "sorted", "spaced", "object"]),
        "ids": st.booleans(),
    }
)
turn = st.tuples(word, answer, copied)


def write(
    thinks: bool, reasoning="", hidden=False, content="", calls=(), edges=("", "\n", ""), chops=(1000,)
) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of an answer, and the hidden spans in them."""
    before, between, after = edges
    body = "".join([content, after if not calls else "", *("\n\n"[not content and not i :] + call(*c) for i, c in enumerate(calls))])
    if not thinks:
        return spell(before + body, chops), []
    thought = spell(before + reasoning + between, chops)
    phrase = spell(PHRASE + "\n</think>\n\n", chops) if hidden else []
    end = [] if hidden else spell("</think>\n\n", chops)
    return [*thought, *phrase, *end, *spell(body, chops)], [(len(thought), len(thought) + len(phrase))] if hidden else []


def copy(message: dict, reasoning="kept", content="kept", arguments="kept", ids=True) -> dict:
    """A client's copy of an answer, which says the same."""
    message = json.loads(json.dumps(message))
    thought, text = message.pop("reasoning_content"), message["content"]
    shown = {"kept": thought, "empty": "", "trimmed": thought.strip(), "padded": f" {thought}\n", "other name": thought}
    if reasoning != "dropped":
        message["reasoning" if reasoning == "other name" else "reasoning_content"] = shown[reasoning]
    half = len(text) // 2
    parts = [{"type": "text", "text": part} for part in (text[:half], text[half:])]
    message["content"] = {"kept": text or None, "trimmed": text.strip(), "padded": f"\n{text} ", "parts": parts}[content]
    for i, entry in enumerate(message.get("tool_calls", [])):
        values = json.loads(entry["function"]["arguments"])
        whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in values.items()}
        forms = {"sorted": json.dumps(whole, sort_keys=True, separators=(",", ":")), "spaced": json.dumps(values, indent=2), "object": values}
        entry["function"]["arguments"] = forms.get(arguments, entry["function"]["arguments"])
        entry["id"] = entry["id"] if ids else f"theirs_{i}"
    return message


def results(message: dict) -> list[dict]:
    """What a client sends after an answer."""
    return [{"role": "tool", "tool_call_id": c["id"], "content": f" ran {c['function']['name']}"} for c in message.get("tool_calls", [])]


def converse(server: Server, turns, kwargs: dict, asked=None) -> tuple[list[dict], list, list[int]]:
    """A conversation of copies: its messages, the record of each answer and where they stand. asked(prompt, messages, record) sees each prompt."""
    messages, records, places = [{"role": "system", "content": "Be brief."}], [], []
    for text, written, form in turns:
        messages.append({"role": "user", "content": text})
        prompt = server.align(messages, kwargs)
        if asked:
            asked(prompt, messages, records[-1] if records else None)
        tokens, hidden = write(not kwargs, **written)
        record, message = server.answer(prompt, tokens, hidden)
        if record is None:  # nothing was written
            messages.pop()
            continue
        records.append(record)
        places.append(len(messages))
        messages += [copy(message, **form), *results(message)]
    return messages, records, places


def check(server: Server, prompt, messages: list[dict], kwargs: dict | None = None) -> None:
    """What is served says what the client sent; its reasoning is the client's wherever that sent any."""
    sent = server.sent(messages, kwargs)
    assert says(prompt.tokens) == says(sent)
    mine, theirs = thoughts(prompt.tokens), thoughts(sent)
    assert len(mine) == len(theirs)
    assert all(a == b for a, b in zip(mine, theirs, strict=True) if b)


@given(st.lists(turn, min_size=1, max_size=3), st.sampled_from([{}, OFF, {"reasoning_effort": "low"}]))
def test_a_copy_that_says_the_same_is_served_with_the_rows_own_tokens(turns, kwargs):
    server = Server()

    def asked(prompt, messages, record):
        check(server, prompt, messages, kwargs)
        if record:
            assert prompt.tokens[: len(rows(record))].tolist() == rows(record)
            assert prompt.base is record
            assert prompt.parted is None
        else:
            assert prompt.tokens.tolist() == server.sent(messages, kwargs)

    messages, records, _ = converse(server, turns, kwargs, asked)
    prompt = server.align([*messages, USER], kwargs)
    asked(prompt, [*messages, USER], records[-1] if records else None)
    server.records.clear()
    assert server.align([*messages, USER], kwargs).tokens.tolist() == server.sent([*messages, USER], kwargs)


def _other(message: dict, form: int) -> dict:
    """A copy of a message that says something else."""
    message = json.loads(json.dumps(message))
    if form % 3 == 1 and message.get("tool_calls"):
        message["tool_calls"][-1]["function"] |= {"arguments": {"s": "else"}}
    elif form % 3 == 2 and message.get("reasoning_content", "").strip():
        message["reasoning_content"] = "else " + message["reasoning_content"].strip()
    else:
        message["content"] = [{"type": "text", "text": "else "}, {"type": "text", "text": _text(message)}]
    return message


def _text(message: dict) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@given(st.lists(turn, min_size=1, max_size=3), st.sampled_from([{}, OFF]), st.integers(0, 99), st.integers(0, 5))
def test_past_a_change_nothing_is_served_but_what_was_sent(turns, kwargs, place, form):
    server = Server()
    messages, records, places = converse(server, turns, kwargs)
    at = place % len(messages)
    if form == 3 and at + 1 < len(messages):
        messages[at : at + 2] = [{"role": "user", "content": "first"}, *messages[at : at + 2]]
    elif form == 4 and len(messages) > 1 and messages[at]["role"] != "system":
        del messages[at]
    else:
        messages[at] = _other(messages[at], form)
    messages = [*messages, USER]
    prompt = server.align(messages, kwargs)
    check(server, prompt, messages, kwargs)
    assert prompt.matched is None or prompt.matched < at
    last = max((i for i, p in enumerate(places) if p < at), default=None)
    if last is None:
        assert prompt.tokens.tolist() == server.sent(messages, kwargs)
    else:
        assert prompt.base is records[last]
        end = len(server.sent(messages[: places[last] + 1], kwargs, ask=False))
        assert prompt.tokens.tolist()[len(rows(records[last])) :] == [
            SPECIAL["<|im_end|>"],
            *TOKENIZER.encode("\n"),
            *server.sent(messages, kwargs)[end:],
        ]


@given(answer, st.integers(0, 60), st.integers(0, 60), st.booleans(), st.sampled_from([{}, OFF]), st.booleans())
def test_an_answer_that_broke_off(written, tokens, place, drops, kwargs, early):
    """The server stops at some token; the client's copy after some call, or at some character."""
    server = Server()
    prompt = server.align([USER], kwargs)
    spelled, hidden = write(not kwargs, **written)
    if early:
        spelled, hidden = spelled[:tokens], [(a, min(b, tokens)) for a, b in hidden if a < tokens]
    record, message = server.answer(prompt, spelled, hidden)
    if record is None:
        assert not spelled
        return
    made, content, thought = message.pop("tool_calls", []), message["content"], message["reasoning_content"]
    if made:
        content = TOKENIZER.decode(spelled).rpartition("</think>")[2].partition("<tool_call>")[0]
    count = place % (len(made) + 1)
    if count:
        message["tool_calls"] = made[:count]
    else:
        content = content[: place % (len(content) + 1)]
        thought = thought if content.strip() else thought[:place]
    message |= {"content": content, "reasoning_content": "" if drops else thought}
    messages = [USER, message, *results(message), USER]
    served = server.align(messages, kwargs)
    check(server, served, messages, kwargs)
    if count > TOKENIZER.decode(spelled).count("</tool_call>"):  # a call whose last tag never came: the template writes one
        assert served.tokens.tolist() == server.sent(messages, kwargs)
        return
    assert served.matched == 1
    assert served.tokens[: prompt.tokens.size + served.taken].tolist() == [*prompt.tokens, *spelled[: served.taken]]
    record, message = server.answer(served, spell("Then.", [2]))
    messages += [copy(message, reasoning="dropped"), USER]
    again = server.align(messages, kwargs)
    check(server, again, messages, kwargs)
    assert again.tokens[: len(rows(record))].tolist() == rows(record)
