"""What `qjax cache` says of the facts: a summary, a table, and one entry in words. Never a token, an id or a text of a prompt."""

from __future__ import annotations

import itertools

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qjax.commands.cache_contents import CONVERSATION, HEAD, PART, Cache, Contents, Other, Row
from qjax.commands.console import say
from storage.fingerprint import FIELDS

ROWS = 20
"""Lines of a list that are shown without --all."""
COLUMNS = "key", "what", "tokens", "bytes", "hits", "age", "value"
NAMED = 3
"""Keys, or differing fields, that a sentence names."""
DAY = 86_400
WITHIN = "within --disk-gb and --spill-gb together"


def size(nbytes: float) -> str:
    unit, name = next(((2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if nbytes >= 2**power), (1, "bytes"))
    return f"{nbytes / unit:,.{1 if unit > 1 else 0}f} {name}"


def span(seconds: float) -> str:
    units = (DAY, "days"), (3600, "h"), (60, "min")
    unit, name = next(((unit, name) for unit, name in units if seconds >= unit), (1, "s"))
    return f"{max(0.0, seconds) / unit:,.{0 if unit == 1 else 1}f} {name}"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def count(n: int, what: str) -> str:
    """1 entry, 2 entries."""
    return f"{n:,} {what if n == 1 else {'entry': 'entries'}.get(what, f'{what}s')}"


def short(contents: Contents) -> int:
    """Characters of a key that tell it from all others, 10 at least."""
    keys = contents.entries
    return next((n for n in range(10, 129) if len({key[:n] for key in keys}) == len(keys)), 128)


def show(console: Console, cache: Cache, now: float, limit: int | None) -> None:
    free = cache.contents[0].storage.free() if cache.contents else None
    say(console, f"{cache.config.disk_cache}{f': {size(free)} free' if free is not None else ''}", "bold")
    for contents in cache.contents:
        say(console, "")
        for line in summary(contents, now):
            say(console, line)
        if rows := contents.rows(now):
            say(console, "")
            table(console, rows, short(contents), now, limit)
    for other in cache.others:
        say(console, "")
        say(console, foreign(other))
    if cache.answers is not None:
        say(console, f"\nanswers on record of `qjax serve`, {size(cache.answers)}: conversations go on with their rows by them")
    if not cache.contents and not cache.others and cache.answers is None:
        say(console, "It holds nothing yet.")


def summary(contents: Contents, now: float) -> list[str]:
    f, facts = contents.fields, contents.facts(now)
    model = f"{f.get('model.model_type', 'a model')}, {f.get('model.layers', '?')} layers of {f.get('model.hidden', '?')}"
    known = (
        f"{model}, weights {f.get('weights', '?')[:8]}, exactness {f.get('exactness', '?')}, "
        f"grid {contents.grid:,}, jax {f.get('jax', '?')} on {f.get('backend', '?')}"
    )
    lines = [f"fingerprint {contents.digest[:8]}: {known if f else f'{FIELDS} is damaged; the next engine writes it anew'}"]
    uses = f"heads {size(facts['disk_nbytes'])}, conversations {size(facts['spill_nbytes'])}"
    lines.append(f"{count(facts['entries'], 'entry')}, {size(facts['nbytes'])}: {uses}")
    if facts["used"]["newest"] is not None:
        lines[-1] += "; last used {newest} ago, longest unused {oldest}".format(**{name: span(now - at) for name, at in facts["used"].items()})
    if contents.useless:
        lines.append(f"{count(len(contents.useless), 'entry')}, {size(facts['useless']['nbytes'])}, are of no use: the next engine removes them")
    if facts["damaged"]:
        lines.append(f"{count(len(facts['damaged']), 'entry')} cannot be read (qjax cache --verify says which)")
    if facts["unfinished"]:
        lines.append(f"{count(len(facts['unfinished']), 'entry')} an engine had not finished: the next one removes what is there of it")
    return lines


def foreign(other: Other) -> str:
    parts = [f"{name} was {theirs or 'none'}, is {ours or 'none'}" for name, (theirs, ours) in other.differs.items()]
    more = f", and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    why = f" ({'; '.join(parts[:NAMED])}{more})" if parts else ""
    return (
        f"fingerprint {other.digest[:8]}: {count(other.entries, 'entry')}, {size(other.nbytes)}, of another engine{why}: the next engine removes it"
    )


def table(console: Console, rows: list[Row], letters: int, now: float, limit: int | None) -> None:
    """A line an entry; on a terminal too narrow for that its words follow each other."""
    made, shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim"), []
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in ("key", "what") else "right", overflow="fold")
    for row in rows[:limit]:
        value, what = number(row.value * DAY * 2**20), f"  {row.what}" if row.of else row.what
        shown.append((row.key[:letters], what, f"{row.tokens:,}", size(row.nbytes), f"{row.hits:,}", span(now - row.used), value))
        made.add_row(*map(Text, shown[-1]))
    wanted = console.measure(made, options=console.options.update(max_width=10_000)).maximum
    if not console.is_terminal:
        console.width = max(console.width, wanted)
    if wanted <= console.width:
        console.print(made)
    else:
        for cells in shown:
            say(console, ", ".join(f"{name} {cell.strip()}" for name, cell in zip(COLUMNS, cells, strict=True) if cell))
    if len(shown) < len(rows):
        say(console, f"... and {len(rows) - len(shown):,} more: --all shows them")


def told(facts: dict, letters: int, now: float, limit: int | None) -> list[str]:
    """An entry in words. facts: as of Contents.explained."""
    what = {HEAD: _anchor, PART: _anchor, CONVERSATION: _conversation, "page": _page, "book": _book, "golden": _golden, "useless": _useless}
    times = f"Written {span(now - facts['written'])} ago, last used {span(now - facts['used'])} ago."
    first, *rest = what[facts["what"]](facts, letters, now, limit)
    return [f"{facts['key']} is {first}", times, *rest]


def _anchor(facts: dict, letters: int, now: float, limit: int | None) -> list[str]:
    head = facts["what"] == HEAD
    kind = "a head that prompts begin with" if head else "a part of a conversation"
    has = ", and the logits of the last" if facts["logits"] else ""
    lines = [f"{kind}: the state after {facts['tokens']:,} tokens{has}.", f"It served {count(facts['hits'], 'prompt')}."]
    if facts["tainted"]:
        lines.append("Steps of an answer wrote some of its rows: it serves what goes on from all of it.")
    lines.append(f"A restore reads {size(facts['read_nbytes'])}, {size(facts['nbytes'])} of its own and {count(len(facts['pages']), 'page')}:")
    lines += _pages(facts["pages"], letters, limit)
    if head:
        kept = f"with {_keys('conversation', facts['conversations'], letters)}, and then " if facts["conversations"] else ""
        lines.append(f"It is kept {kept}{WITHIN}, and for --disk-days after its last use: {_before(facts)}")
    elif facts["conversations"]:
        lines.append(f"It is kept with {_keys('conversation', facts['conversations'], letters)}, and goes with it.")
    else:
        lines.append(f"Its conversation has gone; it is kept {WITHIN}: {_before(facts)}")
    return [*lines, _value(facts)]


def _conversation(facts: dict, letters: int, now: float, limit: int | None) -> list[str]:
    served = count(facts["hits"], "prompt")
    lines = [f"a conversation of {facts['tokens']:,} tokens in {count(facts['turns'], 'turn')}; its parts and heads served {served}."]
    if facts["resident"]:
        lines.append("It was the resident one when it was written: the next start reads the last such one back before its first request.")
    lines.append("Its states:")
    lines += [f"  {row['key'][:letters]}  {row['what']}, {row['tokens']:,} tokens" for row in facts["anchors"][:limit]]
    lines += _cut(len(facts["anchors"]), limit)
    lines.append(f"Its pages, {size(sum(page['nbytes'] for page in facts['pages']))}:")
    lines += _pages(facts["pages"], letters, limit)
    return [*lines, f"It is kept {WITHIN}, and for --disk-days after its last use: {_before(facts)}", _value(facts)]


def _page(facts: dict, letters: int, now: float, limit: int | None) -> list[str]:
    where = f"{facts['first']:,} to {facts['first'] + facts['tokens'] - 1:,}"
    return [
        f"a page of {size(facts['nbytes'])}: the rows of tokens {where}, with their ids, in {count(len(facts['arrays']), 'array')}.",
        f"It is under {_sharers(facts['over'], letters)}, and goes with the last of them.",
    ]


def _book(facts: dict, letters: int, now: float, limit: int | None) -> list[str]:
    counts = f"the counts of {count(facts['lines'], 'line')} that prefills forwarded, and the hits of {count(facts['hits'], 'state')}"
    return [f"{counts}: they decide what is written, and what goes."]


def _golden(facts: dict, letters: int, now: float, limit: int | None) -> list[str]:
    return ["a digest of the bits of a short prompt: an engine that computes others removes everything here."]


def _useless(facts: dict, letters: int, now: float, limit: int | None) -> list[str]:
    return ["of no use: something that it stands on is not there, or nothing stands on it. The next engine removes it."]


def _pages(pages: list[dict], letters: int, limit: int | None) -> list[str]:
    """A line for neighbours that the same things stand on."""
    lines = []
    for shared, group in itertools.groupby(pages, key=lambda page: page["shared"]):
        some = list(group)
        more = f" and {len(some) - 1:,} more" if len(some) > 1 else ""
        tokens = f"tokens {some[0]['first']:,} to {some[-1]['first'] + some[-1]['tokens'] - 1:,}, {size(sum(page['nbytes'] for page in some))}"
        lines.append(f"  {some[0]['key'][:letters]}{more}: {tokens}, {'shared with ' + words if (words := _sharers(shared, letters)) else 'its own'}")
    return [*lines[:limit], *_cut(len(lines), limit)]


def _cut(n: int, limit: int | None) -> list[str]:
    return [f"  ... and {n - limit:,} more: --all shows them"] if limit is not None and n > limit else []


def _sharers(of: dict[str, list[str]], letters: int) -> str:
    """Conversations stand for their parts."""
    named = [_keys(what, of[f"{what}s"], letters) for what in (HEAD, CONVERSATION if of["conversations"] else PART) if of[f"{what}s"]]
    return " and ".join(named)


def _keys(what: str, keys: list[str], letters: int) -> str:
    named = f" ({', '.join(key[:letters] for key in keys)})" if len(keys) <= NAMED else ""
    return f"{count(len(keys), what)}{named}"


def _before(facts: dict) -> str:
    less = "is worth less" if facts["before"] == 1 else "are worth less"
    return f"of {count(facts['of'], 'entry')} that can go by themselves {facts['before']:,} {less} now; what goes changes what others are worth."


def _value(facts: dict) -> str:
    return (
        f"Its value is {number(facts['value'] * DAY * 2**20)} tokens a day for each MiB: {facts['saves']:,} tokens that it saves past the next "
        f"shorter one, over the {size(facts['holds'])} that go with it, {number(facts['returns'] * DAY)} times a day, as far as its last use tells. "
        "An engine learns how soon prompts come back."
    )
