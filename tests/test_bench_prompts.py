"""benchmarks/prompts.py runs: its conversation goes on from an answer on record."""

from benchmarks.prompts import measure
from qjax.model.source import load


def test_every_part_has_its_time():
    model = load("embedded")
    found = measure(model.tokenizer, model.template, tokens=6000, messages=12, rounds=2)
    assert found["messages"] == 12
    assert 5500 < found["tokens"] < 6100  # the answer's own tokens may be more than the template's
    assert all(found[part] > 0 for part in ("first", "whole", "json", "schema", "roles", "guard", "template", "render", "keys", "prompt"))
