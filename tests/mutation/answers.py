"""Mutants of what an answer says and of what the client gets of it."""

from tests.mutation.mutant import of

THOUGHT = of(
    "thought.py",
    ("a budget is one token larger", "self.tokens >= self._thought.budget", "self.tokens > self._thought.budget", "test_thought.py::test_by_hand"),
    ("the tag is hidden too", "len(self._due) > len(self._thought.close)", "len(self._due) > 0", "test_thought.py::test_by_hand"),
    ("a thought is closed again and again", "*self._thought.close), False", "*self._thought.close), True", "test_thought.py::test_by_hand"),
    (
        "an answer without reasoning has a budget",
        "self._close and self._thinking.inside and",
        "self._close and",
        "test_thought.py::test_an_answer_without_reasoning_has_no_budget",
    ),
    (
        "the tags are counted",
        "self.tokens += before and self._thinking.inside",
        "self.tokens += before or self._thinking.inside",
        "test_thought.py::test_a_thought_within_its_budget_is_left_alone",
    ),
)

TRANSCRIPT = of(
    "transcript.py",
    (
        "a character goes on in the phrase",
        "            text += self._stream.flush()  #",
        "            pass  #",
        "test_thought.py::test_a_character_that_the_budget_cuts_is_shown_before_the_phrase",
    ),
    (
        "the client gets the rest of a phrase that the end cuts",
        "self._show(self._stream.flush(), self._meter.hides)",
        "self._show(self._stream.flush(), False)",
        "test_thought.py::test_a_character_of_the_phrase_is_not_shown_where_the_answer_ends_in_it",
    ),
    (
        "the client gets the phrase",
        "        if hidden:\n            self._secret",
        "        if None:\n            self._secret",
        "test_thought.py::test_by_hand",
    ),
    (
        "text that is held back comes after what is hidden",
        "len(self.text) + len(self._stop.held)",
        "len(self.text)",
        "test_thought.py::test_stop_strings_do_not_see_what_is_hidden",
    ),
    (
        "what is hidden is in a text that ends before it",
        "self._secret if self._place <= len(self.text) else",
        "self._secret if True else",
        "test_thought.py::test_stop_strings_do_not_see_what_is_hidden",
    ),
    (
        "an answer with logprobs is one without",
        "self.plain = top is None and (thought",
        "self.plain = (thought",
        "equivalence/test_thought.py::test_an_answer_with_either_is_neither_kept_nor_answered_from_what_is",
    ),
    (
        "an answer that was closed is one that was not",
        "(thought is None or thought.budget is None)",
        "True",
        "equivalence/test_thought.py::test_an_answer_with_either_is_neither_kept_nor_answered_from_what_is",
    ),
)

REST = (
    *of(
        "generation.py",
        (
            "logprobs are of the next row",
            "new, stopped = said.add(token, logits)",
            "new, stopped = said.add(token, slot.step([token])[0])",
            "test_logprobs.py::test_each_token_has_those_of_the_row_that_it_came_from",
        ),
        (
            "a broken row is not told where a token is forced",
            "                token = sample(logits,",
            "                token = said.due is None and sample(logits,",
            "test_thought.py::test_a_broken_row_is_told_where_a_token_is_forced",
        ),
    ),
    *of(
        "logprobs.py",
        (
            "ids without a text are likely too",
            "logits = logits[:allowed]",
            "logits = logits[:]",
            "test_logprobs.py::test_of_a_row_that_can_be_counted",
        ),
    ),
    *of(
        "serving/spelling.py",
        (
            "what the client got of a character is hidden",
            "if count in edges:",
            "if False:",
            "serving/test_align_thought.py::test_the_next_turn_goes_on_at_the_end",
        ),
    ),
)

ANSWER_MUTANTS = (*THOUGHT, *TRANSCRIPT, *REST)
