"""`qjax bench engine`: figures of the right kind, counts by hand, and a baseline that computes the same model."""

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from qjax.bench import engine as bench
from qjax.bench.engine import WIDTHS, Decoder, PlainDecoder, Times, measure
from qjax.bench.machine import Machine, decode_bytes, prefill_flops
from qjax.bench.plain import plain_state
from qjax.cli import parser
from qjax.commands import bench as command
from qjax.model.config import ModelConfig
from qjax.state import BLOCK
from tests.models import prompt, tiny_config

BOUND = 0.04
"""Of the relative difference of two steps' logits; measured: 0.005 on the embedded model, 0.017 over 64 tokens on the random one."""


def relative(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture
def quick(monkeypatch):
    """Limits of the machine from small arrays: no test looks at how high they are."""
    monkeypatch.setattr("qjax.bench.machine.PRODUCTS", ((64, 64, 64),))
    monkeypatch.setattr("qjax.bench.machine.READ_BYTES", 2**22)


def plain_against_engine(engine, length: int, width: int, steps: int, change=lambda state: state):
    """Logits of greedy steps from a sequence: the plain baseline's and the engine's, for the engine's tokens."""
    tokens = prompt(length, vocabulary=engine.model.tokenizer.size)
    sequence, logits = engine.prefill(tokens)
    plain, slot = PlainDecoder(engine, sequence, logits, width), engine.open(sequence)
    engine.release(sequence)
    pool, state = plain._kept
    plain._kept = pool, change(state)
    plain.begin()
    found, expected, token = [], [], int(logits.argmax())
    for _ in range(steps):
        plain._token = token
        found.append(plain.logits())
        expected.append(slot.step([token])[0])
        slot.accept([token])
        token = int(expected[-1].argmax())
    slot.close()
    return np.stack(found), np.stack(expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_plain_step_is_close_to_the_engine(engine, width):
    found, expected = plain_against_engine(engine, 2 * BLOCK, width, 6)
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) < BOUND
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK])
def test_the_plain_step_is_close_to_the_engine_over_a_block_line(small, length):
    """Random weights that forget slowly; the sequence ends on the grid, and the engine closes a block where the plain step goes on."""
    found, expected = plain_against_engine(small, length, 2, BLOCK)
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) < BOUND


@pytest.mark.parametrize("name", ["S", "tail"])
def test_a_baseline_without_its_state_is_not_close_to_the_engine(small, name):
    """The control: with one part of the state zero the bound above is broken."""
    found, expected = plain_against_engine(small, 3 * BLOCK, 2, 2, lambda state: [one | {name: np.zeros_like(one[name])} for one in state])
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) > 10 * BOUND


def test_a_state_is_converted_on_a_block_line_only(engine):
    sequence, _ = engine.prefill(prompt(BLOCK + 1))
    engine.release(sequence)
    with pytest.raises(ValueError, match="multiple of 64 tokens, found 65"):
        plain_state(sequence)


def test_a_round_of_the_engine_closes_one_block(engine):
    """Beginning LEAD tokens before a line, exactly one step waits for a block, and the decoder can begin again."""
    sequence, logits = engine.prefill(prompt(2 * BLOCK - bench.LEAD))
    decoder = Decoder(engine, sequence, logits)
    try:
        for _ in range(2):
            decoder.begin()
            assert [decoder() for _ in range(bench.STEPS)] == [i == bench.LEAD for i in range(bench.STEPS)]
    finally:
        decoder.release()


def test_closing_a_block_counts_once_in_a_block():
    times = Times(steps=[3.0, 1.0, 2.0], closing=[2.0 + BLOCK])
    assert times.seconds == 3.0
    assert Times(steps=[2.0], closing=[1.0]).seconds == 2.0
    assert Times(steps=[2.0, 4.0]).seconds == 3.0


def test_the_figures_are_finite_and_positive(engine, quick):
    said = []
    found = measure(engine, (64, 128), 2, context=128, progress=said.append)
    assert found == json.loads(json.dumps(found))
    assert {"peak_gflops", "read_gb_s", "prefill", "decode", "purity_cost"} <= found.keys()
    assert [set(row) for row in found["prefill"]] == [{"tokens", "tokens_per_s", "of_peak"}] * 2
    assert [set(row) for row in found["decode"]] == [{"context", "tokens_per_s", "of_bandwidth"}] * 2
    assert [row["tokens"] for row in found["prefill"]] == [row["context"] for row in found["decode"]] == [64, 128]
    rows = [*found["prefill"], *found["decode"], *found["purity"]["plain_ms"]]
    figures = [found["peak_gflops"], found["read_gb_s"], found["purity_cost"], found["purity"]["engine_ms"], *(v for r in rows for v in r.values())]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert [row["width"] for row in found["purity"]["plain_ms"]] == [1, 2, 4, 8, 16]
    fastest = min(row["ms"] for row in found["purity"]["plain_ms"])
    assert found["purity_cost"] == pytest.approx(found["purity"]["engine_ms"] / fastest)
    assert any("round 2 of 2" in text for text in said)


@pytest.mark.parametrize(("tokens", "context"), [((63,), 128), ((1016,), 128), ((64,), 4096)])
def test_a_length_that_does_not_fit_is_refused_before_any_work(engine, monkeypatch, tokens, context):
    monkeypatch.setattr(engine, "prefill", lambda *_: pytest.fail("nothing may be computed"))
    with pytest.raises(ValueError, match="64 to 1,014 tokens"):
        measure(engine, tokens, 1, context=context)


def test_an_end_by_an_error_holds_no_page(engine, quick, monkeypatch):
    """The fixture checks that no page is held."""

    def fail(self):
        raise RuntimeError("stop here")

    monkeypatch.setattr(Machine, "measure", fail)
    with pytest.raises(RuntimeError, match="stop here"):
        measure(engine, (64,), 1, context=64)


def test_the_limits_of_the_machine_only_rise(quick, monkeypatch):
    machine = Machine("bfloat16")
    seconds = iter([2.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 0.5])
    monkeypatch.setattr("qjax.bench.machine._best_seconds", lambda *_: next(seconds))
    machine.measure()
    assert (machine.peak_gflops, machine.read_gb_s) == (64**3 / 1e9, 2**22 / 1e9)
    machine.measure()
    assert (machine.peak_gflops, machine.read_gb_s) == (64**3 / 1e9, 2**23 / 1e9)


def test_bytes_of_a_decode_step():
    """The 0.8B model: its 752,393,024 parameters of two bytes, 288 each of float32, S of 18 layers, and 12,288 bytes a token of context."""
    c = ModelConfig.preset("0.8b")
    assert c.tied
    gdn = 2 * 1024 + 8224 * 1024 + 6144 * 4 + 16 + 1024 * 2048 + 3 * 3584 * 1024
    attention = 2 * 1024 + 5120 * 1024 + 2 * 256 + 1024 * 2048 + 3 * 3584 * 1024
    wanted = 2 * (248320 * 1024 + 1024 + 18 * gdn + 6 * attention) + 18 * 4 * (16 + 128) + 18 * 16 * 128 * 128 * 4
    assert decode_bytes(c, 0) == wanted
    assert decode_bytes(c, 1000) - decode_bytes(c, 0) == 12_288_000


def test_an_untied_embedding_counts_as_one_row():
    tied, untied = (decode_bytes(tiny_config(tied=tied), 0) for tied in (True, False))
    assert untied - tied == 2 * tiny_config().hidden


def test_operations_of_a_prefill():
    """One token: every matrix once, one score and one value product, and one row of a block."""
    c = tiny_config()
    layer = 3 * 64 * 96
    gdn = 64 * (2 * 2 * 32 + 2 * 4 * 32 + 2 * 4) + 64 * 4 * 32 + layer
    attention = 64 * (2 * 4 * 32 + 2 * 2 * 32) + 64 * 4 * 32 + layer
    chunked = 2 * 4 * 32 * 32.5 + 4 * 64**2 / 3 + 4 * 6 * 32 * 32 + 4 * 4 * 32 * 32.5
    assert prefill_flops(c, 1) == pytest.approx(2 * (4 * gdn + 2 * attention + c.vocab * 64) + 2 * 4 * 4 * 32 + 4 * chunked)
    quadratic = prefill_flops(c, 3000) - 2 * prefill_flops(c, 2000) + prefill_flops(c, 1000)
    assert quadratic == pytest.approx(2 * 4 * 4 * 32 / 2 * 2 * 1000**2)


def test_the_flags():
    args = parser().parse_args(["bench", "engine", "--tokens", "64,2048", "--rounds", "3"])
    assert (args.tokens, args.rounds, args.model, args.json) == ([64, 2048], 3, "embedded", False)
    assert parser().parse_args(["bench", "engine"]).tokens == [1024, 4096]


@pytest.mark.parametrize("flags", [["--tokens", "0"], ["--tokens", "64,"], ["--tokens", "many"], ["--rounds", "0"]])
def test_wrong_flags_are_refused(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["bench", "engine", *flags])
    assert "expected a whole number, at least 1" in capsys.readouterr().err


FOUND = {
    "model": "a model",
    "rounds": 3,
    "peak_gflops": 400.0,
    "read_gb_s": 20.5,
    "prefill": [{"tokens": 4096, "tokens_per_s": 250.25, "of_peak": 0.615}],
    "decode": [{"context": 4096, "tokens_per_s": 9.5, "of_bandwidth": 0.725}],
    "purity_cost": 1.025,
    "purity": {"context": 1024, "engine_ms": 102.5, "plain_ms": [{"width": 1, "ms": 900.0}, {"width": 2, "ms": 100.0}]},
}


def test_the_command_prints_json_or_a_table(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(command, "load", lambda name: name)
    monkeypatch.setattr(command, "Engine", lambda model, config: SimpleNamespace(model=model))
    monkeypatch.setattr(command, "measure", lambda engine, tokens, rounds, progress: asked.append((engine.model, tokens, rounds)) or FOUND)
    assert command.run(parser().parse_args(["bench", "engine", "--model", "random:0.8b", "--tokens", "64", "--rounds", "2", "--json"])) == 0
    assert json.loads(capsys.readouterr().out) == FOUND
    assert command.run(parser().parse_args(["bench", "engine"])) == 0
    assert "cold prefill" in capsys.readouterr().out
    assert asked == [("random:0.8b", [64], 2), ("embedded", [1024, 4096], 5)]


def test_the_table_says_all_of_it():
    out = io.StringIO()
    command.show(FOUND, Console(file=out, width=120))
    wanted = "a model|4,096|250.2|61.5%|9.5|72.5%|400 GFLOP/s|20.5 GB/s|1.025|1,024|102.50 ms|900.00 (1)|100.00 (2)".split("|")
    assert not [part for part in wanted if part not in out.getvalue()]
