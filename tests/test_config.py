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
