"""`qjax demo` at a small size: the conversation, the proof, and that it fails when warm is not cold."""

import json
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from qjax.cli import main
from qjax.commands import demo
from qjax.commands import demo_conversation as talk

RIGHT = [talk.answered(fact) for fact in (talk.COLD, talk.READ[1], talk.LAST)]
BROKEN = "It\n\nis gone."
"""The answer of the control, which resumes from a broken state."""
LAST_LINE = re.compile(r"warm against cold: 0 differing bits in 1,024 logits, 5 sections, ([\d,]+) rows")
CONTROL = re.compile(r"control, gdn\.S zeroed before the resume: ([\d,]+) differing bits in 1,024 logits, and the answer \"(.*)\"")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_history_is_as_long_as_asked_and_tells_each_fact_once():
    def count(messages):
        return len(json.dumps(messages))

    messages = talk.history(count, 20_000)
    assert messages == talk.history(count, 20_000)
    assert 20_000 <= count(messages) < 23_000
    assert talk.history(count, 1)[:6] == messages[:6]
    for name, value in talk.FACTS:
        told = [i for i, message in enumerate(messages) if value in json.dumps(message)]
        assert told[:1] == [i for i, message in enumerate(messages) if message == talk.user(talk.TOLD.format(name=name, value=value))]
        assert max(told) < 2 * len(talk.FACTS)
    _, wanted, values = talk.READ
    assert wanted in values
    assert f"{wanted[0]} = {wanted[1]}\n" in talk.second_turn()[-1]["content"]
    assert not any(wanted[1] in json.dumps(message) for message in messages)


def test_three_turns_a_table_and_the_proof(engine, answers, capsys):
    answers(*RIGHT, BROKEN)
    assert main(["demo", "--tokens", "700"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line == f"agent   {answer}" for answer in RIGHT for line in lines) == 3
    assert f"user    {talk.asked(talk.LAST)['content']}" in lines
    assert f"agent   read_file({talk.READ[0]})" in lines
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == ["1", "2", "3", "3, cold"]
    assert [row[4] for row in rows] == ["yes", "yes", "yes", ""]
    sizes, read = ([number(row[column]) for row in rows] for column in (1, 2))
    assert 700 <= sizes[0] < sizes[1] < sizes[2] == sizes[3] == read[3]
    assert read[0] == sizes[0]
    assert read[1] < sizes[1] - sizes[0]
    assert read[2] < sizes[2] - sizes[1]
    assert number(LAST_LINE.fullmatch(lines[-1])[1]) == sizes[2]
    control = CONTROL.fullmatch(lines[-2])
    assert number(control[1]) > 0
    assert control[2] == "It is gone."


def test_wrong_answers_are_shown_as_wrong_and_prove_the_same(engine, answers, capsys):
    answers("The backup key is 1.", "", RIGHT[2], BROKEN)
    assert main(["demo", "--tokens", "300"]) == 0
    shown = capsys.readouterr().out
    assert [line.strip("│").split("│")[4].strip() for line in shown.splitlines() if line.startswith("│")] == ["no", "no", "yes", ""]


def test_a_warm_run_that_differs_fails(engine, answers, capsys, monkeypatch):
    def damaged(console, conversation, tokens):
        turns, before = held(console, conversation, tokens)
        S = np.asarray(before.sections["gdn.S"]).copy()
        S.reshape(-1)[np.flatnonzero(S)[0]] *= 1.01
        return turns, before.replace(sections=before.sections | {"gdn.S": jnp.asarray(S)})

    held = demo.hold_conversation
    monkeypatch.setattr(demo, "hold_conversation", damaged)
    answers(*RIGHT, BROKEN)
    assert main(["demo", "--tokens", "700"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("warm against cold: ")
    assert number(last.split()[3]) > 0


@pytest.mark.parametrize(("bits", "control", "holds"), [(0, 5, True), (1, 5, False), (0, 0, False)])
def test_the_proof_needs_its_control(bits, control, holds):
    proof = demo.Proof(bits, control, "It is gone.", 1024, 5, 17_123, 1.0)
    assert proof.holds == holds
    assert proof.lines()[-1] == f"warm against cold: {bits} differing bits in 1,024 logits, 5 sections, 17,123 rows"
    assert proof.lines()[0].endswith(", where there must be some") == (control == 0)


def test_a_length_over_the_limit_is_told(engine, capsys):
    assert main(["demo", "--tokens", "1600"]) == 2
    assert "this engine's limit is 1,536" in capsys.readouterr().err


def test_as_a_program(engine, flags):
    done = subprocess.run([sys.executable, "-m", "qjax.cli", "demo", "--tokens", "700", *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert LAST_LINE.fullmatch(lines[-1])
    assert CONTROL.fullmatch(lines[-2])
