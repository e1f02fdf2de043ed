"""`qjax ledger FILE`: what each request reused, what it read again, and why."""

import argparse
import json
import sys
from collections import deque
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qjax.commands.console import say
from qjax.ledger import Record, Totals, Why, read

LEFT = ("source", "why", "difference")  # columns of words; the others are numbers
BEFORE, AFTER = 8, 28  # characters of a text that are shown before the first that differs, and in all


def run(args: argparse.Namespace) -> int:
    """A table and a line of totals, or one JSON object; how many lines of the file were skipped goes to standard error."""
    records, totals, skipped = deque(maxlen=args.last), Totals(), []
    for record in read(args.file, lambda line, reason: skipped.append(f"line {line}: {reason}")):
        totals.add(record)
        record.number = totals.requests  # several processes, each of which began with 1, may have written to the file
        records.append(record)
    if skipped:
        lines = "1 damaged line was" if len(skipped) == 1 else f"{len(skipped):,} damaged lines were"
        print(f"qjax: {args.file}: {lines} skipped: {skipped[0]}", file=sys.stderr)
    if args.json:
        depths = {str(depth): n for depth, n in sorted(totals.resume_depths.items())}
        print(json.dumps({"records": [r.to_json() for r in records], "totals": totals.to_json() | {"resume_depths": depths}}))
    else:
        show(Console(highlight=False), list(records), totals)
    return 0


def show(console: Console, records: list[Record], totals: Totals) -> None:
    """One row a request. On a terminal too narrow for that the differences follow below the table, and on a very narrow one there is no table."""
    rows = [row(record) for record in records]
    names = ["number", "time", "source", "prompt", "reused", "again", "why", "ttft", "decode"]
    if any(shown["difference"] for shown in rows):
        names.append("difference")
    days = {shown["day"] for shown in rows}
    titles = {"number": "#", "time": min(days) if len(days) == 1 else "time", "ttft": "ttft s", "decode": "decode s"}
    for shown in rows:
        shown["time"] = shown["clock"] if len(days) == 1 else f"{shown['day']} {shown['clock']}"

    def table(names: list[str]) -> Table:
        made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in names:
            made.add_column(titles.get(name, name), justify="left" if name in LEFT else "right", overflow="fold")
        for shown in rows:
            made.add_row(*(Text(shown[name]) for name in names))
        return made

    def fits(made: Table) -> bool:
        wanted = console.measure(made, options=console.options.update(max_width=10_000)).maximum
        if not console.is_terminal:
            console.width = max(console.width, wanted)  # a file or another program takes a request a line
        return wanted <= console.width

    short = [name for name in names if name != "difference"]
    if rows and fits(whole := table(names)):
        console.print(whole)
    elif rows and fits(whole := table(short)):
        console.print(whole)
        for shown in rows:
            if shown["difference"]:
                say(console, f"#{shown['number']} {shown['difference']}")
    else:
        for shown in rows:
            say(console, ", ".join(f"{titles.get(name, name)} {shown[name]}" for name in names if shown[name]))
    if rows:
        say(console, "")
    say(console, line(totals))


def row(record: Record) -> dict[str, str]:
    """What the table shows of a request, by column; its day and clock make the time. Nothing in it can move a terminal's cursor."""
    when = datetime.fromtimestamp(record.at)
    return {
        "number": str(record.number),
        "day": f"{when:%Y-%m-%d}",
        "clock": f"{when:%H:%M:%S}",
        "source": safe(record.source) + ("" if record.exact else " (gate)"),
        "prompt": f"{record.prompt_tokens:,}",
        "reused": f"{record.start:,}",
        "again": f"{record.read_again:,}",
        "why": record.why.value,
        "ttft": f"{record.first_token_seconds:,.2f}",
        "decode": f"{record.decode_seconds:,.2f}",
        "difference": "; ".join([*difference(record), *map(safe, filter(None, [record.parted, *record.failed]))]),
    }


def difference(record: Record) -> list[str]:
    """Where the prompt and the nearest kept sequence part, with both texts; nothing where they do not."""
    if record.differs_at is None:
        return []
    kept, found = record.kept_text or "", record.found_text or ""
    shorter = min(len(kept), len(found))
    same = next((i for i in range(shorter) if kept[i] != found[i]), shorter)
    cut = max(0, same - BEFORE)
    return [f"at {record.differs_at:,}: kept {_quoted(kept, cut)}, found {_quoted(found, cut)}"]


def _quoted(text: str, cut: int) -> str:
    if not text:
        return "nothing"
    return f'{"…" if cut else ""}"{safe(text[cut : cut + AFTER])}"{"…" if len(text) > cut + AFTER else ""}'


def safe(text: str) -> str:
    """A text in which a newline, an escape code or half a character is spelled out, as in Python's own literals."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def line(totals: Totals) -> str:
    """The totals in a line."""

    def counts(of: dict[str, int]) -> str:
        return ", ".join(f"{safe(name)} {n:,}" for name, n in sorted(of.items(), key=lambda item: -item[1]) if n)

    text = f"{totals.requests:,} request{'s' if totals.requests != 1 else ''}, {totals.prompt_tokens:,} prompt tokens"
    if not totals.requests:
        return text
    share = f" ({100 * totals.reused / totals.prompt_tokens:.1f} %)" if totals.prompt_tokens else ""
    again = counts({why: n for why, n in totals.by_why.items() if why != Why.NONE})
    text += f": {totals.reused:,} reused{share}, {totals.read_again:,} read again; from {counts(totals.by_source)}"
    return text + (f"; misses: {again}" if again else "")
