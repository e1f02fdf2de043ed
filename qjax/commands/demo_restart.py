"""The demo's last step: the program stops, and another process goes on with the conversation from what it wrote."""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from qjax.child import run_qjax
from qjax.commands import demo_conversation as talk
from qjax.commands.console import Interrupt, say, start
from qjax.commands.conversation import Conversation
from qjax.commands.demo_stage import Stage, Step
from qjax.config import CacheConfig, DiskConfig, EngineConfig

MESSAGES, TOLD, STATE = "messages.json", "told.json", "state.npz"


@dataclass(frozen=True)
class Heard:
    """What the other process tells of its turn; as of a Turn."""

    prompt: np.ndarray
    source: str
    read: int
    read_again: int
    first_token_seconds: float
    content: str


def states_in(directory: Path) -> Path:
    """Where the states lie in the demo's own directory."""
    return directory / "states"


def restart(stage: Stage, agent: Conversation, directory: Path, config: EngineConfig, caches: CacheConfig) -> None:
    """Stops the engine's caches as at the end of a program, and has another process answer the next question."""
    number, what, question = len(stage.steps) + 1, "after a restart", [talk.asked(talk.AFTER)]
    say(stage.console, f"\n{number} {what}", "bold")
    nvme, begin = stage.engine.caches.nvme, time.perf_counter()
    stage.engine.close()
    wrote = nvme.stats()["written_bytes"]
    say(
        stage.console,
        f"        the program stops: {wrote / 2**20:,.0f} MiB on NVMe after {time.perf_counter() - begin:.2f} s; a new process starts",
        "dim",
    )
    (directory / MESSAGES).write_text(json.dumps([*agent.messages, *question]))
    if stage.interrupt():
        stage.interrupt.end()
    with stage.interrupt.lifted():  # it can be ended at any time, and ends itself where Ctrl-C reaches all processes of a terminal
        run_qjax(["demo", "--restarted", str(directory), *config.flags(), *caches.flags()], "the process after the restart")
    told = json.loads((directory / TOLD).read_text())
    with np.load(directory / STATE) as found:
        state = dict(found)
    turn = Heard(state.pop("prompt"), *(told[name] for name in ("source", "read", "read_again", "first_token_seconds", "content")))
    say(stage.console, f"{'user':<8}{question[0]['content']}")
    say(stage.console, f"{'agent':<8}{turn.content.strip()}")
    found = f"{turn.read:,} of {turn.prompt.size:,} prompt tokens read, {turn.read_again:,} of them again"
    say(stage.console, f"        {turn.source}: {found}; the first token after {turn.first_token_seconds:.3f} s", "dim")
    stage.steps.append(Step(what, "spill", turn, turn.content.strip() == talk.answered(talk.AFTER), told["why"], state))


def restarted(args: argparse.Namespace) -> int:
    """What the other process does: one turn, told in files."""
    directory, console = Path(args.restarted), Console(quiet=True)
    engine = start("embedded", EngineConfig.from_flags(args), console, CacheConfig.from_flags(args), DiskConfig.private(states_in(directory)))
    try:
        with Interrupt() as interrupt:
            stage = Stage(console, engine, interrupt)
            conversation = stage.conversation()
            *before, question = json.loads((directory / MESSAGES).read_text())
            conversation.messages = before
            turn = stage.step("after a restart", "spill", conversation, [question], talk.AFTER)
            step = stage.steps[-1]
    finally:
        engine.abandon()
    told = {name: getattr(turn, name) for name in ("source", "read", "read_again", "first_token_seconds", "content")}
    (directory / TOLD).write_text(json.dumps(told | {"why": step.why}))
    np.savez(directory / STATE, prompt=turn.prompt, **{name: np.asarray(a) for name, a in step.warm.items()})
    return 0
