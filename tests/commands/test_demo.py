"""`qjax demo` at a small size: its steps, the proof, and that it fails where warm is not cold or comes from somewhere else."""

import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from qjax.caches.lookup import Caches
from qjax.cli import main
from qjax.commands import demo
from qjax.commands import demo_conversation as talk
from qjax.config import CacheConfig

FACTS = [talk.FIRST, talk.READ[1], talk.GUEST, talk.OTHER[0], talk.BACK, talk.MORE, talk.EDITED, talk.EDITED]
RIGHT = [talk.answered(fact) for fact in FACTS]
BROKEN = "It\n\nis gone."
"""The answer of the control, which resumes from a broken state."""
STEPS = {
    "cold": "cold",
    "the next turn": "end",
    "a guest": "resident",  # the grid of the test's engine has lines in the head that all share
    "a second session": "resident",
    "back to the first": "parked",
    "a long turn": "end",
    "an edit in the middle": "resident",
    "the same prompt again": "prompt",
}
LAST_LINE = re.compile(r"warm against cold: ([\d,]+) differing bits in 1,024 logits, 5 sections, ([\d,]+) rows")
CONTROL = re.compile(r"control, gdn\.S zeroed before the resume: ([\d,]+) differing bits in 1,024 logits, and the answer \"(.*)\"")
COLUMNS = ("source", "prompt", "read", "again", "first", "cold", "right", "bits")
TOKENS = "1200"


def number(text: str) -> int:
    return int(text.replace(",", ""))


def rows(lines: list[str], names=STEPS) -> list[dict]:
    """The table: one row a step, by the names of COLUMNS; counts are ints."""
    found = []
    for name in names:
        (line,) = [line for line in lines if line.startswith(f"{name} ") and len(line.removeprefix(name).split()) == len(COLUMNS)]
        row = dict(zip(COLUMNS, line.removeprefix(name).split(), strict=True))
        found.append(row | {column: number(row[column]) for column in ("prompt", "read", "again", "bits")})
    return found


def test_history_is_as_long_as_asked_and_tells_each_fact_once():
    def count(messages):
        return len(json.dumps(messages))

    messages = talk.history(count, 20_000)
    assert messages == talk.history(count, 20_000)
    assert 20_000 <= count(messages) < 23_000
    assert talk.history(count, 1)[:6] == messages[:6]
    assert talk.history(count, 20_000, talk.OTHER, talk.SEED + 1)[4:8] != messages[6:10]
    for name, value in talk.FACTS:
        told = [i for i, message in enumerate(messages) if value in json.dumps(message)]
        assert told[:1] == [i for i, message in enumerate(messages) if message == talk.user(talk.TOLD.format(name=name, value=value))]
        assert max(told) < 2 * len(talk.FACTS)
    _, wanted, values = talk.READ
    assert wanted in values
    assert f"{wanted[0]} = {wanted[1]}\n" in talk.second_turn()[-1]["content"]
    assert not any(wanted[1] in json.dumps(message) for message in messages)


def test_the_edit_is_one_value_in_the_middle():
    def count(messages):
        return len(json.dumps(messages))

    long, edited = (talk.more_work(count, 12_000, fact) for fact in (talk.MORE, talk.EDITED))
    differ = [i for i, (a, b) in enumerate(zip(long, edited, strict=True)) if a != b]
    assert long[differ[0] : differ[-1] + 1] == talk.told((talk.MORE,))
    assert edited[differ[0] : differ[-1] + 1] == talk.told((talk.EDITED,))
    assert count(long[: differ[0]]) >= 6_000
    assert 12_000 <= count(long) < 15_000
    assert long[-1] == talk.asked(talk.MORE)


def test_every_step_has_its_source_and_the_proof(engine, answers, capsys):
    answers(*RIGHT, BROKEN)
    assert main(["demo", "--tokens", TOKENS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [sum(line == f"agent   {answer}" for line in lines) for answer in RIGHT] == [1, 1, 1, 1, 1, 1, 2, 2]
    assert f"user    {talk.asked(talk.BACK)['content']}" in lines
    assert f"agent   read_file({talk.READ[0]})" in lines
    assert [line for line in lines if re.match(r"\d ", line)] == [f"{i} {name}" for i, name in enumerate(STEPS, 1)]
    shown = rows(lines)
    assert [row["source"] for row in shown] == list(STEPS.values())
    assert {row["right"] for row in shown} == {"yes"}
    assert {row["bits"] for row in shown} == {0}
    first, following, guest, other, back, long, edit, same = shown
    assert first["read"] == first["prompt"] >= int(TOKENS)
    assert 4 * guest["prompt"] < following["prompt"] <= 4 * other["prompt"]
    for before, row in ((first, following), (following, back), (back, long)):
        assert row["read"] < row["prompt"] - before["prompt"]
        assert row["again"] == 0
    assert edit["prompt"] == long["prompt"] == same["prompt"]
    assert edit["again"] < 128
    assert edit["read"] < long["read"] - 128
    assert (same["read"], same["again"]) == (0, 0)
    assert number(LAST_LINE.fullmatch(lines[-1])[2]) == sum(row["prompt"] for row in shown)
    assert "(7 for 8 requests)" in lines[-3]
    control = CONTROL.fullmatch(lines[-2])
    assert number(control[1]) > 0
    assert control[2] == "It is gone."


def test_json_is_one_object_and_nothing_else(engine, answers, capsys):
    answers("The backup key is 1.", *RIGHT[1:], BROKEN)
    assert main(["demo", "--tokens", TOKENS, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert {step["what"]: step["source"] for step in out["steps"]} == STEPS
    assert all(step["source"] == step["expected"] for step in out["steps"])
    assert [step["right"] for step in out["steps"]] == [False] + 7 * [True]
    assert out["steps"][0]["answer"] == "The backup key is 1."
    assert (out["differing_bits"], out["cold_runs"], out["holds"]) == (0, 7, True)
    assert out["control"]["differing_bits"] > 0
    assert min(step[name] for step in out["steps"] for name in ("first_token_seconds", "cold_seconds")) > 0


def test_wrong_answers_are_shown_as_wrong_and_prove_the_same(engine, answers, capsys):
    answers("The backup key is 1.", "", *RIGHT[2:], BROKEN)
    assert main(["demo", "--tokens", "300"]) == 0
    assert [row["right"] for row in rows(capsys.readouterr().out.splitlines())] == ["no", "no"] + 6 * ["yes"]


def test_a_damaged_state_fails(engine, answers, capsys, monkeypatch):
    """One section of the parked session's end has other values: all that goes on from it differs."""
    hold = demo.Stage.hold_before

    def damaged(stage, prompt):
        hold(stage, prompt)
        _, anchor = engine.caches.find(prompt.astype(np.int64), "")[0].entry
        sections = anchor.sequence.sections
        object.__setattr__(anchor, "sequence", anchor.sequence.replace(sections=sections | {"gdn.S": sections["gdn.S"] + 1}))

    monkeypatch.setattr(demo.Stage, "hold_before", damaged)
    answers(*RIGHT, BROKEN)
    assert main(["demo", "--tokens", TOKENS]) == 1
    lines = capsys.readouterr().out.splitlines()
    shown = rows(lines)
    assert [row["bits"] > 0 for row in shown] == 4 * [False] + 4 * [True]
    assert number(LAST_LINE.fullmatch(lines[-1])[1]) == sum(row["bits"] for row in shown)


def test_a_state_from_somewhere_else_fails(engine, answers, capsys, monkeypatch):
    """The caches are emptied before the first session comes back: every bit is right, and the demo is not."""
    hold = demo.Stage.hold_before

    def emptied(stage, prompt):
        hold(stage, prompt)
        engine.caches.clear()

    monkeypatch.setattr(demo.Stage, "hold_before", emptied)
    answers(*RIGHT, BROKEN)
    assert main(["demo", "--tokens", TOKENS]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        'wrong source: back to the first: the state must come from "parked" and came from "cold" (it was kept until the caches were emptied)' in lines
    )
    assert sum(line.startswith("wrong source: ") for line in lines) == 1
    assert number(LAST_LINE.fullmatch(lines[-1])[1]) == 0


def test_caches_that_keep_nothing_to_compare_are_told(engine, answers, capsys):
    engine.caches = Caches(engine.pool, CacheConfig(resident_stash_gb=0))
    answers(*RIGHT)
    assert main(["demo", "--tokens", TOKENS]) == 2
    assert "a guest: nothing is kept of its prompt's end; the demo needs larger caches" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["answer", "prompt", "proof", "control"])
def test_interrupt_stops_it_and_leaves_nothing_held(engine, answers, capsys, monkeypatch, when):
    answers(*RIGHT, BROKEN)
    draw, run, calls = sys.modules["qjax.generation"].sample, engine.prompt_steps, []

    def drawn(logits, sampling, history, number, allowed):
        if (when, len(calls), number) == ("answer", 2, 1):
            signal.raise_signal(signal.SIGINT)
        return draw(logits, sampling, history, number, allowed)

    def pressed(tokens, sequence=None, **options):
        calls.append(sequence)
        if len(calls) == {"prompt": 4, "proof": 10, "control": 16}.get(when):
            signal.raise_signal(signal.SIGINT)
        return run(tokens, sequence, **options)

    monkeypatch.setattr("qjax.generation.sample", drawn)
    monkeypatch.setattr(engine, "prompt_steps", pressed)
    before = signal.getsignal(signal.SIGINT)
    assert main(["demo", "--tokens", TOKENS]) == 130
    shown = capsys.readouterr()
    assert len(calls) == {"answer": 2, "prompt": 4, "proof": 10, "control": 16}[when]
    assert "interrupted" in shown.err
    assert "differing bits" not in shown.out
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("bits", "control", "holds"), [(0, 5, True), (1, 5, False), (0, 0, False)])
def test_the_proof_needs_its_control(bits, control, holds):
    proof = demo.Proof(bits, 7, control, "It is gone.", 1024, 5, 17_123)
    assert proof.holds == holds
    assert proof.lines([])[-1] == f"warm against cold: {bits} differing bits in 1,024 logits, 5 sections, 17,123 rows"
    assert proof.lines([])[-2].endswith(", where there must be some") == (control == 0)


def test_a_length_over_the_limit_is_told(engine, capsys):
    assert main(["demo", "--tokens", "3100"]) == 2
    assert "this engine's limit is 3,072" in capsys.readouterr().err


def test_as_a_program(compile_cache):
    """On a grid that the common head does not reach, as by default: the second session finds what the guest left. It goes on after a restart."""
    flags = ["--grid", "512", "--context-tokens", "4096", "--kv-gb", "0.004", "--compile-cache", str(compile_cache)]
    done = subprocess.run([sys.executable, "-m", "qjax.cli", "demo", "--tokens", "1300", *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    steps = STEPS | {"a guest": "cold", "a second session": "guest", "after a restart": "spill"}
    shown = rows(lines, steps)
    assert [row["source"] for row in shown] == list(steps.values())
    assert {row["bits"] for row in shown} == {0}
    assert shown[-1]["again"] == 0
    assert shown[-1]["read"] < 64
    assert LAST_LINE.fullmatch(lines[-1])
    assert CONTROL.fullmatch(lines[-2])
