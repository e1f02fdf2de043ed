"""`qjax bench engine`: how fast the engine is on this machine, and how near to what the machine can do."""

import json

from rich.console import Console
from rich.table import Table

from qjax.bench.engine import measure
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.model.source import load


def run(args) -> int:
    config = EngineConfig.from_flags(args)
    with Console(stderr=True).status("loading and compiling") as status:
        engine = Engine(load(args.model), config)
        found = measure(engine, args.tokens, args.rounds, progress=status.update)
    if args.json:
        print(json.dumps(found))
    else:
        show(found, Console())
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
