"""A generator of agent traffic: coding agents whose prompts grow from turn to turn, some at once.

The parameters are those that aiperf 0.13.0 (PyPI, Apache-2.0) publishes for agentic coding sessions of up to 200,000 tokens (its manifest
1k_sessions_200k_ctx); the generator is our own. A prompt begins with 32,000 tokens that all sessions share (tools and system prompt),
10,000 that the sessions of one of 100 projects share, and the session's own first files. A turn adds the answer before it and what the
tool or the user said. Each of AGENTS starts a new session where its last one has ended.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from qjax.bench.trace import Call

SHARED, PROJECT, PROJECTS, SKEW = 32_000, 10_000, 100, 0.6
CONTEXT = 200_000
"""Tokens at which a session ends."""
OWN, NEW, ANSWER = (15_000, 5_000, 50_000), (6_000, 4_000, 50_000), (1_000, 800, 10_000)  # tokens: mean, median, most
SHORTEST_ANSWER = 30
TOOL_SHARE, TOOL, HUMAN = 0.7, (5.0, 2.0, math.inf), (30.0, 15.0, math.inf)  # share of turns that a tool answers; seconds: mean, median, most
END, END_GROWTH = 0.05, 1.5  # a session's chance to end after a turn, and by how much it has grown at CONTEXT
AGENTS = 4
"""Sessions at once: one person's machine. This and the next are ours."""
ANSWER_RATE = 40.0
"""Tokens a second of an answer, by which the next turn comes later."""

MOST_SESSIONS = 100_000


def agent_trace(sessions: int = 32, seed: int = 0) -> list[Call]:
    """The requests of so many sessions, by time. The same seed gives the same."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, PROJECTS + 1) ** SKEW
    free, answered, calls = SHARED + PROJECT * PROJECTS, 0, []  # the first key that nobody has; tokens of all answers
    agents = sorted((float(random.exponential(HUMAN[0])), number) for number in range(min(AGENTS, sessions)))  # (time of the next turn, agent)
    spans: dict[int, list[tuple[int, int]]] = {}
    left = sessions
    while agents:
        at, agent = heapq.heappop(agents)
        new = _tokens(random, NEW)
        if agent not in spans:
            if not left:
                continue
            left, new = left - 1, _tokens(random, OWN)
            project = int(random.choice(PROJECTS, p=weights / weights.sum()))
            spans[agent] = [(0, SHARED), (SHARED + PROJECT * project, PROJECT)]
        before = sum(count for _, count in spans[agent])
        spans[agent].append((free, new))
        free, prompt, answer = free + new, before + new, max(SHORTEST_ANSWER, _tokens(random, ANSWER))
        if prompt < CONTEXT:
            bases, counts = np.array(spans[agent], np.int64).T
            answered += answer
            calls.append(Call(at, bases, counts, answer, -answered, prompt + answer, user=before))
            spans[agent].append((-answered, answer))
        if prompt >= CONTEXT or random.random() < END * (1 + (END_GROWTH - 1) * prompt / CONTEXT):
            del spans[agent]
        gap = _lognormal(random, TOOL if random.random() < TOOL_SHARE and agent in spans else HUMAN)
        heapq.heappush(agents, (at + answer / ANSWER_RATE + gap, agent))
    return calls


def named(name: str) -> list[Call] | None:
    """The trace that `agent[:SESSIONS[:SEED]]` names; None for what does not begin so. ValueError for what does and is none."""
    first, *numbers = name.split(":")
    if first != "agent":
        return None
    if len(numbers) > 2 or not all(n.isdecimal() for n in numbers) or (numbers and not 1 <= int(numbers[0]) <= MOST_SESSIONS):
        raise ValueError(f"expected agent[:SESSIONS[:SEED]] with 1 to {MOST_SESSIONS:,} sessions, found {name!r}")
    return agent_trace(*map(int, numbers))


def _lognormal(random: np.random.Generator, mean_median_most: tuple[float, float, float]) -> float:
    """One number of a lognormal distribution, drawn again while it is above the most."""
    mean, median, most = mean_median_most
    while (drawn := random.lognormal(math.log(median), math.sqrt(2 * math.log(mean / median)))) > most:
        pass
    return float(drawn)


def _tokens(random: np.random.Generator, mean_median_most: tuple[float, float, float]) -> int:
    return max(1, int(_lognormal(random, mean_median_most)))
