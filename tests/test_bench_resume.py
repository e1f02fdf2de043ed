"""`qjax bench resume`: every figure comes from the hit that it is named after, and the bare forward is the one that the turn ran."""

import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from qjax.bench import resume
from qjax.bench.resume import CASES, Length, ask, expect, forward_seconds, growth, measure, sized
from qjax.caches.lookup import Caches
from qjax.cli import parser
from qjax.commands import bench as command
from qjax.config import CacheConfig, EngineConfig
from qjax.model.source import load
from qjax.slot import Slot
from tests.models import prompt


@pytest.fixture
def cached(engine):
    """The embedded model's engine with caches; the test leaves nothing held, in them or outside."""
    engine.caches = Caches(engine.pool, CacheConfig())
    yield engine
    engine.caches = None


@pytest.fixture
def forwards(monkeypatch) -> list[tuple]:
    """The forwards that slots run, as they come: ("prefill", rows, shape), ("step", rows, None), ("logits", row, None)."""
    seen = []

    def note(name: str, count):
        plain = getattr(Slot, name)

        def noted(self, *args, **more):
            seen.append((name, *count(*args)))
            return plain(self, *args, **more)

        monkeypatch.setattr(Slot, name, noted)

    note("prefill", lambda tokens, shape, marks=(): (len(tokens), shape))
    note("step", lambda tokens: (len(tokens), None))
    note("logits", lambda hidden, row: (row, None))
    return seen


def test_every_case_is_measured_at_every_length(cached):
    said = []
    found = measure(cached, (256, 512), 1, progress=said.append)
    assert found == json.loads(json.dumps(found))
    assert (found["model"], found["rounds"], [run["tokens"] for run in found["runs"]]) == ("embedded", 1, [256, 512])
    assert "cases" not in found
    for run in found["runs"]:
        cases = {case["name"]: case for case in run["cases"]}
        sources = {"same_prompt": "prompt", "next_turn_20": "end", "next_turn_200": "end", "parked": "parked", "guest_between": "end"}
        sources["store"] = "store"
        assert {name: case["source"] for name, case in cases.items()} == sources
        assert {name: case["new_tokens"] for name, case in cases.items()} == CASES
        assert all(case["read_again"] == 0 for case in cases.values())
        assert [name for name, case in cases.items() if case["over_forward"] is None] == ["same_prompt"]
        assert all(case["ratio"] == run["cold_s"] / case["warm_s"] for case in cases.values())
        # the store's turn goes on from a length between these two, in an open block or not
        least, most = (n * cached.layout.row_bytes + cached.layout.section_bytes for n in (run["tokens"], run["tokens"] + growth(1)))
        assert least < cases.pop("store")["copied_bytes"] < most + cached.layout.open_bytes
        assert not any(case["copied_bytes"] for case in cases.values())
        named = ("lookup_s", "warm_s", "ratio", "over_forward")
        figures = [run["cold_s"], run["caching_cost"], *(case[name] for case in run["cases"] for name in named)]
        assert all(math.isfinite(figure) and figure > 0 for figure in figures if figure is not None)
    assert "512 tokens, warm round 1 of 1" in said


def test_one_length_stands_at_the_top_too(cached):
    found = measure(cached, (200,), 2)
    assert {name: found[name] for name in ("tokens", "cold_s", "cases", "caching_cost")} == found["runs"][0]


def test_figures_are_medians_by_hand():
    at = Length(SimpleNamespace(), 4096)
    at.cold = {True: [4.0, 6.0, 5.0], False: [5.0, 4.0, 4.0]}
    for case in at.cases.values():
        case.warm, case.sources, case.read_again, case.lookup, case.copied = [0.2, 0.1, 0.9], {"prompt", "end"}, 3, [0.3, 0.1, 0.2], 7
    at.cases["parked"].bare = [0.4, 0.1, 0.1]
    found = at.found()
    assert (found["tokens"], found["cold_s"], found["caching_cost"]) == (4096, 5.0, 1.25)
    parked = next(case for case in found["cases"] if case["name"] == "parked")
    figures = {"source": "end prompt", "new_tokens": 20, "read_again": 3, "copied_bytes": 7, "lookup_s": 0.2, "warm_s": 0.2}
    figures |= {"ratio": 25.0, "over_forward": 2.0}
    assert parked == {"name": "parked"} | figures


@pytest.mark.parametrize("new", [1, 5, 20, 63, 64, 200, 300])
@pytest.mark.parametrize("length", [130, 190, 256])
def test_the_bare_forward_is_what_the_turn_runs(cached, forwards, length, new):
    tokens = prompt(length).tolist()
    first = ask(cached, tokens)
    following = [*first.sequence.tokens.tolist(), *prompt(new, seed=3).tolist()]
    forwards.clear()
    turn = ask(cached, following, 1)
    ran = list(forwards)
    expect("turn", turn, "end", new)
    forwards.clear()
    assert forward_seconds(cached, first.sequence, following[-new:]) > 0
    assert forwards[0] == ("step", 1, None)  # not timed: the page, and a state that is there
    assert forwards[1:] == ran
    for one in (first, turn):
        cached.release(one.sequence)
    cached.caches.clear()


def test_the_bare_forward_leaves_the_kept_sequence_alone(cached):
    """The turn after it goes on at the same end, with the same answer."""
    first = ask(cached, prompt(200).tolist())
    following = [*first.sequence.tokens.tolist(), *prompt(20, seed=3).tolist()]
    expected = cached.prefill(following)
    forward_seconds(cached, first.sequence, prompt(40, seed=4).tolist())
    turn = ask(cached, following, 1)
    expect("turn", turn, "end", 20)
    assert turn.tokens == [int(expected[1][: cached.model.tokenizer.size].argmax())]
    for sequence in (first.sequence, turn.sequence, expected[0]):
        cached.release(sequence)
    cached.caches.clear()


def test_a_case_that_comes_from_elsewhere_is_an_error(cached):
    """The control: a park that holds nothing. The fixture checks that no page is left held."""
    cached.caches = Caches(cached.pool, CacheConfig(resident_park_gb=0, resident_pin_gb=0))
    with pytest.raises(RuntimeError, match=r"parked, 5.. tokens: expected 20 new ones and source parked, found 20 and store: Record\("):
        measure(cached, (512,), 1)


def test_a_session_that_the_store_lost_is_an_error(cached, monkeypatch):
    """Control of the case `store`: emptied when the pool has given the session up, it cannot be where the turn came from."""
    make_room = cached.caches.make_room
    monkeypatch.setattr(cached.caches, "make_room", lambda enough: make_room(enough) and cached.caches.store.clear())
    with pytest.raises(RuntimeError, match=r"store, 8.. tokens: expected 100 new ones and source store, found 8.. and cold: Record\("):
        measure(cached, (512,), 1)


def test_the_caches_are_back_after_an_error_in_a_cold_prefill(cached, monkeypatch):
    caches, plain = cached.caches, resume.ask

    def fail(engine, *args):
        if engine.caches is None:
            raise OSError("stop here")
        return plain(engine, *args)

    monkeypatch.setattr(resume, "ask", fail)
    with pytest.raises(OSError, match="stop here"):
        measure(cached, (256,), 1)
    assert cached.caches is caches


@pytest.mark.parametrize(("rounds", "order"), [(1, "-+"), (2, "+--+"), (3, "-++--+")])
def test_cold_prefills_take_turns_and_the_last_one_is_kept(cached, monkeypatch, rounds, order):
    plain, seen = resume.ask, []
    monkeypatch.setattr(resume, "ask", lambda engine, *args: seen.append("+" if engine.caches else "-") or plain(engine, *args))
    at = Length(cached, 128)
    at.prefill(rounds, lambda text: None)
    assert "".join(seen) == order
    assert cached.caches.resident.resident.length == int(at._talks["first"].sequence.length)
    at.close()


def test_an_engine_that_is_too_small_is_refused_before_any_work(cached, monkeypatch):
    monkeypatch.setattr(cached, "generate", lambda *_, **__: pytest.fail("nothing may be computed"))
    for length in (63, 1024 - growth(1)):
        with pytest.raises(ValueError, match=rf"\(--context-tokens\) allows prompts of 64 to {1023 - growth(1)}, found {length}"):
            measure(cached, (length,), 1)
    cached.caches = Caches(cached.pool, CacheConfig(store_entry_gb=1e-4))
    with pytest.raises(
        ValueError, match=r"a snapshot of 512 tokens and their answers needs 0.00 GiB: found 0.00 GiB for one in the state store \(--store"
    ):
        measure(cached, (512,), 1)
    monkeypatch.setattr(cached.pool, "pages", 15)
    with pytest.raises(ValueError, match=r"two conversations of 512 tokens need 18 pages, .* found 15 pages of .* \(--kv-gb\)"):
        measure(cached, (512,), 1)
    cached.caches = None
    with pytest.raises(ValueError, match="expected an engine with caches"):
        measure(cached, (512,), 1)


def test_the_pool_is_sized_for_two_conversations():
    model = load("embedded")
    config = sized(model, EngineConfig(grid=128), (256, 512), 1)
    pages, sequence, limit = config.pages(resume.layout(model.config, 128), model.config.context)
    assert (pages, sequence, limit) == (18, 8, 512 + growth(1) + 1)
    assert config.grid == 128


def test_the_flags():
    args = parser().parse_args(["bench", "resume", "--tokens", "64,2048", "--rounds", "1", "--resident-park-gb", "1"])
    assert (args.tokens, args.rounds, args.model, args.json, args.resident_park_gb) == ([64, 2048], 1, "random:0.8b@8", False, 1.0)
    args = parser().parse_args(["bench", "resume"])
    assert (args.tokens, args.rounds) == ([8192, 32768], 5)


SAME = {"name": "same_prompt", "source": "prompt", "new_tokens": 0, "read_again": 0, "copied_bytes": 0, "lookup_s": 0.0004}
SAME |= {"warm_s": 0.0015, "ratio": 5333.3, "over_forward": None}
CASE = {"name": "next_turn_20", "source": "end", "new_tokens": 20, "read_again": 7, "copied_bytes": 0, "lookup_s": 0.0006}
CASE |= {"warm_s": 0.1502, "ratio": 53.2, "over_forward": 1.0449}
STORE = CASE | {"name": "store", "source": "store", "copied_bytes": 141_557_760, "lookup_s": 0.0456}
FOUND = {"model": "a model", "rounds": 3, "runs": [{"tokens": 8192, "cold_s": 8.0, "cases": [SAME, CASE, STORE], "caching_cost": 1.0024}]}


def test_the_command_sizes_the_engine_and_prints_json_or_a_table(monkeypatch, capsys):
    started, model = [], load("embedded")
    monkeypatch.setattr(command, "load", lambda name: model)
    monkeypatch.setattr(command, "Engine", lambda *args: started.append(args))
    monkeypatch.setattr(resume, "measure", lambda engine, tokens, rounds, progress: FOUND)
    flags = ["bench", "resume", "--tokens", "512", "--rounds", "1", "--grid", "128"]
    assert command.run(parser().parse_args([*flags, "--json"])) == 0
    assert json.loads(capsys.readouterr().out) == FOUND
    assert command.run(parser().parse_args([*flags, "--kv-gb", "1.5", "--resident-park-gb", "3"])) == 0
    assert "same_prompt" in capsys.readouterr().out
    (_, config, caches), (_, given, park) = started
    assert (config, caches) == (sized(model, EngineConfig(grid=128), [512], 1), CacheConfig())
    assert (given.kv_gb, given.context_tokens, park.resident_park_gb) == (1.5, config.context_tokens, 3.0)


def test_the_table_says_all_of_it():
    out = io.StringIO()
    command.show_resume(FOUND, Console(file=out, width=120))
    wanted = "a model|8,192 tokens|3 rounds|8.00 s|prompt|1.5 ms|5,333|next_turn_20|end|20|7|150.2 ms|53|1.045|1.002 times".split("|")
    wanted += ["lookups took up to 0.60 ms", "the store's 45.6 ms, in which it copied 135.0 MiB into the pool"]
    assert not [part for part in wanted if part not in out.getvalue()]


def test_words_are_no_special_tokens(cached):
    """An answer that ends at once would leave nothing to go on from."""
    special = set(cached.model.tokenizer.special.values())
    assert not special & set(np.unique(Length(cached, 4096)._words(4096)).tolist())
