"""What lies in a disk cache, as facts: opened without a model, by the fields that lie beside the entries."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from qjax.caches.nvme.admission import BOOK, Admission
from qjax.caches.nvme.catalog import Incomplete
from qjax.caches.nvme.filed import ANCHOR, DISK, IDS, PAGE, SESSION, SPILL, FiledAnchor, FiledSession
from qjax.caches.nvme.index import Index
from qjax.caches.nvme.place import GOLDEN, bucket_options
from qjax.config import DiskConfig, EngineConfig
from qjax.serving.archive import NAME
from storage import Entry, Storage, fingerprints
from storage.entry import META
from storage.fingerprint import FIELDS, Fingerprint
from storage.fingerprint import digest as digest_of

HEAD, CONVERSATION, PART = "head", "conversation", "part"
LOGGERS = "storage.storage", "storage.directory", "qjax.caches.nvme.catalog"


@dataclass(frozen=True)
class Row:
    """A line of the list. tokens: whose state it is. nbytes: what would go with it. hits: prompts that it served. used: Unix seconds.

    value: tokens a second and byte, as of Index.value. of: key of a part's conversation.
    """

    key: str
    what: str
    tokens: int
    nbytes: int
    hits: int
    used: float
    value: float
    of: str | None = None


class Contents(contextlib.AbstractContextManager):
    """All under one fingerprint. entries: pages, anchors and sessions as found, before anything was removed. useless: keys of those that no
    engine uses. fields: none where the file that has them is damaged.
    """

    def __init__(self, config: DiskConfig, fingerprint: Fingerprint, read_only: bool = True):
        """Raises StorageError, which is Locked where this is to remove something and an engine has the directory."""
        self.digest, self.fields, self.fingerprint = fingerprint.digest, fingerprint.fields, fingerprint
        self._config = config
        self.storage = Storage.open(config.disk_cache, fingerprint, read_only, bucket_options(config))
        try:
            found = self.storage.entries()
            self.grid = int(self.fields["grid"]) if self.fields else grid_of(found.values())
            admission = Admission(self.grid, 1, 0)
            self.index = Index(self.storage, self.grid, admission.counted)
            self.all = found | self.storage.entries()  # an engine may write meanwhile
            self.entries = {key: entry for key, entry in self.all.items() if key.startswith((PAGE, ANCHOR, SESSION))}
            for key, hits in admission.load(self.storage).items():
                if filed := self.index.anchors.get(key):
                    filed.hits = hits
        except BaseException:
            self.storage.close()
            raise
        self.useless = [key for key in self.entries if not self.index.has(key)]

    def __exit__(self, *_) -> None:
        self.storage.close()

    @property
    def used(self) -> float:
        """Unix seconds of the last use of any entry."""
        return max((entry.used for entry in self.all.values()), default=0.0)

    def stay(self, keys: Iterable[str]) -> list[str]:
        """Those of some keys, opened read-only, under which something still lies: an engine may remove entries meanwhile."""
        with Storage.open(self._config.disk_cache, self.fingerprint, True, bucket_options(self._config)) as again:
            return [key for key in keys if key in again.entries() or key in again.damaged]

    def faults(self) -> dict[str, str]:
        """What is wrong beside entries that are damaged themselves, key or file -> what; twice found, where an engine may be writing."""
        if (found := self._faults()) and self.storage.read_only:
            with Contents(self._config, self.fingerprint) as again:
                found = {key: what for key, what in found.items() if key in again._faults()}
        return found

    def _faults(self) -> dict[str, str]:
        found = {} if self.fields else {FIELDS: "it is not what names its directory; the next engine writes it anew"}
        if self.entries and GOLDEN not in self.all and GOLDEN not in self.storage.damaged:
            found[GOLDEN] = "missing: no engine can tell whether its bits are still those of the entries; the next one removes all of them"
        told = set(self.storage.damaged)  # and what stands on it is not told again
        for key, error in self.index.unusable.items():
            if isinstance(error, Incomplete) and not told.isdisjoint(error.missing):
                told.add(key)
            else:
                found[key] = str(error)
        return found | dict.fromkeys(self.storage.unfinished, "unfinished: it has no meta; the next engine removes it")

    def over(self) -> dict[str, list[FiledAnchor]]:
        """The anchors over each page, by its key."""
        found: dict[str, list[FiledAnchor]] = {}
        for filed in self.index.anchors.values():
            for page in filed.pages:
                found.setdefault(page, []).append(filed)
        return found

    def rows(self, now: float) -> list[Row]:
        """What was used last first; the parts of a conversation follow it."""
        groups, parts = [], set()
        for session in sorted(self.index.sessions.values(), key=lambda s: -s.used):
            own = self.index.own(session)[::-1]
            groups.append([self._whole(session, now), *(self.row(a, now, session.key) for a in own)])
            parts |= {a.key for a in own}
        groups += [[self.row(a, now)] for a in self.index.anchors.values() if a.key not in parts]
        return [row for group in sorted(groups, key=lambda g: -g[0].used) for row in group]

    def _whole(self, session: FiledSession, now: float) -> Row:
        hits = sum(self.index.anchors[key].hits for key in session.anchors if key in self.index.anchors)
        holds, value = self.index.worth(session)[1], self.index.value(session, now)
        return Row(session.key, CONVERSATION, session.length, holds, hits, session.used, value)

    def row(self, filed: FiledAnchor, now: float, of: str | None = None) -> Row:
        what = HEAD if filed.use == DISK else PART
        return Row(filed.key, what, filed.length, self.index.worth(filed)[1], filed.hits, filed.used, self.index.value(filed, now), of)

    def facts(self, now: float) -> dict:
        """All of it, for JSON."""
        times = [entry.used for key, entry in self.entries.items() if self.index.has(key) and not key.startswith(PAGE)]
        return {
            "digest": self.digest,
            "fields": self.fields,
            "entries": len(self.entries),
            "unfinished": self.storage.unfinished,
            "nbytes": sum(entry.nbytes for entry in self.entries.values()),
            "useless": {"entries": len(self.useless), "nbytes": sum(self.entries[key].nbytes for key in self.useless)},
            "damaged": self.storage.damaged,
            "used": {"oldest": min(times, default=None), "newest": max(times, default=None)},
            **{f"{use}_nbytes": self.index.bytes(use) for use in (DISK, SPILL)},
            "rows": [asdict(row) for row in self.rows(now)],
        }

    def named(self, beginning: str) -> list[str]:
        """Keys that begin so; the key alone where it is one."""
        return [beginning] if beginning in self.all else sorted(key for key in self.all if key.startswith(beginning))

    def explained(self, key: str, now: float) -> dict:
        """What an entry is, for whom it is kept, and what stands on it."""
        entry = self.all[key]
        facts = {"key": key, "nbytes": entry.nbytes, "written": entry.written, "used": entry.used}
        if filed := self.index.anchors.get(key):
            return facts | self._anchor(filed, entry, now)
        if session := self.index.sessions.get(key):
            return facts | self._session(session, now)
        if key in (over := self.over()):
            return facts | self._page(key, entry, over[key])
        if key.startswith(BOOK):
            return facts | {"what": "book", "lines": entry.leaves["lines"].shape[0], "hits": len(entry.fields.get("hits", ()))}
        return facts | {"what": "golden" if key == GOLDEN else "useless"}

    def _anchor(self, filed: FiledAnchor, entry: Entry, now: float) -> dict:
        pages = self._pages(filed.pages, filed.length, {filed.key})
        return {
            "what": HEAD if filed.use == DISK else PART,
            "tokens": filed.length,
            "hits": filed.hits,
            "tainted": filed.tainted,
            "logits": filed.logits,
            "read_nbytes": entry.nbytes + sum(page["nbytes"] for page in pages),
            **self._kept(filed, now),
            "conversations": [s.key for s in self.index.sessions.values() if filed.key in s.anchors],
            "pages": pages,
        }

    def _session(self, session: FiledSession, now: float) -> dict:
        whole = self._whole(session, now)
        return {
            "what": CONVERSATION,
            "tokens": session.length,
            "history": session.history,
            "turns": session.turns,
            "resident": session.resident,
            "hits": whole.hits,
            **self._kept(session, now),
            "anchors": [asdict(self.row(a, now)) for key in session.anchors if (a := self.index.anchors.get(key))],
            "pages": self._pages(session.pages, session.length, {session.key, *(a.key for a in self.index.own(session))}),
        }

    def _kept(self, one: FiledAnchor | FiledSession, now: float) -> dict:
        """Its value, of what it is made, and how many of all that can go by themselves are worth less."""
        value, (saves, holds) = self.index.value(one, now), self.index.worth(one)
        values = [self.index.value(other, now) for other in self.index.candidates()]
        facts = {"value": value, "returns": self.index.returns(one, now), "saves": saves, "holds": holds}
        return facts | {"before": sum(other < value for other in values), "of": len(values)}

    def _page(self, key: str, entry: Entry, over: list[FiledAnchor]) -> dict:
        number = over[0].pages.index(key)
        return {
            "what": "page",
            "tokens": entry.fields.get("rows", self.grid),
            "first": number * self.grid,
            "arrays": [name for name in entry.leaves if name not in (IDS, "tokens")],
            "over": self._sharers(over, set()),
        }

    def _pages(self, pages: tuple[str, ...], length: int, itself: set[str]) -> list[dict]:
        """Of the pages below something: which of its tokens, bytes, and what else stands on each."""
        over = self.over()
        return [
            {
                "key": key,
                "first": (first := number * self.grid),
                "tokens": min(self.grid, length - first),
                "nbytes": self.entries[key].nbytes if key in self.entries else 0,
                "shared": self._sharers(over.get(key, []), itself),
            }
            for number, key in enumerate(pages)
        ]

    def _sharers(self, anchors: list[FiledAnchor], itself: set[str]) -> dict[str, list[str]]:
        """Keys of heads, parts, and of the conversations that have any of them; not of what is looked at itself."""
        keys = {a.key for a in anchors if a.key not in itself}
        return {
            "heads": [a.key for a in anchors if a.use == DISK and a.key in keys],
            "parts": [a.key for a in anchors if a.use == SPILL and a.key in keys],
            "conversations": [s.key for s in self.index.sessions.values() if s.key not in itself and not keys.isdisjoint(s.anchors)],
        }


@dataclass(frozen=True)
class Other:
    """The directory of a fingerprint that every engine of another one removes. nbytes: of its files. differs: fields, (theirs, ours)."""

    digest: str
    entries: int
    nbytes: int
    differs: dict[str, tuple[str | None, str | None]]


class Cache(contextlib.AbstractContextManager):
    """A place, opened read-only. contents: what engines can use, of a directory one fingerprint's, the one used last. others: the rest."""

    def __init__(self, config: DiskConfig):
        """ValueError where it is no disk cache, OSError or StorageError where it cannot be read."""
        self.config, self.bucket = config, "://" in config.disk_cache
        found = fingerprints(config.disk_cache, bucket_options(config)) if self.bucket else directory(Path(config.disk_cache))
        with contextlib.ExitStack() as opened:
            known = [of for digest, text in found.items() if (of := fingerprint_of(digest, text))]
            contents = sorted((opened.enter_context(Contents(config, of)) for of in known), key=lambda c: -c.used)
            self.contents = contents if self.bucket else contents[:1]
            theirs = [digest for digest in found if digest not in {c.digest for c in self.contents}]
            self.others = [] if self.bucket else [self._other(digest, found[digest]) for digest in theirs]
            self._opened = opened.pop_all()

    def _other(self, digest: str, text: bytes) -> Other:
        differs = self.contents[0].fingerprint.differences(text) if self.contents else {}
        files = [path for path in (Path(self.config.disk_cache) / digest).rglob("*") if path.is_file()]
        return Other(digest, sum(path.name == META for path in files), sum(path.lstat().st_size for path in files), differs)

    @property
    def answers(self) -> int | None:
        """Bytes of the answers that a server has left on record here; None where there are none."""
        path = Path(self.config.disk_cache) / NAME
        return path.stat().st_size if not self.bucket and path.is_file() else None

    def __exit__(self, *_) -> None:
        self._opened.close()


def directory(root: Path) -> dict[str, bytes]:
    """The fingerprints of a directory. ValueError where it is none of a disk cache; one that holds nothing yet may become one."""
    wanted = "expected the directory of a disk cache"
    if not root.exists():
        raise ValueError(f"{root}: {wanted}, found nothing; an engine that is started with it (--disk-cache) makes it")
    if not root.is_dir():
        raise ValueError(f"{root}: {wanted}, found a file")
    if (root / FIELDS).exists():
        raise ValueError(f"{root}: {wanted}, found a part of one: take {root.absolute().parent}")
    found = fingerprints(root)
    strangers = sorted(path.name for path in root.iterdir() if path.name != "lock" and path.name not in found)
    if strangers and not found:
        more = f" and {len(strangers) - 1:,} more" if len(strangers) > 1 else ""
        raise ValueError(f"{root}: {wanted}, which has directories of 32 hex digits, found {strangers[0]!r}{more}")
    return found


def fingerprint_of(digest: str, text: bytes) -> Fingerprint | None:
    """That by which what lies under a digest can be opened, with no fields where their text is damaged; None for another version's."""
    if digest_of(text) != digest:
        return Fingerprint.named(digest)
    try:
        fields = dict(json.loads(text))
        fields.pop("storage", None)
        found = Fingerprint(fields)
        return found if found.digest == digest and int(fields["grid"]) > 0 else None
    except (KeyError, TypeError, ValueError):
        return None


def grid_of(entries: Iterable[Entry]) -> int:
    """The grid by the key ids of a page, where no field says it."""
    return next((entry.leaves[IDS].shape[0] for entry in entries if entry.key.startswith(PAGE) and IDS in entry.leaves), EngineConfig.grid)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, storage and index do not log what this tells of the same entries."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was
