"""The engine's settings and their flags."""

import argparse
import dataclasses
from pathlib import Path

import pytest

from qjax.config import EngineConfig


def parse(*flags):
    parser = argparse.ArgumentParser()
    EngineConfig.add_flags(parser)
    return EngineConfig.from_flags(parser.parse_args(flags))


def test_every_field_is_a_flag_and_its_default_is_the_fields():
    assert parse() == EngineConfig()
    given = parse("--grid", "4096", "--kv-gb", "1.5", "--context-tokens", "32768", "--compile-cache", "~/c")
    assert parse(*given.flags()) == given
    assert parse(*EngineConfig(compile_cache=None).flags()) == EngineConfig(compile_cache=None)
    assert given == EngineConfig(4096, 1.5, 32768, Path.home() / "c")
    assert len(dataclasses.fields(EngineConfig)) == 4


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
        ("context_tokens", 0),
    ],
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*, not {value!r}"):
        EngineConfig(**{field: value})
