"""A thinking budget: when the reasoning is closed for the model, what the client gets of it, and that the rows are those of any answer."""

import numpy as np
import pytest

from qjax.generation import Token
from qjax.model.source import load
from qjax.sampling import Sampling, sample
from qjax.thought import PHRASE, Thought
from tests.models import prompt
from tests.runs import decode, prefill
from tests.test_generation import check_end, finished

MODEL = load("embedded")
TOKENIZER = MODEL.tokenizer
OPEN, CLOSE = TOKENIZER.special["<think>"], TOKENIZER.special["</think>"]
PROMPT = prompt(70)
SECRET, TAG = f"\n\n{PHRASE}\n", "</think>\n\n"
MANY = len(TOKENIZER.encode(SECRET))


def thought(budget, opened=True, **more) -> Thought:
    return Thought.of(TOKENIZER, budget, opened, **more)


def spelled(*parts) -> list[int]:
    """Ids of texts, among which tags are tokens."""
    return [i for part in parts for i in ([TOKENIZER.special[part]] if part in TOKENIZER.special else TOKENIZER.encode(part))]


@pytest.fixture(autouse=True)
def no_stop_tokens(small, monkeypatch):
    """A random model says its stop tokens at random; here an answer ends where the test says."""
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", ())


@pytest.fixture
def says(small, monkeypatch):
    """Call it with ids, which are what is drawn at each place, and with the request: (generation, what it yielded). Its state is released."""

    def run(drawn, **more):
        with monkeypatch.context() as patched:
            patched.setattr("qjax.generation.sample", lambda logits, sampling, history, draw, allowed: drawn[draw])
            generation, pieces = finished(small, **{"max_tokens": len(drawn)} | more)
        small.release(generation.sequence)
        assert "".join(piece.text for piece in pieces) == generation.text
        assert [(i, i + 1) for i, piece in enumerate(pieces) if piece.hidden] == [(i, i + 1) for a, b in generation.hidden for i in range(a, b)]
        return generation, pieces

    return run


def test_the_phrase_and_the_tag_are_tokens_as_the_template_writes_them():
    made = thought(7)
    assert (TOKENIZER.decode(made.phrase), TOKENIZER.decode(made.close)) == (SECRET, TAG)
    message = {"role": "assistant", "reasoning_content": f"It is so{SECRET}", "content": "Yes."}
    rendered = MODEL.template.render([{"role": "user", "content": "?"}, message], None, add_generation_prompt=False)
    at = rendered.index(CLOSE) + len(made.close) - 1
    assert rendered[at + 1 - len(made.phrase) - len(made.close) : at + 1] == [*made.phrase, *made.close]
    assert TOKENIZER.decode(thought(7, phrase=" So. ").phrase) == "\n\nSo.\n"
    assert TOKENIZER.decode(thought(7, phrase="").phrase) == "\n"


@pytest.mark.parametrize("budget", [-1, 1.5, True, "9"])
def test_a_budget_that_is_no_number_of_tokens_is_refused(budget):
    with pytest.raises(ValueError, match=rf"a thinking budget must be a whole number of tokens, 0 or more, found {budget!r}"):
        thought(budget)


def test_a_thought_that_cannot_be_closed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"must not have </think> in it, found 'So\. </think>'"):
        thought(5, phrase="So. </think>")
    with pytest.raises(ValueError, match="needs the tokens that close the reasoning, found none"):
        Thought(5)
    monkeypatch.setattr(TOKENIZER, "special", {})
    with pytest.raises(ValueError, match="needs a model that thinks: its tokenizer has no <think> and no </think>"):
        thought(5)
    assert thought(None) == Thought(None, True)  # to count, nothing is needed


@pytest.mark.parametrize(("phrase", "close"), [((1, 1024), (2,)), ((1,), (-1,)), ((), (1.0,))])
def test_ids_that_are_no_tokens_are_refused_before_any_work(small, phrase, close):
    with pytest.raises(ValueError, match=r"a thought is closed with token ids from 0 to 1023, found \["):
        small.generate(PROMPT, thought=Thought(3, True, phrase, close))


@pytest.mark.parametrize("budget", [0, 1, 5, 17, 58, 59])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5, presence_penalty=1.5, repetition_penalty=1.3)])
def test_by_hand(small, budget, sampling):
    """What is forced runs as what is drawn does: token i of the answer comes from the row before it as number i, the end is a cold one's."""
    bound = thought(budget)
    run, pieces = finished(small, sampling=sampling, max_tokens=90, thought=bound)
    slot, forced, size = small.open(), [*bound.phrase, *bound.close], TOKENIZER.size
    logits, history = prefill(slot, PROMPT), list(PROMPT)
    for i, token in enumerate(run.tokens):
        due = 0 <= i - budget < len(forced)
        assert token == (forced[i - budget] if due else sample(logits, sampling, np.array(history), i, size))
        history.append(token)
        logits = decode(slot, [token])[0]
    slot.close()
    assert (run.finish, len(run.tokens), run.hidden) == ("length", 90, [(budget, budget + MANY)])
    assert run.thought_tokens == budget + MANY
    assert [piece.id for piece in pieces if piece.id is not None] == run.tokens
    assert [piece.hidden for piece in pieces][:90] == [budget <= i < budget + MANY for i in range(90)]
    assert run.raw == TOKENIZER.decode(run.tokens)
    assert SECRET in run.raw
    assert PHRASE not in run.text
    assert "".join(piece.text for piece in pieces) == run.text
    check_end(small, run, [*PROMPT, *run.tokens[:-1]])


def test_a_thought_within_its_budget_is_left_alone(small, says):
    """Also one that has as many tokens as it may, and closes a token sooner than it would be closed."""
    drawn = spelled("A b c", "</think>", "\n\nIt is 4417.")
    count = drawn.index(CLOSE)
    for budget in (None, count + 1, 99):
        run, pieces = says(drawn, thought=thought(budget))
        assert (run.tokens, run.hidden, run.thought_tokens) == (drawn, [], count)
        assert run.text == run.raw == TOKENIZER.decode(drawn)
        assert not any(piece.hidden for piece in pieces)
    run, _ = says(drawn, thought=thought(count))  # control: it had them all and goes on
    assert run.hidden == [(count, len(drawn))]


def test_no_thought_is_counted_where_none_is_given(says):
    run, _ = says(spelled("A b c", "</think>", "It is."))
    assert (run.thought_tokens, run.hidden) == (0, [])


def test_a_thought_that_the_model_begins_itself_is_counted_from_its_tag(says):
    drawn = spelled("\n\n", "<think>", "one two three four five six seven eight nine ten" * 5)
    run, _ = says(drawn, thought=thought(3, opened=False))
    assert run.tokens[:5] == drawn[:5]
    assert run.hidden == [(5, 5 + MANY)]
    assert run.text.startswith("\n\n<think>" + TOKENIZER.decode(drawn[2:5]) + TAG)
    assert run.thought_tokens == 3 + MANY
    run, _ = says(drawn, thought=thought(0, opened=False))
    assert run.hidden == [(2, 2 + MANY)]


def test_an_answer_without_reasoning_has_no_budget(says):
    """Neither from the beginning, nor after a thought has closed, nor where the tag comes later."""
    words = "one two three four five six"
    for drawn, opened, budget in (
        (spelled(words), False, 0),
        (spelled(words), False, 2),
        (spelled("A", "</think>", words, "<think>", words), True, 2),
        (spelled("A", "<think>", words), False, 0),
    ):
        run, _ = says(drawn, thought=thought(budget, opened=opened))
        assert (run.tokens, run.hidden, run.raw) == (drawn, [], run.text)


def test_tags_that_are_spelled_count_as_the_client_sees_them(says):
    drawn = spelled("A b", *"</think>", "one two three four five six")
    run, _ = says(drawn, thought=thought(len(drawn) - 4))
    assert (run.tokens, run.hidden) == (drawn, [])
    assert run.thought_tokens == len(spelled("A b", *"</think"))


def test_it_is_closed_once(says):
    drawn = spelled("word " * 30, "<think>", "word " * 40)
    run, _ = says(drawn, thought=thought(4))
    assert run.tokens.count(CLOSE) == 1
    assert run.hidden == [(4, 4 + MANY)]


def test_stop_strings_do_not_see_what_is_hidden(says):
    """They see what the client sees: the reasoning, and after it the tag."""
    drawn = spelled("x y " + "word " * 60)
    first = TOKENIZER.decode(drawn[:4])
    run, _ = says(drawn, thought=thought(4), stop=[PHRASE[3:9], "\n\nI"])
    assert run.finish == "length"
    run, pieces = says(drawn, thought=thought(4), stop=["ZZ", f"{first[-2:]}</think>"])
    assert (run.finish, run.text, run.raw) == ("stop", first[:-2], first[:-2])
    assert (run.tokens[4:], run.hidden) == ([*thought(4).phrase, CLOSE], [(4, 4 + MANY)])
    assert not any(piece.text for piece in pieces[4:])
    run, _ = says(drawn, thought=thought(4), stop=["</think>"])
    assert (run.finish, run.text, run.raw) == ("stop", first, first + SECRET)
    run, _ = says(drawn, thought=thought(4), stop=f"{first[-2:]}</think>\n\n\n")  # it only begins
    assert (run.finish, run.raw) == ("length", TOKENIZER.decode(run.tokens))


def test_a_character_that_the_budget_cuts_is_shown_before_the_phrase(says):
    """The first two of the three bytes of a character; its third would have come next, and the phrase comes in its place."""
    drawn = [next(i for i in range(TOKENIZER.size) if TOKENIZER.token_bytes(i) == bytes([byte])) for byte in "日".encode()] + spelled("word " * 40)
    run, pieces = says(drawn, thought=thought(2))
    assert pieces[:4] == [Token(drawn[0], ""), Token(drawn[1], "�"), *(Token(i, "", hidden=True) for i in thought(2).phrase[:2])]
    assert run.text.startswith("�</think>\n\n")
    assert run.raw == TOKENIZER.decode(run.tokens)
    assert run.raw.startswith("�\n\nI have")
    run, pieces = says(drawn, thought=thought(3))  # control: whole
    assert pieces[2] == Token(drawn[2], "日")


def test_a_character_of_the_phrase_is_not_shown_where_the_answer_ends_in_it(says):
    bound = thought(1, phrase="Gut. 日")
    text = [*bound.phrase[:-1]]
    cut = next(n for n in range(len(text) + 1) if TOKENIZER.decode(text[:n]).endswith("�"))
    run, pieces = says(spelled("word " * 30), thought=bound, max_tokens=1 + cut)
    assert (run.finish, run.text, run.hidden) == ("length", "w", [(1, 1 + cut)])
    assert run.raw == TOKENIZER.decode(run.tokens)
    assert run.raw.endswith("�")
    assert pieces[-1].id is not None


@pytest.mark.parametrize("most", [3, 4, 5, 9, 4 + MANY, 5 + MANY, 6 + MANY])
def test_max_tokens_ends_it_wherever_it_is(small, most):
    run, _ = finished(small, max_tokens=most, thought=thought(4))
    whole, _ = finished(small, max_tokens=60, thought=thought(4))
    assert (run.finish, run.tokens) == ("length", whole.tokens[:most])
    assert run.hidden == ([(4, min(most, 4 + MANY))] if most > 4 else [])
    assert run.thought_tokens == min(most, 4 + MANY)
    assert run.raw == TOKENIZER.decode(run.tokens)
    small.release(whole.sequence)
    check_end(small, run, [*PROMPT, *run.tokens[:-1]])


def test_it_can_be_cancelled_in_the_phrase_and_gone_on_with(small):
    asked = iter([False] * (2 + 6) + [True])  # the prompt takes two forwards
    run, _ = finished(small, max_tokens=60, thought=thought(4), cancel=lambda: next(asked))
    assert (run.finish, run.hidden) == ("cancelled", [(4, 7)])
    rest, _ = finished(small, [*PROMPT, *run.tokens], run.sequence, max_tokens=3)
    assert rest.start == 70 + 6
    check_end(small, run, [*PROMPT, *run.tokens[:-1]])
    check_end(small, rest, [*PROMPT, *run.tokens, *rest.tokens[:-1]])


@pytest.mark.parametrize(("place", "finish"), [(3, "stop"), (4, "length"), (6, "length"), (4 + MANY, "length"), (6 + MANY, "stop")])
def test_a_stop_token_ends_it_where_it_is_drawn(small, says, monkeypatch, place, finish):
    """In the place of what is forced nothing is drawn."""
    drawn = spelled("word " * 40)
    drawn[place] = TOKENIZER.special["<|im_end|>"]
    monkeypatch.setattr(small.model.tokenizer, "stop_ids", (drawn[place],))
    run, _ = says(drawn, thought=thought(4))
    assert (run.finish, len(run.tokens)) == (finish, place if finish == "stop" else len(drawn))


def test_a_broken_row_is_told_where_a_token_is_forced(small, monkeypatch):
    """Else what was kept broken would be kept again as the state of an answer."""
    real = small.forward.all_logits
    monkeypatch.setattr(small.forward, "all_logits", lambda x: real(x) * np.float32("nan"))
    run = small.generate(PROMPT[:64], max_tokens=20, thought=thought(1))  # the prompt is a prefill, whose logits are whole
    with pytest.raises(ValueError, match="1024 of 1024 logits are NaN"):
        list(run)
    assert len(run.tokens) == 1
    small.release(run.sequence)
