"""Measures the files of the caches on NVMe at the 27B model's sizes, beside what raw O_DIRECT gives the same disk in the same minute.

No model runs. Entries are written by the writer of the tiers and restored into a page pool as a hit is, their sums and key ids checked.
A figure is a ratio of two that were taken one after the other, each first in turn: the median of the rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from qjax.bench.filed import Filed
from qjax.bench.raw import Raw, forget, sync
from qjax.model.config import ModelConfig
from qjax.model.qwen3_5 import layout
from qjax.private import private_directory
from qjax.state import Layout

DRAFTERS = {"mtp": 1, "dflash": 9}
"""Layers of the 27B's two drafters, whose rows lie in its pages too."""
RESTORES = (15_360, 41_719)
"""Tokens of the whole restores: a head of 15 pages, and a conversation."""
NUMBERS = 12
"""Bytes that a page has for a token beside its rows: a key id and the token."""
SPARE = 2**30
"""Bytes that are left free."""
MEMORY = ("ramfs", "tmpfs")


Step = tuple[Callable[[], None], Callable[[], None]]
"""What is done before, at no cost, and what is measured."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """seconds: that passed. cpu: seconds that all threads of this process ran."""

    seconds: float
    cpu: float

    @classmethod
    def of(cls, run: Callable[[], None]) -> Cost:
        cpu, begin = _cpu(), time.perf_counter()
        run()
        return cls(time.perf_counter() - begin, _cpu() - cpu)


@dataclasses.dataclass
class Pairs:
    """What moving so many bytes cost, raw and ours, a pair a round."""

    nbytes: int
    raw: list[Cost] = dataclasses.field(default_factory=list)
    ours: list[Cost] = dataclasses.field(default_factory=list)

    def measure(self, rounds: int, raw: Step, ours: Step, told: Callable[[int], None]) -> Pairs:
        for number in range(rounds):
            told(number + 1)
            both = (raw, self.raw), (ours, self.ours)
            for (before, run), costs in both if number % 2 == 0 else both[::-1]:
                before()
                costs.append(Cost.of(run))
        return self

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        return [raw.seconds / ours.seconds for raw, ours in zip(self.raw, self.ours, strict=True)]

    def as_json(self) -> dict:
        def rates(costs: list[Cost]) -> dict:
            return {
                "gb_s": median(self.nbytes / 1e9 / cost.seconds for cost in costs),
                "cpu_s_per_gb": median(cost.cpu / self.nbytes * 1e9 for cost in costs),
            }

        return {"ratio": self.ratio, "ratios": self.ratios, "raw": rates(self.raw), "ours": rates(self.ours)}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def sizes() -> Layout:
    """The 27B's, with the rows of its drafters: 104 MiB a page, 147 MiB an anchor."""
    of = layout(ModelConfig.preset("27b"))
    drafters = [dataclasses.replace(v, name=f"{name}.{v.name}", layers=layers) for name, layers in DRAFTERS.items() for v in of.views]
    return dataclasses.replace(of, views=(*of.views, *drafters))


def measure(directory: Path, pages: int, rounds: int, progress: Callable[[str], None] = lambda what: None) -> dict:
    """The figures, as JSON has them. Writes to a directory of its own in this one, and removes it.

    ValueError where the directory is in memory, has too little room, or the system no O_DIRECT; StorageError, OSError.
    """
    of = sizes()
    page, anchor = of.page_bytes + NUMBERS * of.grid, of.section_bytes + of.open_bytes
    with private(directory, needed(of, pages)) as root, contextlib.closing(Raw(max(page, anchor))) as raw:
        bench = Bench(root, raw, rounds, progress)
        writes, reads, share = bench.chain(dataclasses.replace(of, sections=(), open=()), pages * of.grid)
        restores = [bench.whole(of, tokens) for tokens in RESTORES]
        anchors = bench.anchor(of)
    return {
        "directory": str(directory),
        "file_system": file_system(directory),
        "pages": pages,
        "page_bytes": page,
        "anchor_bytes": of.section_bytes,
        "rounds": rounds,
        "read_ratio": reads.ratio,
        "write_ratio": writes.ratio,
        "verify_share": share,
        "cpu_s_per_gb": reads.as_json()["ours"]["cpu_s_per_gb"],
        "read": reads.as_json(),
        "write": writes.as_json(),
        "anchor": anchors,
        "restores": restores,
    }


class Bench:
    """root: where everything is written, one thing after another."""

    def __init__(self, root: Path, raw: Raw, rounds: int, progress: Callable[[str], None]):
        self._root, self._raw, self._rounds, self._progress = root, raw, rounds, progress
        self._plain = root / "raw"
        self._plain.mkdir()

    def _pairs(self, nbytes: int, what: str, raw: Step, ours: Step) -> Pairs:
        return Pairs(nbytes).measure(self._rounds, raw, ours, lambda n: self._progress(f"{what}, round {n} of {self._rounds}"))

    def _writes(self, what: str, sizes: list[int], drop: Callable[[], None], write: Callable[[], None]) -> Pairs:
        """Files of such sizes, raw, and what is to be as many bytes. Those of the last round stay."""

        def settled(remove: Callable[[], None]) -> Callable[[], None]:
            def remove_and_settle() -> None:
                remove()
                sync(self._root)  # or whoever writes next would pay for the blocks that are given back

            return remove_and_settle

        def remove() -> None:
            for path in self._plain.iterdir():
                path.unlink()

        def write_raw() -> None:
            for number, nbytes in enumerate(sizes):
                self._raw.write(self._plain / str(number), nbytes)

        return self._pairs(sum(sizes), f"writing {what}", (settled(remove), write_raw), (settled(drop), write))

    def _reads(self, what: str, nbytes: int, files: list[Path], read: Callable[[], None]) -> Pairs:
        forgotten = functools.partial(forget, self._root)
        return self._pairs(nbytes, what, (forgotten, lambda: self._raw.read(files)), (forgotten, read))

    def _restores(self, filed: Filed, files: list[Path]) -> tuple[Pairs, float]:
        """And the share of them that sums took."""
        filed.check()
        before = filed.storage.stats()["verify_s"]
        pairs = self._reads(f"restoring {filed.tokens:,} tokens", filed.nbytes, files, filed.restore)
        return pairs, (filed.storage.stats()["verify_s"] - before) / sum(cost.seconds for cost in pairs.ours)

    @contextlib.contextmanager
    def _filed(self, of: Layout, tokens: int) -> Iterator[Filed]:
        self._progress(f"making random rows of {tokens:,} tokens")
        with contextlib.closing(Filed(self._root / "filed", of, tokens)) as filed:
            yield filed
        for directory in (self._root / "filed", self._plain):
            shutil.rmtree(directory)
        self._plain.mkdir()

    def chain(self, of: Layout, tokens: int) -> tuple[Pairs, Pairs, float]:
        """Pages: writes, reads, and what sums took of these."""
        with self._filed(of, tokens) as filed:
            writes = self._writes(f"{len(filed.pages)} pages", [filed.page_bytes] * len(filed.pages), filed.drop, filed.write)
            reads, share = self._restores(filed, list(self._plain.iterdir()))
        return writes, reads, share

    def whole(self, of: Layout, tokens: int) -> dict:
        """Pages and an anchor; raw reads the same files."""
        with self._filed(of, tokens) as filed:
            self._progress(f"writing {tokens:,} tokens")
            written = Cost.of(filed.write)
            pairs, share = self._restores(filed, filed.files())
        sizes = {"tokens": tokens, "pages": len(filed.pages), "bytes": filed.nbytes, "write_seconds": written.seconds}
        seconds = {"seconds": median(cost.seconds for cost in pairs.ours), "raw_seconds": median(cost.seconds for cost in pairs.raw)}
        return sizes | seconds | pairs.as_json() | {"verify_share": share}

    def anchor(self, of: Layout) -> dict:
        """An anchor alone."""
        with self._filed(of, of.grid) as filed:
            filed.write()
            writes = self._writes("an anchor", [filed.anchor_bytes], filed.drop_anchor, filed.write_anchor)
            reads = self._reads("reading an anchor", filed.anchor_bytes, list(self._plain.iterdir()), filed.read_anchor)
        return {"write": writes.as_json(), "read": reads.as_json()}


def needed(of: Layout, pages: int) -> int:
    """Bytes that lie on the disk at once, at the most: a chain written twice, or a conversation."""
    page, anchor = of.page_bytes + NUMBERS * of.grid, of.section_bytes + of.open_bytes
    return max(2 * pages * page, -(-max(RESTORES) // of.grid) * page + anchor, page + 2 * anchor)


@contextlib.contextmanager
def private(directory: Path, need: int) -> Iterator[Path]:
    """A directory in this one that nobody else reads; it goes at the end, whatever that is. ValueError where so many bytes have no room."""
    directory.mkdir(0o700, parents=True, exist_ok=True)
    if (kind := file_system(directory)) in MEMORY:
        raise ValueError(f"{directory} is in memory ({kind}): expected a directory on the disk to measure")
    if (free := shutil.disk_usage(directory).free) < need + SPARE:
        wanted = f"{need / 2**30:.1f} GiB and {SPARE / 2**30:.0f} to spare"
        raise ValueError(f"{directory} has {free / 2**30:.1f} GiB free, expected {wanted}: take another --directory or fewer --pages")
    with private_directory("bench", directory) as root:
        yield root


def file_system(directory: Path) -> str | None:
    """Its kind, such as ext4; None where the system does not say."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return None
