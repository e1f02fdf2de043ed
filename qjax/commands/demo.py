"""`qjax demo`: an agent's conversation on the embedded model, read once; two turns go on from it, and the last is proved bit for bit."""

import argparse
import contextlib
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from qjax.bits import differing_bits
from qjax.commands import demo_conversation as talk
from qjax.commands.console import Answer, Reading, say, start
from qjax.commands.conversation import Conversation, Turn
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.purity import leaves
from qjax.state import Sequence

LONGEST_ANSWER = 64
ZEROED = "gdn.S"
"""The section that the control resumes without."""


def run(args: argparse.Namespace) -> int:
    """0 where warm equals cold in every bit and the control differs, else 1."""
    console = Console(highlight=False)
    config = EngineConfig.from_flags(args)
    say(console, f"A coding agent's conversation of {args.tokens:,} tokens and more, on the model that is part of this package.", "bold")
    say(console, "It is read once; two more turns go on from its state, and the last is compared bit for bit with a cold run.", "bold")
    engine = start("embedded", config, console)
    conversation = Conversation(engine, system=talk.SYSTEM, tools=talk.TOOLS, thinking=talk.THINKING, max_tokens=LONGEST_ANSWER)
    with contextlib.closing(conversation):
        turns, before = hold_conversation(console, conversation, args.tokens)
        prompt = turns[-1].turn.prompt
        proof = prove(console, engine, prompt, before)
    say(console, "")
    console.print(table(turns, proof))
    say(console, "")
    for line in proof.lines():
        say(console, line)
    return 0 if proof.holds else 1


@dataclass(frozen=True)
class Shown:
    """A turn, and whether its answer is the one that the conversation told."""

    turn: Turn
    right: bool


def hold_conversation(console: Console, conversation: Conversation, tokens: int) -> tuple[list[Shown], Sequence]:
    """Runs the three turns. Returns them, and the sequence that the last one went on from, held for the caller."""
    conversation.messages += talk.history(lambda messages: conversation.render([*conversation.messages, *messages, QUESTION]).size, tokens)
    _show_history(console, conversation.messages)
    cold = _turn(console, conversation, "1, cold", [QUESTION], talk.answered(talk.COLD))
    second = _turn(console, conversation, "2, from the state of turn 1", talk.second_turn(), talk.answered(talk.READ[1]))
    last = [talk.asked(talk.LAST)]
    before = conversation.engine.hold(conversation.best(conversation.render([*conversation.messages, *last])))
    third = _turn(console, conversation, "3, from the state of turn 2", last, talk.answered(talk.LAST))
    return [cold, second, third], before


QUESTION = talk.asked(talk.COLD)


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


def _turn(console: Console, conversation: Conversation, title: str, new: list[dict], expected: str) -> Shown:
    say(console, f"\nturn {title}", "bold")
    for message in new:
        _message(console, message)
    reading, shown = Reading(console), Answer(console, f"{'agent':<8}")
    turn = conversation.say(new, progress=reading)
    try:
        for piece in turn:
            shown.show(*piece)
    finally:
        reading.close()
        shown.close()
    again = f"{turn.read:,} of {turn.prompt.size:,} prompt tokens read"
    say(console, f"        {again}, the first token after {turn.first_token_seconds:.3f} s", "dim")
    return Shown(turn, turn.content.strip() == expected)


@dataclass(frozen=True)
class Proof:
    """Differing bits of a warm and a cold run over the same tokens, and of a control that must differ, with the control's answer."""

    bits: int
    control_bits: int
    control_answer: str
    logits: int
    sections: int
    rows: int
    cold_seconds: float

    @property
    def holds(self) -> bool:
        return self.bits == 0 and self.control_bits > 0

    def lines(self) -> list[str]:
        compared = f"{self.logits:,} logits, {self.sections} sections, {self.rows:,} rows"
        control = f"control, {ZEROED} zeroed before the resume: {self.control_bits:,} differing bits in {self.logits:,} logits"
        return [
            f'{control}, and the answer "{self.control_answer}"' if self.control_bits else f"{control}, where there must be some",
            f"warm against cold: {self.bits:,} differing bits in {compared}",
        ]


def prove(console: Console, engine: Engine, prompt: np.ndarray, before: Sequence) -> Proof:
    """Runs a prompt on from `before`, from nothing, and on from `before` with one section zeroed; gives up all of them."""
    say(console, "\nthe last prompt again: warm, cold, and warm with a broken state", "bold")
    broken = before.replace(sections=before.sections | {ZEROED: jnp.zeros_like(before.sections[ZEROED])})
    runs = {}
    for name, sequence in (("warm", before), ("cold", None), ("broken", broken)):
        reading = Reading(console)
        try:
            done = engine.run_prompt(prompt, sequence, progress=reading)
        finally:
            reading.close()
        runs[name] = done, leaves(engine, done.slot.freeze())
        done.slot.close()
    answer = engine.generate(prompt, broken, max_tokens=LONGEST_ANSWER)
    for _ in answer:
        pass
    engine.release(answer.sequence)
    engine.release(before)
    (warm, warm_state), (cold, cold_state), (control, _) = runs["warm"], runs["cold"], runs["broken"]
    return Proof(
        bits=differing_bits(warm.logits, cold.logits) + sum(differing_bits(warm_state[name], cold_state[name]) for name in cold_state),
        control_bits=differing_bits(control.logits, cold.logits),
        control_answer=" ".join(answer.text.split()),
        logits=cold.logits.size,
        sections=len(engine.layout.sections) + len(engine.layout.open),
        rows=prompt.size,
        cold_seconds=cold.seconds,
    )


def table(turns: list[Shown], proof: Proof) -> Table:
    out = Table("turn", header_style="bold")
    for title in ("prompt tokens", "read", "first token after", "answer right"):
        out.add_column(title, justify="right")
    for number, (turn, right) in enumerate(((s.turn, s.right) for s in turns), 1):
        out.add_row(str(number), f"{turn.prompt.size:,}", f"{turn.read:,}", f"{turn.first_token_seconds:.3f} s", "yes" if right else "no")
    out.add_row(f"{len(turns)}, cold", f"{proof.rows:,}", f"{proof.rows:,}", f"{proof.cold_seconds:.3f} s", "")
    return out
