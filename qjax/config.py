"""The engine's settings, each with its flag: one place."""

import dataclasses
import math
import os
import re
from dataclasses import field
from pathlib import Path
from typing import Self

from qjax import flags
from qjax.flags import Flags, WrongSetting, flag, switch
from qjax.state import GRIDS, Layout, is_grid

MOST_GB = 2**20
"""GiB that a budget may have at the most: above any machine's memory, and its bytes are still a number."""
LARGEST_GRID = 2**20
"""Tokens of a page at the most: above any model's context."""
TOKEN, GRID = "token", "grid"
"""Exactness levels: a resume has a cold run's bits at every token, or on the grid lines of a prefill."""
AUTO = "auto"
SIDE_REQUESTS = (r"You are a title generator\b", r"### Task:\s")
"""How titles, tags and follow-ups begin: opencode's system message, Open WebUI's user message."""


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as e:
        raise WrongSetting("compile_cache", "must be given, a directory or none: this user has no home directory") from e


def _can_be_directory(path: Path) -> bool:
    """Whether the path is a directory that can be read, or one can be made there."""
    there = next((p for p in (path, *path.absolute().parents) if os.path.lexists(p)), None)
    return there is not None and there.is_dir() and os.access(there, os.X_OK | (os.R_OK if there == path else os.W_OK))


@dataclasses.dataclass(frozen=True)
class EngineConfig(Flags):
    """What an engine is started with; ValueError names the field that is out of range."""

    group = "engine"

    grid: int = field(default=1024, metadata=flag(int, f"tokens of a prefill chunk and of a page, {GRIDS} (default 1024)", metavar="N"))
    kv_gb: float = field(
        default=2.0,
        metadata=flag(float, "page pool in GiB, at the most (default 2; less where one longest sequence more than --parallel fits)", metavar="X"),
    )
    context_tokens: int | None = field(default=None, metadata=flag(int, "longest sequence in tokens (default: the model's own limit)", metavar="N"))
    compile_cache: Path | None = field(
        default_factory=lambda: _home() / ".cache" / "qjax" / "compile",
        metadata=flag(
            flags.path_or_none, "directory that keeps compiled programs from run to run, or none (default ~/.cache/qjax/compile)", metavar="DIR"
        ),
    )
    exactness: str = field(
        default=AUTO,
        metadata=flag(
            str,
            "where a resume must have a cold run's bits: at every token, or on the grid lines of a prefill "
            "(default auto: as a probe at the start finds it)",
            choices=(AUTO, TOKEN, GRID),
        ),
    )
    parallel: int = field(default=1, metadata=flag(int, "sequences that run at once, a forward of each in turn (default 1)", metavar="N"))

    def __post_init__(self):
        self._check("grid", GRIDS, isinstance(self.grid, int) and is_grid(self.grid))
        self._check("grid", f"at most {LARGEST_GRID:,}", self.grid <= LARGEST_GRID)
        self._check("kv_gb", f"a positive number of GiB, at most {MOST_GB:,}", 0 < self.kv_gb <= MOST_GB)
        self._check("context_tokens", "a positive number of tokens", self.context_tokens is None or self.context_tokens > 0)
        self._check("exactness", f"{AUTO}, {TOKEN} or {GRID}", self.exactness in (AUTO, TOKEN, GRID))
        self._check("parallel", "a whole number, 1 or more", isinstance(self.parallel, int) and self.parallel >= 1)
        wanted = "a directory that can be read or made, or none"
        self._check("compile_cache", wanted, self.compile_cache is None or _can_be_directory(self.compile_cache))

    def pages(self, layout: Layout, context: int) -> tuple[int, int, int]:
        """Pages of the pool, pages of the longest sequence, and its tokens, for a model with this context.

        ValueError where the context is above the model's, or the pool holds no page.
        """
        limit = context if self.context_tokens is None else self.context_tokens
        if limit > context:
            raise WrongSetting("context_tokens", f"must be at most the model's {context:,}, not {limit:,}")
        affordable = int(self.kv_gb * 2**30) // layout.page_bytes
        if affordable < 1:
            raise WrongSetting("kv_gb", f"must hold a page of {layout.page_bytes:,} bytes ({layout.grid} tokens), not {self.kv_gb} GiB")
        sequence = min(-(-limit // layout.grid), affordable)
        return min((self.parallel + 1) * sequence + 2, affordable), sequence, min(limit, sequence * layout.grid)


@dataclasses.dataclass(frozen=True)
class CacheConfig(Flags):
    """What the caches may keep; ValueError names the field that is out of range. Budgets only move where a prefill starts."""

    group = "caches"

    resident_gb: float = field(
        default=2.5, metadata=flag(float, "anchors of the resident session, of which the newest 4 always stay, in GiB (default 2.5)", metavar="X")
    )
    resident_guest_max: int = field(
        default=8192,
        metadata=flag(int, "longest prompt that leaves the resident session resident, where it is under a quarter of it (default 8192)", metavar="N"),
    )
    resident_stash_gb: float = field(default=1.0, metadata=flag(float, "anchors of guests, in GiB (default 1)", metavar="X"))
    resident_pin_gb: float = field(
        default=4.0, metadata=flag(float, "anchors of pinned heads, which are left of sessions without room, in GiB (default 4)", metavar="X")
    )
    resident_park_gb: float = field(default=4.0, metadata=flag(float, "anchors of parked sessions, in GiB (default 4)", metavar="X"))

    cache_budget_gb: float = field(
        default=2.0, metadata=flag(float, "the state store, snapshots in host memory of what the pool gave up, in GiB (default 2)", metavar="X")
    )
    store_entry_gb: float = field(default=1.0, metadata=flag(float, "largest snapshot of the state store, in GiB (default 1)", metavar="X"))
    prefix_chunk: int | None = field(
        default=None,
        metadata=flag(int, "tokens between the lines at which a head may be kept in the store, 0 for none (default: the grid)", metavar="N"),
    )
    response_gb: float = field(default=0.0, metadata=flag(float, "answers of identical greedy requests, in GiB, 0 for none (default 0)", metavar="X"))
    caches_gb: float | None = field(
        default=None,
        metadata=flag(
            float,
            "all that the caches hold outside the page pool, anchors, snapshots and answers, in GiB (default: half of this machine's memory)",
            metavar="X",
        ),
    )
    end_anchor: bool = field(
        default=True,
        metadata=switch("keep the state where an answer ends, so that the next turn reads only what is new (default yes)"),
    )
    ledger: Path | None = field(
        default=None,
        metadata=flag(flags.file, "file that gets a line for each request, for `qjax ledger`", metavar="FILE"),
    )

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_gb") and value is not None:
                self._check(f.name, f"a number of GiB, 0 to {MOST_GB:,}", 0 <= value <= MOST_GB)
        self._check("resident_guest_max", "a whole number, 0 or more", self.resident_guest_max >= 0)

    def check(self, grid: int) -> None:
        """ValueError where a cache cannot work on this grid, or the ledger has no directory to be in."""
        if self.ledger is not None and not (directory := Path(self.ledger).absolute().parent).is_dir():
            raise ValueError(f"--ledger: expected a file in a directory that is there, found none at {directory}")
        self._check("prefix_chunk", f"a multiple of the grid, {grid}, or 0", (self.prefix_chunk or 0) >= 0 and (self.prefix_chunk or 0) % grid == 0)

    @property
    def together(self) -> int:
        """Bytes of all caches outside the page pool."""
        return self.bytes("caches_gb") if self.caches_gb is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclasses.dataclass(frozen=True)
class DiskConfig(Flags):
    """What is kept on NVMe, from one start of the program to the next; ValueError names the field that is out of range."""

    group = "caches on NVMe"

    disk_cache: str | None = field(
        default_factory=lambda: str(_home() / ".cache" / "qjax" / "states"),
        metadata=flag(
            flags.place,
            "directory of heads that prompts begin with and of conversations, in which each model has one of its own; or a bucket that engines "
            "share, s3://BUCKET/PATH or gs://BUCKET/PATH; or none (default ~/.cache/qjax/states)",
            metavar="DIR",
        ),
    )
    disk_endpoint: str | None = field(default=None, metadata=flag(str, "server of an s3:// bucket that is not Amazon's", metavar="URL"))
    disk_gb: float = field(
        default=50.0, metadata=flag(float, "heads on NVMe, in GiB, 0 for none; conversations may take what they leave (default 50)", metavar="X")
    )
    disk_days: float = field(default=7.0, metadata=flag(float, "days after which what was not used goes (default 7)", metavar="X"))
    disk_free_gb: float = field(
        default=50.0, metadata=flag(float, "free space that is left to others, in GiB: with less nothing is written (default 50)", metavar="X")
    )
    disk_min_tokens: int = field(default=4096, metadata=flag(int, "shortest prompt whose head is written (default 4096)", metavar="N"))
    admit_after: int = field(default=2, metadata=flag(int, "cold prefills of a line after which it is written (default 2)", metavar="N"))
    session_spill: bool = field(
        default=True,
        metadata=switch("write conversations at the end of the program, and long ones that the pool gives up (default yes)"),
    )
    spill_gb: float = field(
        default=40.0, metadata=flag(float, "conversations on NVMe, in GiB, 0 for none; heads may take what they leave (default 40)", metavar="X")
    )
    spill_min_tokens: int = field(
        default=16384, metadata=flag(int, "shortest conversation that is written when the pool gives it up (default 16384)", metavar="N")
    )
    staging_gb: float = field(default=2.0, metadata=flag(float, "memory for what waits to be written, in GiB (default 2)", metavar="X"))

    def __post_init__(self):
        for f in dataclasses.fields(self):
            if f.name.endswith("_gb"):
                self._check(f.name, f"a number of GiB, 0 to {MOST_GB:,}", 0 <= getattr(self, f.name) <= MOST_GB)
        self._check("disk_days", "a number of days, 0 or more", 0 <= self.disk_days < math.inf)
        self._check("disk_min_tokens", "a whole number, 0 or more", self.disk_min_tokens >= 0)
        self._check("spill_min_tokens", "a whole number, 0 or more", self.spill_min_tokens >= 0)
        self._check("admit_after", "a whole number, 1 or more", self.admit_after >= 1)
        self._check("disk_endpoint", "given with an s3:// bucket", self.disk_endpoint is None or (self.disk_cache or "").startswith("s3://"))

    @classmethod
    def private(cls, directory: Path | str, **fields) -> Self:
        """Of a directory that one run of a command has to itself: what it measures or shows finds room there."""
        return cls(disk_cache=str(directory), disk_free_gb=0, **fields)

    def of_model(self, name: str) -> Self:
        """With the model's own directory in the place of the one that all share: another model's engine may run, and sweeps nothing here."""
        if self.disk_cache is None or "://" in self.disk_cache:
            return self
        slug = re.sub(r"[^A-Za-z0-9._@-]+", "-", name).strip(".") or "model"
        return dataclasses.replace(self, disk_cache=str(Path(self.disk_cache) / slug))


REASONING = {"reasoning_content": ("reasoning_content",), "reasoning": ("reasoning",), "both": ("reasoning_content", "reasoning")}
"""--reasoning-field: the names under which an answer's reasoning goes out."""


@dataclasses.dataclass(frozen=True)
class ServeConfig(Flags):
    """How a server is reached and what it does of itself; ValueError names the field that is out of range."""

    group = "server"

    host: str = field(default="127.0.0.1", metadata=flag(str, "address to listen on (default 127.0.0.1: this machine only)", metavar="ADDRESS"))
    port: int = field(default=8000, metadata=flag(int, "port to listen on, 0 for a free one (default 8000)", metavar="N"))
    model_name: str | None = field(default=None, metadata=flag(str, "the model's name for clients (default: its own)", metavar="NAME"))
    api_key: str | None = field(
        default_factory=lambda: os.environ.get("QJAX_API_KEY") or None,
        metadata=flag(str, "key that clients must send (default $QJAX_API_KEY, which does not show in a list of processes)", metavar="KEY"),
    )
    key_file: Path | None = field(
        default=None, metadata=flag(flags.file, "file with `name key` on each line: what is cached is shared within one key only", metavar="FILE")
    )
    admin_key: str | None = field(
        default_factory=lambda: os.environ.get("QJAX_ADMIN_KEY") or None,
        metadata=flag(str, "key of /metrics and /v1/cache (default $QJAX_ADMIN_KEY; without one they answer this machine only)", metavar="KEY"),
    )
    allow_anyone: bool = field(default=False, metadata=switch("listen on another address than this machine's without any key (default no)"))
    cors_origin: tuple[str, ...] = field(
        default=(), metadata={"action": "append", "metavar": "URL", "help": "web page origin whose scripts may ask; may be given more than once"}
    )
    queue: int = field(default=64, metadata=flag(int, "requests that may wait beside those that run (default 64)", metavar="N"))
    drain_seconds: float = field(
        default=30.0, metadata=flag(float, "seconds that what runs is given at a planned stop, then it is cut off (default 30)", metavar="X")
    )
    ping_seconds: float = field(
        default=10.0,
        metadata=flag(float, "seconds of silence after which a stream gets a comment, so that no client gives up (default 10)", metavar="X"),
    )
    max_tokens: int | None = field(
        default=None, metadata=flag(int, "longest answer where a request does not say (default: the rest of the context)", metavar="N")
    )
    thinking_budget: int | None = field(
        default=None, metadata=flag(int, "tokens after which a thought is closed where a request does not say (default: never)", metavar="N")
    )
    reasoning_field: str = field(
        default="both",
        metadata=flag(str, "names under which reasoning goes out; all of them are understood coming in (default both)", choices=tuple(REASONING)),
    )
    end_align: bool = field(
        default=True, metadata=switch("go on from the rows of an answer whose copy comes back with other white space, or cut short (default yes)")
    )
    end_align_reasoning: bool = field(
        default=True, metadata=switch("go on from the rows of an answer whose copy comes back without its reasoning (default yes)")
    )
    side_request: tuple[str, ...] = field(
        default=SIDE_REQUESTS,
        metadata={
            "action": "append",
            "metavar": "REGEX",
            "help": "a request without tools whose first message begins so is a title or the like: it thinks not, and its answer is short; "
            "may be given more than once, none for no such rule (default: what opencode and Open WebUI send)",
        },
    )
    side_max_tokens: int = field(default=256, metadata=flag(int, "longest answer of such a request (default 256)", metavar="N"))

    def __post_init__(self):
        self._check("port", "a number from 0 to 65535", 0 <= self.port <= 65535)
        for name in ("queue", "drain_seconds"):
            self._check(name, "a number, 0 or more", 0 <= getattr(self, name) < math.inf)
        self._check("ping_seconds", "a number above 0", 0 < self.ping_seconds < math.inf)
        for name, least in (("max_tokens", 1), ("thinking_budget", 0), ("side_max_tokens", 1)):
            value = getattr(self, name)
            self._check(name, f"{least} or more", value is None or value >= least)
