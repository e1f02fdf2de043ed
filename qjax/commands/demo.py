"""`qjax demo`: an agent's requests on the embedded model, each answered from what the caches hold, each proved bit for bit."""

import argparse
import json
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from qjax.bits import differing_bits
from qjax.commands.console import Interrupt, Reading, say, start
from qjax.commands.demo_restart import restart, restarted, states_in
from qjax.commands.demo_stage import CONTROL, LONGEST_ANSWER, WRONG, Stage, Step, play
from qjax.config import CacheConfig, DiskConfig, EngineConfig
from qjax.generation import Cancelled
from qjax.private import private_directory
from qjax.purity import Outcome, leaves
from qjax.state import Sequence

ZEROED = "gdn.S"
"""The section that the control resumes without."""


def run(args: argparse.Namespace) -> int:
    """0 where every step found its state where it must, warm equals cold in every bit and the control differs, else 1."""
    if args.restarted:
        return restarted(args)
    console = Console(highlight=False, quiet=args.json)
    config, caches = EngineConfig.from_flags(args), CacheConfig.from_flags(args)
    say(console, f"A coding agent's conversation of {args.tokens:,} tokens and more, on the model that is part of this package,", "bold")
    say(console, "through the caches. After it every request's state is compared bit for bit with a cold run of the same tokens.", "bold")
    with private_directory("demo") as directory, Interrupt() as interrupt:
        engine = start("embedded", config, console, caches, DiskConfig.private(states_in(directory)))
        stage = Stage(console, engine, interrupt)
        try:
            agent = play(stage, args.tokens)
            restart(stage, agent, directory, config, caches)
            proof = prove(stage)
        finally:
            engine.abandon()
            stage.close()
        if interrupt():
            interrupt.end()
    if args.json:
        print(json.dumps(as_json(stage.steps, proof)))
    say(console, "")
    console.print(table(stage.steps))
    say(console, "")
    for line in proof.lines(stage.steps):
        say(console, line, "red" if line.startswith(WRONG) else "")
    return 0 if proof.holds and not any(step.wrong for step in stage.steps) else 1


@dataclass(frozen=True)
class Proof:
    """Differing bits of all steps together, and of a control that must differ, with the control's answer.

    runs: cold runs. logits, sections: of every step; rows: of all together.
    """

    bits: int
    runs: int
    control_bits: int
    control_answer: str
    logits: int
    sections: int
    rows: int

    @property
    def holds(self) -> bool:
        return self.bits == 0 and self.control_bits > 0

    def lines(self, steps: list[Step]) -> list[str]:
        control = f"control, {ZEROED} zeroed before the resume: {self.control_bits:,} differing bits in {self.logits:,} logits"
        return [
            *(step.wrong for step in steps if step.wrong),
            f"compared with cold runs of the same tokens ({self.runs} for {len(steps)} requests): of each the last token's logits, "
            "the sections after its prompt, all its rows",
            f'{control}, and the answer "{self.control_answer}"' if self.control_bits else f"{control}, where there must be some",
            f"warm against cold: {self.bits:,} differing bits in {self.logits:,} logits, {self.sections} sections, {self.rows:,} rows",
        ]


def prove(stage: Stage) -> Proof:
    """Empties the caches, runs every prompt from nothing, and one from a state with a section zeroed. Fills in the steps' bits.

    Steps with the same tokens are compared with one cold run.
    """
    engine = stage.engine
    engine.caches.clear()
    say(stage.console, "\nthe caches are emptied, and every prompt is run again, cold", "bold")
    for step in stage.steps:
        same = next((s for s in stage.steps if s.bits is not None and np.array_equal(s.turn.prompt, step.turn.prompt)), None)
        if same is None:
            cold, seconds = _outcome(stage, step.turn.prompt)
            if step is stage.steps[CONTROL]:
                cold_logits = cold["logits"]
        else:
            seconds = same.cold_seconds
        step.bits, step.cold_seconds = sum(differing_bits(step.warm[name], cold[name]) for name in cold), seconds
    before, prompt = stage.before, stage.steps[CONTROL].turn.prompt
    broken = before.replace(sections=before.sections | {ZEROED: jnp.zeros_like(before.sections[ZEROED])})
    control, _ = _outcome(stage, prompt, broken)
    answer = engine.generate(prompt, broken, max_tokens=LONGEST_ANSWER)
    for _ in answer:
        pass
    engine.release(answer.sequence)
    return Proof(
        bits=sum(step.bits for step in stage.steps),
        runs=len({step.turn.prompt.tobytes() for step in stage.steps}),
        control_bits=differing_bits(control["logits"], cold_logits),
        control_answer=" ".join(answer.text.split()),
        logits=cold_logits.size,
        sections=len(engine.layout.sections) + len(engine.layout.open),
        rows=sum(step.turn.prompt.size for step in stage.steps),
    )


def _outcome(stage: Stage, prompt: np.ndarray, sequence: Sequence | None = None) -> tuple[Outcome, float]:
    """Logits and state after a prompt that goes on from a sequence, past the caches, and the seconds it took."""
    engine, reading = stage.engine, Reading(stage.console)
    try:
        done = engine.run_prompt(prompt, sequence, progress=reading, cancel=stage.interrupt)
    except Cancelled as cancelled:
        engine.release(cancelled.sequence)
        stage.interrupt.end()
    finally:
        reading.close()
    try:
        return {"logits": done.logits} | leaves(engine, done.slot.freeze()), done.seconds
    finally:
        done.slot.close()


def table(steps: list[Step]) -> Table:
    out = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False, collapse_padding=True)
    for title in ("request", "source"):
        out.add_column(title, no_wrap=True)
    for title in ("prompt", "read", "again", "first\ntoken s", "cold\nrun s", "right", "bits\ndiffer"):
        out.add_column(title, justify="right")
    for step in steps:
        turn = step.turn
        counts = (f"{n:,}" for n in (turn.prompt.size, turn.read, turn.read_again))
        seconds = f"{turn.first_token_seconds:.3f}", f"{step.cold_seconds:.3f}"
        out.add_row(step.what, turn.source, *counts, *seconds, "yes" if step.right else "no", f"{step.bits:,}")
    return out


def as_json(steps: list[Step], proof: Proof) -> dict:
    rows = [
        {
            "what": step.what,
            "source": step.turn.source,
            "expected": step.expected,
            "prompt_tokens": step.turn.prompt.size,
            "read": step.turn.read,
            "read_again": step.turn.read_again,
            "first_token_seconds": step.turn.first_token_seconds,
            "cold_seconds": step.cold_seconds,
            "answer": step.turn.content.strip(),
            "right": step.right,
            "differing_bits": step.bits,
        }
        for step in steps
    ]
    control = {"zeroed": ZEROED, "differing_bits": proof.control_bits, "answer": proof.control_answer}
    compared = {"differing_bits": proof.bits, "logits": proof.logits, "sections": proof.sections, "rows": proof.rows, "cold_runs": proof.runs}
    return {"steps": rows, "control": control, **compared, "holds": proof.holds and not any(step.wrong for step in steps)}
