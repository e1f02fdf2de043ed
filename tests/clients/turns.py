"""What a client reports of a conversation."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

SLACK = 64
"""Tokens that may be read again where a conversation goes on: the template's between an answer and what follows it, and an open block."""


class Step(NamedTuple):
    """One request: tokens of the prompt, those of them that the server had, tokens of the answer."""

    prompt: int
    cached: int
    answer: int


class Turn(NamedTuple):
    """From a user's message to the end of the answer. tools: `NAME OUTCOME` of each call, in order."""

    session: str
    text: str
    tools: list[str]
    steps: list[Step]


def assert_goes_on(steps: Sequence[Step], before: Step | None = None) -> None:
    """Each step goes on from all of the one before. before: the step that the first one goes on from, where it does."""
    steps = [*([before] if before else []), *steps]
    for previous, step in itertools.pairwise(steps):
        have = previous.prompt + previous.answer
        assert step.prompt >= have - SLACK, f"{step} does not go on from {previous}"
        assert step.cached >= have - SLACK, f"{have - step.cached} tokens of {previous} were read again: {steps}"
