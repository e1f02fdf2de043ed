"""`qjax bench restart`: what the files of a conversation save after a restart, and what writing them costs."""

import json

from rich.console import Console
from rich.table import Table

from qjax.bench.restart import measure, restarted
from qjax.config import CacheConfig, EngineConfig
from qjax.private import private_directory


def run(args) -> int:
    config, caches = EngineConfig.from_flags(args), CacheConfig.from_flags(args)
    if args.restarted:
        print(json.dumps(restarted(args.model, config, caches, args.restarted)))
        return 0
    with Console(stderr=True).status("loading and compiling") as status, private_directory("restart") as directory:
        try:
            found = measure(args.model, config, caches, directory, args.tokens, args.rounds, progress=status.update)
        except RuntimeError as e:  # a request that was not served from where it should be, which budgets and flags can bring about
            raise ValueError(str(e)) from e
    if args.json:
        print(json.dumps(found))
    else:
        show(found, Console(highlight=False))
    return 0


def show(found: dict, console: Console) -> None:
    after = found["restart"]
    table = Table(title=f"{found['model']}, {found['tokens']:,} tokens, {found['rounds']} rounds")
    for name in ("", "source", "new", "again", "first token", "ratio"):
        table.add_column(name, justify="left" if name in ("", "source") else "right")
    table.add_row("cold", "cold", f"{found['tokens']:,}", "", f"{found['cold_s']:,.2f} s", "")
    counts = f"{after['new_tokens']}", f"{after['read_again']}"
    table.add_row("first turn after the restart", after["source"], *counts, f"{1e3 * after['warm_s']:,.1f} ms", f"{after['ratio']:,.0f}")
    console.print(table)
    stop = (
        f"{found['written_bytes'] / 2**20:,.0f} MiB written, {found['drain_s']:.2f} s after the answer for the head, {found['stop_s']:.2f} s to stop"
    )
    console.print(f"{stop}; {after['start_s']:.2f} s to open the files and read the conversation back")
    console.print(f"a cold first token with the tier takes {found['disk_cost']:.3f} times as long, a whole request {found['answer_cost']:.3f} times")
