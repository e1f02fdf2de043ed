"""Runs the mutants of the cache code: each changes one place in a copy of the tree, and the tests that are named for it must fail there.

python -m tests.mutation.run            all of them, and before that their tests on a copy that is not changed
python -m tests.mutation.run NAME ...   some
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutation.mutant import Mutant, apply

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("qjax", "storage", "tests", "training", "benchmarks", "pyproject.toml", "README.md", "Makefile")
FAILED = 1
"""pytest's exit status where tests ran and some failed; any other but 0 means that nothing was tried."""
LIMIT = 100
"""Seconds a test: a mutant can make a loop that does not end, which is a failure too."""


@contextmanager
def copied(tree: Path = ROOT) -> Iterator[Path]:
    """A copy of a tree, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="qjax-mutant-") as directory:
        to = Path(directory)
        for part in PARTS:
            if (tree / part).is_dir():
                shutil.copytree(tree / part, to / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(tree / part, to / part)
        yield to


def pytest(root: Path, tests: Iterable[str]) -> int:
    """The exit status of these tests in a tree. Compiled programs are shared with the tree that this file is in, what failed is not."""
    options = ["-q", "-x", f"--timeout={LIMIT}", "-o", f"cache_dir={ROOT / '.pytest_cache'}", "-p", "no:lfplugin", "-p", "no:nfplugin"]
    return subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=root, capture_output=True, check=False).returncode


def survives(mutant: Mutant, tree: Path = ROOT) -> bool:
    """Runs a mutant's tests. RuntimeError where they could not run."""
    with copied(tree) as root:
        apply(mutant, root)
        status = pytest(root, mutant.tests)
    if status not in (0, FAILED):
        raise RuntimeError(f"{mutant.name}: pytest ended with {status}: expected {FAILED}, that a test fails")
    return status == 0


def main(names: list[str]) -> int:
    """Status 0 where all are killed, 1 where one survives or a test fails on what is not changed, 2 for a name that is none."""
    from tests.mutation.mutants import MUTANTS

    unknown = set(names) - {m.name for m in MUTANTS}
    if unknown:
        print(f"no such mutant: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [m for m in MUTANTS if not names or m.name in names]
    survivors = []
    with copied() as tree:  # it takes a quarter of an hour, in which somebody may write in the other
        if pytest(tree, sorted({test for m in chosen for test in m.tests})):
            print("the tests do not pass on the tree as it is", file=sys.stderr)
            return 1
        for i, mutant in enumerate(chosen, 1):
            alive = survives(mutant, tree)
            survivors += [mutant.name] if alive else []
            print(f"{i} of {len(chosen)}: {'SURVIVES' if alive else 'killed'}: {mutant.file}: {mutant.name}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
