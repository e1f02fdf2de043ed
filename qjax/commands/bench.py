"""`qjax bench engine`: how fast the engine is on this machine, and how near to what the machine can do. `qjax bench resume`: what a
resume saves. `qjax bench replay`: what a trace of requests would reuse. `qjax bench storage`: how near the caches' files are to the disk.
"""

import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qjax.bench import resume, storage
from qjax.bench.engine import measure
from qjax.bench.replay import replay
from qjax.bench.trace import read, write
from qjax.bench.traffic import named
from qjax.commands import bench_restart
from qjax.config import MOST_GB, CacheConfig, DiskConfig, EngineConfig
from qjax.engine import Engine
from qjax.model.source import load
from storage import StorageError


def run(args) -> int:
    if args.what == "restart":
        return bench_restart.run(args)
    if args.what in ("replay", "storage"):
        return run_replay(args) if args.what == "replay" else run_storage(args)
    config = EngineConfig.from_flags(args)
    with Console(stderr=True).status("loading and compiling") as status:
        if args.what == "engine":
            engine = Engine(load(args.model), config)
            found = measure(engine, args.tokens, args.rounds, progress=status.update)
        else:
            model = load(args.model)
            room = resume.sized(model, config, args.tokens, args.rounds)
            config = dataclasses.replace(room, **{name: getattr(config, name) for name in ("kv_gb", "context_tokens") if hasattr(args, name)})
            engine = Engine(model, config, CacheConfig.from_flags(args))
            try:
                found = resume.measure(engine, args.tokens, args.rounds, progress=status.update)
            except RuntimeError as e:  # a case that was not served from where it should be, which budgets and flags can bring about
                raise ValueError(str(e)) from e
    if args.json:
        print(json.dumps(found))
    else:
        (show if args.what == "engine" else show_resume)(found, Console())
    return 0


def run_replay(args) -> int:
    if not 0 < args.kv_gb <= MOST_GB:
        raise ValueError(f"--kv-gb must be a positive number of GiB, at most {MOST_GB:,}, not {args.kv_gb}")
    with Console(stderr=True).status("reading the trace") as status:
        calls = (named(args.trace) or read(args.trace))[: args.first]
        if args.write:
            write(calls, args.write)
        disk = None if args.memory_only else DiskConfig.from_flags(args)
        more = {"restart_every": args.restart_every, "progress": status.update}
        found = {"trace": args.trace} | replay(calls, CacheConfig.from_flags(args), args.kv_gb, disk, **more)
    if args.json:
        print(json.dumps(found))
    else:
        show_replay(found, Console())
    return 0


def run_storage(args) -> int:
    with Console(stderr=True).status("compiling") as status:
        try:
            found = storage.measure(Path(args.directory).expanduser(), args.pages, args.rounds, progress=status.update)
        except StorageError as e:
            raise ValueError(str(e)) from e
    if args.json:
        print(json.dumps(found))
    else:
        show_storage(found, Console())
    return 0


def show(found: dict, console: Console) -> None:
    """The measurements as a table and what they are shares of."""
    table = Table(title=f"{found['model']}, {found['rounds']} rounds")
    table.add_column("")
    for name in ("tokens", "tokens/s", "of the machine"):
        table.add_column(name, justify="right")
    for row in found["prefill"]:
        table.add_row("cold prefill", f"{row['tokens']:,}", f"{row['tokens_per_s']:,.1f}", f"{row['of_peak']:.1%} of its peak")
    table.add_section()
    for row in found["decode"]:
        table.add_row("decode at", f"{row['context']:,}", f"{row['tokens_per_s']:,.1f}", f"{row['of_bandwidth']:.1%} of its bandwidth")
    console.print(table)
    purity = found["purity"]
    plain = ", ".join(f"{p['ms']:.2f} ({p['width']})" for p in purity["plain_ms"])
    console.print(f"machine: products {found['peak_gflops']:,.0f} GFLOP/s, memory reads {found['read_gb_s']:.1f} GB/s, the best of all rounds")
    console.print(
        f"row purity costs a factor of [bold]{found['purity_cost']:.3f}[/bold] at a context of {purity['context']:,}: "
        f"{purity['engine_ms']:.2f} ms a token, without it {plain} ms (forward's width)",
        highlight=False,
    )


def show_resume(found: dict, console: Console) -> None:
    """A table a length: tokens that are new and that are read again, cold over warm, and warm over the bare forward."""
    for run in found["runs"]:
        table = Table(title=f"{found['model']}, {run['tokens']:,} tokens, {found['rounds']} rounds")
        for name in ("", "source"):
            table.add_column(name, no_wrap=True)
        for name in ("new", "again", "first token", "ratio", "forward"):
            table.add_column(name, justify="right")
        table.add_row("cold", "cold", f"{run['tokens']:,}", "", f"{run['cold_s']:,.2f} s", "", "")
        for case in run["cases"]:
            over = "" if case["over_forward"] is None else f"{case['over_forward']:.3f}"
            counts = f"{case['new_tokens']}", f"{case['read_again']}"
            table.add_row(case["name"], case["source"], *counts, f"{1e3 * case['warm_s']:,.1f} ms", f"{case['ratio']:,.0f}", over)
        console.print(table)
        console.print(f"a cold prefill with the caches takes {run['caching_cost']:.3f} times as long as without them", highlight=False)
        lookups = max(1e3 * case["lookup_s"] for case in run["cases"] if not case["copied_bytes"])
        copies = [(1e3 * case["lookup_s"], case["copied_bytes"] / 2**20) for case in run["cases"] if case["copied_bytes"]]
        copied = "".join(f", the store's {ms:.1f} ms, in which it copied {mib:.1f} MiB into the pool" for ms, mib in copies)
        console.print(f"lookups took up to {lookups:.2f} ms{copied}", highlight=False)


def show_replay(found: dict, console: Console) -> None:
    """A row a run: tokens reused and read again, and seconds to the first token; below, what gave the reused ones, and what was written."""
    table = Table(title=f"{found['trace']}: {found['requests']:,} requests, {found['prompt_tokens']:,} prompt tokens", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("reused", "share", "again", "mean s", "median s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, run in found["runs"].items():
        seconds = (f"{run['ttft_s'][which]:,.2f}" for which in ("mean", "median"))
        table.add_row(name, f"{run['reused']:,}", f"{100 * run['share']:.2f} %", f"{run['read_again']:,}", *seconds)
    console.print(table)
    for name, run in found["runs"].items():
        given = sorted(run["sources"].items(), key=lambda source: -source[1]["reused"])
        sources = ", ".join(f"{source} {100 * counts['share']:.2f} % in {counts['requests']:,}" for source, counts in given)
        console.print(f"{name}: {sources}", highlight=False)
    for name, of in found["nvme"].items():
        written, read, there = (f"{of[what] / 2**30:,.1f} GiB" for what in ("written_bytes", "read_bytes", "nbytes"))
        console.print(f"{name}: {written} written, {read} read, {there} there at the end; {of['budget']:,} entries given up", highlight=False)
    if found["restarts"]:
        after = {name: run["after_restart"] for name, run in found["runs"].items()}
        shares = ", ".join(f"{name} {100 * of['share']:.2f} %" for name, of in after.items())
        requests = next(iter(after.values()))["requests"]
        console.print(f"reused by the {requests:,} requests that came first after {found['restarts']:,} restarts: {shares}", highlight=False)
    console.print(
        f"pool {found['pool_gb']:g} GiB, all budgets and the pool {found['total_gb']:g} GiB; seconds are modelled, without waiting",
        highlight=False,
    )


def show_storage(found: dict, console: Console) -> None:
    """A row each for the chain and for an anchor, and for each whole restore, with the lowest and highest ratio; below, what the sums cost."""
    mib = [found[name] / 2**20 for name in ("page_bytes", "anchor_bytes")]
    kind = f" ({found['file_system']})" if found["file_system"] else ""
    title = f"{found['directory']}{kind}, pages of {mib[0]:.0f} MiB, an anchor of {mib[1]:.0f} MiB, {found['rounds']} rounds"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("raw", "qjax", "ratio", "range", "CPU s/GB"):
        table.add_column(name, justify="right", no_wrap=True)
    pages = f"{found['pages']} pages"
    rows = {
        f"write {pages}": found["write"],
        f"restore {pages}": found["read"],
        "write an anchor": found["anchor"]["write"],
        "read it": found["anchor"]["read"],
    }
    for name, row in rows.items():
        rates = (f"{row[who]['gb_s']:.2f} GB/s" for who in ("raw", "ours"))
        table.add_row(name, *rates, *_spread(row), f"{row['ours']['cpu_s_per_gb']:.2f}")
    table.add_section()
    for row in found["restores"]:
        seconds = (f"{row[name]:.2f} s" for name in ("raw_seconds", "seconds"))
        table.add_row(f"restore {row['tokens']:,} tokens", *seconds, *_spread(row), f"{row['ours']['cpu_s_per_gb']:.2f}")
    console.print(table)
    console.print(f"sums are checked in {found['verify_share']:.1%} of a restore's time; raw is O_DIRECT, which looks at nothing", highlight=False)


def _spread(row: dict) -> tuple[str, ...]:
    return f"{row['ratio']:.2f}", f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}"
