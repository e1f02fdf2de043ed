"""`qjax cache [DIR]`: what lies on NVMe; whether it is whole; what may go; what one entry is. No model is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

from qjax.caches.nvme.filed import ANCHOR, DISK, PAGE, SESSION, SPILL
from qjax.commands.cache_contents import Cache, Contents, quiet
from qjax.commands.cache_shown import ROWS, count, short, show, size, table, told
from qjax.commands.console import say
from qjax.config import DiskConfig
from qjax.serving.archive import NAME
from storage import Locked, StorageError, fingerprints

CRITERIA = {"disk_days": "unused", "disk_gb": "over the heads' budget", "spill_gb": "over the conversations' budget"}
"""Flags of --prune, as an engine has them, and what is said of the entries that go by each."""


def run(args) -> int:
    """0, or 1 where something is damaged. ValueError where the flags do not go together, or the place cannot be read or is in use."""
    given = {f.name: value for f in dataclasses.fields(DiskConfig) if (value := getattr(args, f.name, None)) is not None}
    criteria = [name for name in CRITERIA if name in given]
    if not args.prune and (criteria or args.dry_run):
        raise ValueError(f"--{criteria[0].replace('_', '-') if criteria else 'dry-run'} is given with --prune")
    if args.explain is not None and (args.verify or args.prune):
        raise ValueError("--explain is given without --verify and --prune")
    config, console = DiskConfig(**given), Console(highlight=False)
    places = of_models(config.disk_cache)
    if len(places) > 1 and (args.json or args.prune or args.explain is not None):
        flag = next(f"--{name}" for name in ("json", "prune", "explain") if getattr(args, name) not in (False, None))
        raise ValueError(f"{flag}: {config.disk_cache} holds the caches of {len(places)} models: expected one of {', '.join(places)}")
    status = 0
    for number, place in enumerate(places):
        if number:
            say(console, "")
        status = max(status, run_one(console, dataclasses.replace(config, disk_cache=place), args, criteria))
    return status


def of_models(place: str) -> list[str]:
    """The directories below a place in which models have theirs, or else the place itself."""
    if "://" in place:
        return [place]
    with contextlib.suppress(OSError, StorageError):
        if not fingerprints(place):
            below = [str(path) for path in sorted(Path(place).iterdir()) if path.is_dir() and fingerprints(path)]
            return below or [place]
    return [place]


def run_one(console: Console, config: DiskConfig, args, criteria: list[str]) -> int:
    try:
        with quiet(), Cache(config) as cache:
            if args.explain is not None:
                return explain(console, cache, args)
            if not args.prune:
                return verify(console, cache, args) if args.verify else listing(console, cache, args)
            if cache.bucket:
                raise ValueError(f"{config.disk_cache}: engines share a bucket, whose own rules let entries go: nothing is removed here")
            return prune(console, cache, args, criteria)
    except StorageError as error:
        raise ValueError(str(error)) from error


def listing(console: Console, cache: Cache, args) -> int:
    now = time.time()
    if args.json:
        print(json.dumps(as_json(cache, now)))
    else:
        show(console, cache, now, None if args.all else ROWS)
    return 0


def as_json(cache: Cache, now: float) -> dict:
    free = cache.contents[0].storage.free() if cache.contents else None
    shown = [contents.facts(now) for contents in cache.contents]
    others = [asdict(other) for other in cache.others]
    return {"directory": cache.config.disk_cache, "free": free, "fingerprints": shown, "others": others, "answers_nbytes": cache.answers}


def explain(console: Console, cache: Cache, args) -> int:
    found = [(contents, key) for contents in cache.contents for key in contents.named(args.explain)]
    if len(found) != 1:
        named = f"{len(found):,}: {', '.join(key for _, key in found[:5])}{' ...' if len(found) > 5 else ''}" if found else "none"
        raise ValueError(f"--explain: expected the beginning of one entry's key, found {args.explain!r}, which begins {named}")
    (contents, key), now = found[0], time.time()
    facts = contents.explained(key, now)
    if args.json:
        print(json.dumps(facts))
        return 0
    for line in told(facts, short(contents), now, None if args.all else ROWS):
        say(console, line)
    return 0


class Checking:
    """Shows how much of some bytes was read: a bar on a terminal, else a line at each quarter. `close` it whatever happened."""

    def __init__(self, console: Console, total: int):
        self._console, self._total, self.done, self._begin = console, total, 0, time.perf_counter()
        columns = "reading", BarColumn(40), "{task.fields[text]}", TimeElapsedColumn()
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, text="")
        self._bar.start()

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self._begin, 1e-9)

    def __call__(self, nbytes: int) -> None:
        quarter = 4 * self.done // max(self._total, 1)
        self.done += nbytes
        text = f"{size(self.done)} of {size(self._total)}, {size(self.done / self.seconds)}/s"
        self._bar.update(self._task, completed=self.done, text=text)
        if not self._console.is_terminal and 4 * self.done // max(self._total, 1) > quarter:
            say(self._console, f"  read {text}")

    def close(self) -> None:
        self._bar.stop()


def check(contents: Contents, progress: Callable[[int], None]) -> dict[str, str]:
    """Reads every entry: key -> what is wrong, of those that are damaged. One that an engine removes meanwhile is not."""
    storage, bad = contents.storage, dict(contents.storage.damaged)
    for key, entry in storage.entries().items():
        if not storage.get([(key, entry.empty())]):
            bad[key] = storage.damaged.get(key, "it was removed")
        progress(entry.nbytes)
    return {key: bad[key] for key in contents.stay(bad)} if bad and storage.read_only else bad


def checked(cache: list[Contents]) -> tuple[dict[Contents, dict[str, str]], dict]:
    """What is damaged in each, and what was read."""
    total = sum(sum(entry.nbytes for entry in contents.storage.entries().values()) for contents in cache)
    shown = Checking(Console(stderr=True, highlight=False), total)
    with contextlib.closing(shown):
        bad = {contents: check(contents, shown) for contents in cache}
    return bad, {"entries": sum(len(contents.entries) for contents in cache), "nbytes": shown.done, "seconds": shown.seconds}


def verify(console: Console, cache: Cache, args) -> int:
    bad, read = checked(cache.contents)
    bad = {contents: contents.faults() | some for contents, some in bad.items()}
    damaged = {key: reason for some in bad.values() for key, reason in some.items()}
    if args.json:
        print(json.dumps(as_json(cache, time.time()) | {"verified": read | {"damaged": damaged}}))
        return bool(damaged)
    for contents, some in bad.items():
        say_damaged(console, contents, some)
    text = f"{count(read['entries'], 'entry')}, {size(read['nbytes'])}, read at {size(read['nbytes'] / read['seconds'])}/s: "
    say(console, text + (f"{len(damaged):,} damaged (qjax cache --verify --prune removes them)" if damaged else "nothing is damaged"))
    return bool(damaged)


def say_damaged(console: Console, contents: Contents, bad: dict[str, str]) -> None:
    over = contents.over()
    for key, reason in bad.items():
        stand = f" ({count(len(over[key]), 'head or part')} on it)" if key in over else ""
        say(console, f"damaged: {key}{stand}: {reason}", "red")


def prune(console: Console, cache: Cache, args, criteria: list[str]) -> int:
    """Removes what no engine can use, and what the criteria name. With --dry-run the index alone forgets it."""
    if not cache.contents:
        if cache.others:
            raise ValueError(f"{cache.config.disk_cache}: what lies there cannot be opened here; the next engine removes it")
        return listing(console, cache, args)
    now, status, faults = time.time(), 0, cache.contents[0].faults() if args.verify else {}
    try:
        contents = cache.contents[0] if args.dry_run else Contents(cache.config, cache.contents[0].fingerprint, read_only=False)
    except Locked as locked:
        raise ValueError(f"nothing was removed: {locked}") from locked
    with contents:
        rows, bad = contents.rows(now), {}
        if args.verify:
            bad = checked([contents])[0][contents]
            status = int(bool(bad or faults))
            if not args.json:
                say_damaged(console, contents, faults | bad)
        gone = removed(contents, cache.config, criteria, bad)
    nbytes = {key: contents.entries[key].nbytes if key in contents.entries else 0 for key in gone}
    with Cache(cache.config) as after:
        left, answers = after.contents[0].entries if after.contents else {}, None
        if not any(key.startswith((ANCHOR, SESSION)) for key in (left.keys() - gone if args.dry_run else left)):  # nothing that they belong to
            answers = after.answers
            if answers is not None and not args.dry_run:
                (Path(cache.config.disk_cache) / NAME).unlink()
        stuck = [] if args.dry_run else [key for key in gone if key in left]
        facts = {
            "dry_run": args.dry_run,
            "removed": gone,
            "nbytes": sum(nbytes.values()),
            "unfinished": contents.storage.stats()["unfinished"],
            "others": [asdict(other) for other in cache.others],
            "damaged": faults | bad,
            "not_removed": stuck,
            "answers_nbytes": answers,
        }
        if args.json:
            print(json.dumps(as_json(after, now) | {"pruned": facts}))
        else:
            if shown := [row for row in rows if row.key in gone]:
                table(console, shown, short(contents), now, None if args.all else ROWS)
            for line in summary_of(facts, nbytes):
                say(console, line)
            if not args.dry_run:
                say(console, f"left: {count(len(left), 'entry')}, {size(sum(entry.nbytes for entry in left.values()))}")
    return 1 if stuck else status


def removed(contents: Contents, config: DiskConfig, criteria: list[str], bad: dict[str, str]) -> dict[str, str]:
    """Drops entries: key -> why, of each that goes."""
    index, storage = contents.index, contents.storage
    # what could not be reached, and may be whole, stays
    damaged = [key for key in bad if storage.read_only or storage.find(key) is None]
    gone = dict.fromkeys(contents.useless, "of no use") | dict.fromkeys(damaged, "damaged")
    known = {key for key in contents.entries if index.has(key)}

    def note(why: str) -> None:
        gone.update({key: why for key in known if key not in gone and not index.has(key)})

    for key in damaged:
        if key in index.anchors:
            index.drop(index.anchors[key], "damaged")
        elif key.startswith(PAGE):
            index.drop_over(key, "damaged")
    note("on something damaged")
    for name in criteria:
        if name == "disk_days":
            index.drop_unused(config.disk_days)
        else:
            index.evict(DISK if name == "disk_gb" else SPILL, config.bytes(name))
        note(CRITERIA[name])
    return gone


def summary_of(facts: dict, nbytes: dict[str, int]) -> list[str]:
    """What went, or would go, by reason."""
    verb, gone = "would remove" if facts["dry_run"] else "removed", facts["removed"]
    reasons = [(why, [key for key in gone if gone[key] == why]) for why in dict.fromkeys(gone.values())]
    parts = [f"{why} {len(keys):,} ({size(sum(nbytes[key] for key in keys))})" for why, keys in reasons]
    lines = [f"{verb} {count(len(gone), 'entry')}, {size(facts['nbytes'])}{': ' + ', '.join(parts) if parts else ''}"]
    if facts["unfinished"]:
        lines.append(f"{verb} {count(facts['unfinished'], 'entry')} that an engine had not finished")
    lines += [f"{verb} {count(o['entries'], 'entry')}, {size(o['nbytes'])}, of another fingerprint, {o['digest'][:8]}" for o in facts["others"]]
    if facts["answers_nbytes"] is not None:
        lines.append(f"{verb} the answers on record, {size(facts['answers_nbytes'])}")
    if facts["not_removed"]:
        lines.append(f"could not remove {count(len(facts['not_removed']), 'entry')}: {', '.join(facts['not_removed'][:5])}")
    return lines
