"""The engine's settings and their flags."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from qjax.config import LARGEST_GRID, MOST_GB, CacheConfig, EngineConfig
from qjax.model.qwen3_5 import layout
from tests.models import tiny_config


def parse(*flags):
    parser = argparse.ArgumentParser()
    EngineConfig.add_flags(parser)
    return EngineConfig.from_flags(parser.parse_args(flags))


def test_every_field_is_a_flag_and_its_default_is_the_fields():
    assert parse() == EngineConfig()
    given = parse("--grid", "4096", "--kv-gb", "1.5", "--context-tokens", "32768", "--compile-cache", "~/c", "--parallel", "3")
    assert parse(*given.flags()) == given
    assert parse(*EngineConfig(compile_cache=None).flags()) == EngineConfig(compile_cache=None)
    assert given == EngineConfig(4096, 1.5, 32768, Path.home() / "c", parallel=3)
    assert len(dataclasses.fields(EngineConfig)) == 6


def test_compile_cache_can_be_off(monkeypatch, tmp_path):
    assert parse("--compile-cache", "none").compile_cache is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse().compile_cache == tmp_path / ".cache" / "qjax" / "compile"


def test_a_grid_is_whole_tiles():
    """No block and no attention tile may cross a page's end: the tile is a page's up to 256 rows, and 256 above."""
    allowed = (64, 128, 192, 256, 512, 768, 1024, 1280)
    for grid in range(1300):
        if grid in allowed:
            assert EngineConfig(grid=grid).grid == grid
        else:
            with pytest.raises(ValueError, match=f"^grid must be a multiple of 64 up to 256, or of 256, not {grid}$"):
                EngineConfig(grid=grid)


def test_is_a_value():
    assert hash(EngineConfig()) == hash(EngineConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().grid = 64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grid", 0),
        ("grid", -64),
        ("grid", 100),
        ("grid", 320),  # attention's second tile would cross the page's end
        ("grid", 1088),
        ("grid", 1024.0),
        ("kv_gb", 0.0),
        ("kv_gb", float("nan")),
        ("kv_gb", float("inf")),
        ("kv_gb", 1e308),
        ("grid", 2 * LARGEST_GRID),
        ("context_tokens", 0),
        ("parallel", 0),
        ("parallel", -1),
        ("parallel", 1.0),
    ],
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*, not {re.escape(repr(value))}"):
        EngineConfig(**{field: value})


def test_the_pool_has_room_for_what_runs_at_once_and_one_more():
    spec = layout(tiny_config(), 64)
    for parallel in (1, 2, 4):
        pages, sequence, limit = EngineConfig(grid=64, context_tokens=640, parallel=parallel).pages(spec, 2048)
        assert (pages, sequence, limit) == (10 * (parallel + 1) + 2, 10, 640)
    assert EngineConfig(grid=64, parallel=4, kv_gb=20 * spec.page_bytes / 2**30).pages(spec, 640) == (20, 10, 640)


def test_budgets_are_numbers_of_bytes():
    """No budget is above what an int can be made of; the largest is one."""
    fields = [f.name for f in dataclasses.fields(CacheConfig) if f.name.endswith("_gb")]
    for name in fields:
        assert CacheConfig(**{name: MOST_GB}).bytes(name) == 2**50
        for value in (1e308, float("nan"), float("inf"), -1.0):
            with pytest.raises(ValueError, match=f"^{name} must be a number of GiB, 0 to 1,048,576, not "):
                CacheConfig(**{name: value})
    assert len(fields) >= 6


@pytest.mark.parametrize("text", ["", " ", "~no-such-user/cache"])
def test_a_compile_cache_that_names_nothing_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        parse("--compile-cache", text)
    assert f"argument --compile-cache: expected a directory or none, found {text!r}" in capsys.readouterr().err


def test_a_compile_cache_must_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "file", tmp_path / "file" / "in", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"^compile_cache must be a directory that can be read or made, or none, not {re.escape(str(path))}$"):
            EngineConfig(compile_cache=path)
    for path in (tmp_path, tmp_path / "new" / "deep"):
        assert EngineConfig(compile_cache=path).compile_cache == path
    assert not (tmp_path / "new").exists()


def test_a_user_without_a_home_is_told(monkeypatch):
    def lost():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", lost)
    with pytest.raises(ValueError, match=r"^compile_cache must be given"):
        EngineConfig()
    assert EngineConfig(compile_cache=None).compile_cache is None


def test_prefix_chunk_is_told_before_an_engine_is_made():
    for chunk in (None, 0, 128):
        CacheConfig(prefix_chunk=chunk).check(64)
    for chunk in (-64, 100):
        with pytest.raises(ValueError, match=f"^prefix_chunk must be a multiple of the grid, 64, or 0, not {chunk}$"):
            CacheConfig(prefix_chunk=chunk).check(64)
