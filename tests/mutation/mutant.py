"""A mutant: one change to the code that a test must see."""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """name: what is wrong with it. file: below qjax/. old, new: the change; old stands there once. tests: pytest ids, one of which fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def of(file: str, *changes: tuple[str, ...]) -> tuple[Mutant, ...]:
    """Mutants of one file, each as (name, old, new, a test below tests/, ...)."""
    return tuple(Mutant(name, file, old, new, tuple(f"tests/{test}" for test in tests)) for name, old, new, *tests in changes)


def apply(mutant: Mutant, root: Path) -> None:
    """Changes the tree at `root`. ValueError where the place is not there exactly once."""
    path = root / "qjax" / mutant.file
    text = path.read_text()
    if (found := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: expected its place in {mutant.file} once, found it {found} times: {mutant.old!r}")
    path.write_text(text.replace(mutant.old, mutant.new))
