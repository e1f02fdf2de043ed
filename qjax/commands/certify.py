"""`qjax certify`: measures on this machine where a resume is bit-exact, in this process and against others."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from qjax.child import run_qjax
from qjax.commands.console import check
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.model.source import load
from qjax.private import private_directory
from qjax.purity import GRID, NONE, Certificate, Check, certify, compare, process_outcome
from qjax.state import BLOCK
from qjax.warmth import certify_tiers
from qjax.warmth_files import STAGES, certify_files, run_stage, stage_check

PROCESSES = {
    "another process": [],
    "another process, programs compiled anew": ["--compile-cache", "none"],
    "a process on one core, programs compiled anew": ["--compile-cache", "none", "--one-core"],
}
"""What is compared across processes: the compile cache wiped is no cache at all."""


def run(args) -> int:
    if args.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before the backend starts its threads
        os.environ["PJRT_NPROC"] = "1"
    config = EngineConfig.from_flags(args)
    if args.rows is not None and args.rows <= config.grid + BLOCK:
        raise ValueError(f"--rows must be above a grid and a block, {config.grid + BLOCK}, not {args.rows}")
    check(args.model, config)
    console = Console(stderr=True)
    with console.status("loading and compiling") as status:
        engine = Engine(load(args.model), config)
        if args.dump:
            outcome = run_stage(args.stage, engine, args.files) if args.stage else process_outcome(engine)
            np.savez(args.dump, **outcome)
            return 0
        found = certify(engine, args.rows, progress=status.update)
        tiers, controls = certify_tiers(engine, progress=status.update)
        with private_directory("certify") as directory:
            files, more = certify_files(engine, directory / "here", progress=status.update)
            processes = _processes(engine, args.model, config, directory, status.update)
            stages = _stages(engine, args.model, config, directory, status.update)
        checks = (*found.checks, *tiers, *files, *processes, *stages)
        found = dataclasses.replace(found, checks=checks, controls=found.controls | controls | more)
    if args.json:
        print(json.dumps(as_json(found) | {"exactness": engine.level}))
    else:
        _print(found, engine)
    return 1 if found.level == NONE else 0


def _processes(engine: Engine, model: str, config: EngineConfig, directory: Path, progress) -> list[Check]:
    want = process_outcome(engine)
    checks = []
    for name, flags in PROCESSES.items():
        progress(name)
        got = _outcome(name, model, config, directory, flags)
        checks.append(Check(name, len(want["logits"]), compare(want, got), GRID))
    return checks


def _stages(engine: Engine, model: str, config: EngineConfig, directory: Path, progress) -> list[Check]:
    """What processes one after the other find in the files of those before."""
    checks = []
    for stage in STAGES:
        progress(f"files: {stage}")
        flags = ["--files", str(directory / "files"), "--stage", stage]
        got = _outcome(f"the process of {stage}", model, config, directory, flags, ends=-signal.SIGKILL if stage == "killed" else 0)
        if stage != "killed":
            checks.append(stage_check(stage, engine, got))
    return checks


def _outcome(name: str, model: str, config: EngineConfig, directory: Path, flags: list[str], ends: int = 0) -> dict[str, np.ndarray]:
    """What a process of this command sends, which is to end with a status. ValueError where it does not."""
    file = directory / "outcome.npz"
    run_qjax(["certify", "--model", model, *config.flags(), "--dump", str(file), *flags], name, ends)
    if ends:
        return {}
    with np.load(file) as got:
        return dict(got)


def as_json(found: Certificate) -> dict:
    """level: what was measured. exactness, which is added to it: the level that the engine ran at."""

    def row(c: Check) -> dict:
        more = {"hit": c.hit, "near_ties": c.near_ties}
        return {"name": c.name, "rows": c.rows, "differing_bits": c.differing_bits} | {
            name: value for name, value in more.items() if value is not None
        }

    return {"level": found.level, "checks": [row(c) for c in found.checks], "controls": found.controls, "control_failed": found.control_failed}


def _print(found: Certificate, engine: Engine) -> None:
    table = Table(title=f"{engine.model.name}: the bits of a row do not depend on the cut")
    table.add_column("check")
    table.add_column("rows", justify="right")
    table.add_column("differing bits", justify="right")
    for c in found.checks:
        ties = f", {c.near_ties} near tie{'s' if c.near_ties != 1 else ''}" if c.near_ties else ""
        table.add_row(c.name + ties, f"{c.rows:,}", f"{c.differing_bits:,}", style=None if c.differing_bits == 0 else "red")
    table.add_section()
    for name, bits in found.controls.items():
        table.add_row(f"control, must differ: {name}", "", f"{bits:,}", style="dim" if bits else "red")
    console = Console()
    console.print(table)
    promise = {"token": "a resume is bit-exact at every token", GRID: "a resume is bit-exact on the grid lines only", NONE: "no promise holds"}
    console.print(f"level [bold]{found.level}[/bold]: {promise[found.level]}")
    if engine.level != found.level:
        console.print(f"the tiers ran at level {engine.level}, where a session resume is held to the greedy gate")
