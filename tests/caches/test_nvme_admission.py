"""Admission: which lines are written, decided from counts alone."""

import numpy as np
import pytest

from qjax.caches.nvme import admission
from qjax.caches.nvme.admission import Admission
from qjax.caches.nvme.writer import Writer
from storage import Storage
from tests.caches.filed import chain
from tests.models import prompt


def lines(of: Admission, tokens, start=0, first=False, user=None, branch=None) -> list[int]:
    return sorted(of.lines(chain(tokens), start, first=first, user=user, branch=branch))


def test_the_longest_line_that_was_counted_often_enough():
    of = Admission(64, 2, 64)
    assert lines(of, prompt(300)) == []
    assert lines(of, np.concatenate([prompt(200), prompt(100, seed=1)])) == [192]
    assert lines(of, prompt(300)) == [256]  # each of its lines has two by now
    assert lines(of, prompt(100)) == [64]


def test_lines_that_are_not_forwarded_are_neither_counted_nor_written():
    of = Admission(64, 2, 64)
    for _ in range(3):
        assert lines(of, prompt(300), start=256) == []
    assert lines(of, prompt(300), start=230) == []  # 256, the first time
    assert lines(of, prompt(300), start=230, first=True, branch=130) == [256]


@pytest.mark.parametrize(
    ("size", "user", "expected"),
    [
        (1000, 640, [448, 512, 576, 640]),
        (1000, 639, [384, 448, 512, 576]),
        (1000, None, [768, 832, 896, 960]),
        (1000, 130, [64, 128]),
        (1000, 63, []),
        (64, None, [64]),
        (63, None, []),
    ],
)
def test_the_last_lines_below_the_user_message(size, user, expected):
    assert lines(Admission(64, 9, 0), prompt(size), first=True, user=user) == expected
    assert lines(Admission(64, 9, 0), prompt(size), first=False, user=user) == []


def test_a_branch():
    assert lines(Admission(64, 9, 0), prompt(300), branch=200) == [192]
    assert lines(Admission(64, 9, 0), prompt(300), branch=63) == []
    assert lines(Admission(64, 9, 0), prompt(300), start=192, branch=200) == []


def test_short_prompts_count_for_nothing():
    of = Admission(64, 2, 201)
    for _ in range(3):
        assert lines(of, prompt(200), first=True, branch=130) == []
    assert lines(of, prompt(201)) == []


def test_tenants_count_apart():
    of = Admission(64, 2, 0)
    for tenant in "ab":
        assert of.lines(chain(prompt(100), tenant), 0, first=False, user=None, branch=None) == set()
    assert of.lines(chain(prompt(100), "a"), 0, first=False, user=None, branch=None) == {64}


def test_the_counts_of_the_last_lines_are_kept(monkeypatch):
    monkeypatch.setattr(admission, "LINES", 4)
    of = Admission(64, 2, 0)
    lines(of, prompt(256))
    lines(of, prompt(64))  # used again: 128 is the oldest now
    lines(of, prompt(64, seed=1))
    assert lines(of, prompt(128)) == [64]
    assert len(of._counts) == 4


@pytest.fixture
def opened(tmp_path):
    """(storage, its writer); what was handed over is written at the end."""
    storage = Storage.open(tmp_path, {})
    writer = Writer(storage, 1 << 20, lambda nbytes: True)
    yield storage, writer
    writer.close()
    storage.close()


def test_a_book_is_written_and_read(opened):
    storage, writer = opened
    of = Admission(64, 3, 0)
    for hits in ({}, {"a-x": 2}):
        lines(of, prompt(200))
        of.save(storage, writer, hits)
        writer.drain()
    assert list(storage.entries()) == ["b-2"]  # the older one is gone
    new = Admission(64, 3, 0)
    assert new.load(storage) == {"a-x": 2}
    assert new._counts == of._counts
    assert lines(new, prompt(200)) == [192]
    new.save(storage, writer, {"a-x": 2})
    writer.drain()
    assert list(storage.entries()) == ["b-3"]


def test_an_unchanged_book_is_not_written_again(opened):
    storage, writer = opened
    of = Admission(64, 2, 0)
    of.save(storage, writer, {})
    assert storage.entries() == {}
    lines(of, prompt(200))
    for _ in range(3):
        of.save(storage, writer, {"a-x": 1})
        writer.drain()
    assert list(storage.entries()) == ["b-1"]
