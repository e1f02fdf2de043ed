"""The list of mutants is true: every place and every test is there, a mutant is killed, and a change that is none survives."""

import ast
from functools import cache

import pytest

from tests.mutation.mutant import Mutant, apply
from tests.mutation.mutants import MUTANTS
from tests.mutation.run import ROOT, survives


@cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def named(name: str) -> Mutant:
    return next(m for m in MUTANTS if m.name == name)


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len(MUTANTS) >= 25
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_its_place_is_there_once_and_its_tests_exist(mutant):
    text = (ROOT / "qjax" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    changed = ast.parse(text.replace(mutant.old, mutant.new))  # it is Python, and not the same program
    assert ast.dump(changed) != ast.dump(ast.parse(text))
    assert mutant.tests
    for test in mutant.tests:
        file, name = test.split("::")
        assert name.split("[")[0] in functions(file)


def test_a_mutant_whose_place_is_gone_is_refused(tmp_path):
    mutant = named("the first key that differs counts as equal")
    file = tmp_path / "qjax" / mutant.file
    file.parent.mkdir(parents=True)
    for text, times in (("", 0), (2 * mutant.old, 2)):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"expected its place in {mutant.file} once, found it {times} times"):
            apply(mutant, tmp_path)
        assert file.read_text() == text


def test_a_mutant_is_killed():
    assert not survives(named("the first key that differs counts as equal"))


def test_control_a_comment_survives():
    """The same tests pass on a tree that says something else and does the same."""
    mutant = named("the first key that differs counts as equal")
    assert survives(mutant._replace(new=mutant.old + "  # where they part"))


def test_tests_that_do_not_run_are_an_error():
    mutant = named("the first key that differs counts as equal")
    with pytest.raises(RuntimeError, match="pytest ended with 4: expected 1, that a test fails"):
        survives(mutant._replace(tests=("tests/caches/test_keys.py::test_of_nothing",)))
