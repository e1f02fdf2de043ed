"""The demo's steps: who asks what, and where the state that answers it must come from."""

from dataclasses import dataclass

import numpy as np
from rich.console import Console

from qjax.caches.keys import common
from qjax.commands import demo_conversation as talk
from qjax.commands.console import Answer, Interrupt, Reading, say
from qjax.commands.conversation import Conversation, Turn
from qjax.config import GRID, TOKEN
from qjax.engine import Engine
from qjax.purity import Outcome, leaves
from qjax.state import Sequence

LONGEST_ANSWER = 64
WRONG = "wrong source:"


@dataclass
class Step:
    """A request. turn: a Turn, or what another process tells of one. expected: the source that its state must come from. why: it read more
    than what is new, by the ledger, in words.

    warm: logits float32 [V] and the state after its prompt. bits: what differs from a cold run, and that run's seconds; None until it was measured.
    """

    what: str
    expected: str
    turn: Turn
    right: bool
    why: str
    warm: Outcome
    bits: int | None = None
    cold_seconds: float | None = None

    @property
    def wrong(self) -> str | None:
        """What to say where the state came from somewhere else."""
        if self.turn.source == self.expected:
            return None
        return f'{WRONG} {self.what}: the state must come from "{self.expected}" and came from "{self.turn.source}" ({self.why})'


class Stage:
    """Where the steps are played: shows each, and keeps its state on the host. before: what the last step that asked for it went on from."""

    def __init__(self, console: Console, engine: Engine, interrupt: Interrupt):
        self.console, self.engine, self.interrupt = console, engine, interrupt
        self.steps: list[Step] = []
        self.before: Sequence | None = None

    def conversation(self) -> Conversation:
        return Conversation(self.engine, system=talk.SYSTEM, tools=talk.TOOLS, thinking=talk.THINKING, max_tokens=LONGEST_ANSWER)

    def step(self, what: str, expected: str, conversation: Conversation, new: list[dict], fact: tuple[str, str]) -> Turn:
        """Says new messages. Raises what Interrupt.end does where a signal stopped it."""
        say(self.console, f"\n{len(self.steps) + 1} {what}", "bold")
        told = new if len(new) <= 4 else [message for message in new if fact[0] in message["content"]]
        for message in told:
            _message(self.console, message)
        if told != new:
            say(self.console, f"        ... and {len(new) - len(told)} more messages ...", "dim")
        reading, shown = Reading(self.console), Answer(self.console, f"{'agent':<8}")
        turn = conversation.say(new, progress=reading, cancel=self.interrupt)
        try:
            for piece in turn:
                shown.show(*piece)
        finally:
            reading.close()
            shown.close()
        if self.interrupt():
            self.interrupt.end()
        found = f"{turn.read:,} of {turn.prompt.size:,} prompt tokens read, {turn.read_again:,} of them again"
        say(self.console, f"        {turn.source}: {found}; the first token after {turn.first_token_seconds:.3f} s", "dim")
        right, why = turn.content.strip() == talk.answered(fact), self.engine.caches.ledger.records[-1].why.meaning
        self.steps.append(Step(what, expected, turn, right, why, self._kept(what, turn.prompt)))
        return turn

    def _kept(self, what: str, prompt: np.ndarray) -> Outcome:
        """What the caches keep of a prompt's end, copied to the host."""
        hit = next((h for h in self.engine.caches.find(prompt.astype(np.int64), "") if h.whole), None)
        if hit is None:
            raise ValueError(f"{what}: nothing is kept of its prompt's end; the demo needs larger caches (see --help)")
        restored = hit.tier.take(hit)
        try:
            return {"logits": restored.logits} | leaves(self.engine, restored.sequence)
        finally:
            self.engine.release(restored.sequence)

    def hold_before(self, prompt: np.ndarray) -> None:
        """Keeps the state that a prompt will go on from."""
        hits = self.engine.caches.find(prompt.astype(np.int64), "")
        self.before = hits[0].tier.take(hits[0]).sequence if hits else self.engine.empty()

    def close(self) -> None:
        if self.before is not None:
            self.engine.release(self.before)
            self.before = None


CONTROL = 4
"""The step that is run again from a damaged state: back to the first session."""


def play(stage: Stage, tokens: int) -> Conversation:
    """All steps of one process; the agent's conversation. tokens: of the first prompt, at least."""
    grid = stage.engine.layout.grid
    agent, question = stage.conversation(), [talk.asked(talk.FIRST)]
    agent.messages += talk.history(lambda messages: agent.render([*agent.messages, *messages, *question]).size, tokens)
    _show_history(stage.console, agent.messages)
    stage.step("cold", "cold", agent, question, talk.FIRST)
    first = stage.step("the next turn", "end", agent, talk.second_turn(), talk.READ[1])

    guest, question = stage.conversation(), [talk.asked(talk.GUEST)]
    guest.messages += talk.told((talk.GUEST,))
    # the caches have the grid lines of the head that all sessions share, and from the guest on the line where it parted
    head = common(guest.render([*guest.messages, *question]), first.prompt)
    short = stage.step("a guest", "resident" if head >= grid else "cold", guest, question, talk.GUEST)
    is_guest = 4 * short.prompt.size < first.prompt.size

    other, question = stage.conversation(), [talk.asked(talk.OTHER[0])]
    least = (first.prompt.size + LONGEST_ANSWER) // 4 + 1  # anything shorter would be a guest
    other.messages += talk.history(lambda messages: other.render([*other.messages, *messages, *question]).size, least, talk.OTHER, talk.SEED + 1)
    at_head = "guest" if is_guest and stage.engine.level == TOKEN else "cold" if stage.engine.level == GRID else "resident"
    stage.step("a second session", at_head if head < grid else "resident", other, question, talk.OTHER[0])

    question = [talk.asked(talk.BACK)]
    stage.hold_before(agent.render([*agent.messages, *question]))
    stage.step("back to the first", "parked", agent, question, talk.BACK)

    # of a parked session only some anchors may be left: an edit needs a grid line that was passed since
    least, before = max(tokens // 4, 2 * grid), list(agent.messages)
    long, edited = (talk.more_work(lambda messages: agent.render(messages).size - head, least, fact) for fact in (talk.MORE, talk.EDITED))
    stage.step("a long turn", "end", agent, long, talk.MORE)
    agent.messages = list(before)
    stage.step("an edit in the middle", "resident", agent, edited, talk.EDITED)
    agent.messages = list(before)
    stage.step("the same prompt again", "prompt", agent, edited, talk.EDITED)
    return agent


def _show_history(console: Console, messages: list[dict]) -> None:
    told = [m for m in messages if m["role"] != "system"][:2]
    say(console, "")
    for message in told:
        _message(console, message)
    calls = sum("tool_calls" in m for m in messages)
    say(console, f"        ... {len(messages) - len(told) - 1} more messages: {calls} tool calls with their files, logs and listings ...", "dim")


def _message(console: Console, message: dict) -> None:
    """One message in a line: its role, and its text or as much of it as fits."""
    role, text = {"assistant": "agent"}.get(message["role"], message["role"]), message["content"]
    for tool_call in message.get("tool_calls", ()):
        text = f"{tool_call['function']['name']}({', '.join(tool_call['function']['arguments'].values())})"
    line = text if len(text) <= 66 else text[:60].rstrip() + " ..."
    say(console, f"{role:<8}", "cyan", end="")
    say(console, line.replace("\n", "; "))
