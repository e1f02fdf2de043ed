"""Measures what a resume saves: the time to the first token cold and warm, by length and by where the state was kept.

Two conversations of one length take turns in an engine with caches, and every request is timed as its user sees it: from
`generate` to the first token. A case that is not served from where it should be is an error, not a figure. Beside each warm
turn stands the bare forward of its new tokens, in the same round: a slot that is open already runs what the turn ran. A hit in the
pool copies nothing; one in the state store, where a session goes that the pool gave up, copies it back, and that is part of its time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from qjax.caches.store import ID_BYTES, snapshot_bytes
from qjax.config import EngineConfig
from qjax.engine import Engine
from qjax.ledger import Record
from qjax.model.qwen3_5 import layout
from qjax.model.source import Model
from qjax.state import BLOCK
from qjax.state import Sequence as State

CASES = {"same_prompt": 0, "next_turn_20": 20, "next_turn_200": 200, "parked": 20, "guest_between": 20, "store": 100}
"""New tokens of each case, among them the answer's last one where it was drawn and not forwarded."""
ANSWER = 4
"""Tokens of an answer, at the most."""
COLD_ROUNDS = 3
"""Cold prefills with the caches, and as many without: at 32,768 tokens one takes longer than all warm cases together."""


@dataclass(frozen=True)
class Turn:
    """One request. seconds: to its first token. record: the ledger's, None without caches. sequence: its end, held."""

    seconds: float
    record: Record | None
    tokens: list[int]
    sequence: State


@dataclass
class Conversation:
    """What was said so far. prompt: of its last request; tokens: with the answer. sequence: the end of that, held."""

    prompt: list[int]
    tokens: list[int]
    sequence: State

    @property
    def end(self) -> str:
        """Where the next turn goes on: at the end of the answer, or of the prompt where the model said nothing."""
        return "end" if int(self.sequence.length) > len(self.prompt) else "prompt"


@dataclass
class Case:
    """A case's measurements, in seconds: to the first token, of the bare forward, and of the lookup with what it copied, in bytes."""

    sources: set[str] = field(default_factory=set)
    read_again: int = 0
    copied: int = 0
    warm: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.sources.add(turn.record.source)
        self.read_again = max(self.read_again, turn.record.read_again)
        self.warm.append(turn.seconds)
        self.lookup.append(turn.record.lookup_seconds)


def growth(rounds: int) -> int:
    """Tokens by which a conversation is longer after so many rounds, at the most."""
    return ANSWER + rounds * sum(new + ANSWER for new in CASES.values())


def sized(model: Model, config: EngineConfig, tokens: Sequence[int], rounds: int) -> EngineConfig:
    """The config with a page pool that two conversations of the longest length fit."""
    longest = min(max(tokens) + growth(rounds) + 1, model.config.context)
    pages = 2 * -(-longest // config.grid) + 2
    return dataclasses.replace(config, context_tokens=longest, kv_gb=pages * layout(model.config, config.grid).page_bytes / 2**30)


def check(engine: Engine, tokens: Sequence[int], rounds: int) -> None:
    """ValueError where the engine has no caches, or cannot hold two conversations of a length."""
    if engine.caches is None:
        raise ValueError("expected an engine with caches, found one without")
    page, more, most = engine.layout.page_bytes, growth(rounds), engine.caches.store.entry_bytes
    for length in tokens:
        if not BLOCK <= length < engine.limit - more:
            raise ValueError(
                f"{rounds} rounds add up to {more:,} tokens to a prompt: this engine's limit of {engine.limit:,} (--context-tokens) "
                f"allows prompts of {BLOCK} to {engine.limit - more - 1:,}, found {length:,}"
            )
        pages = 2 * -(-(length + more + 1) // engine.layout.grid) + 2
        if engine.pool.pages < pages:
            raise ValueError(
                f"two conversations of {length:,} tokens need {pages} pages, {pages * page / 2**30:.2f} GiB: "
                f"found {engine.pool.pages} pages of {engine.pool.nbytes / 2**30:.2f} GiB (--kv-gb)"
            )
        if (size := snapshot_bytes(engine.layout, length + more)) > most:
            wanted = f"a snapshot of {length:,} tokens and their answers needs {size / 2**30:.2f} GiB"
            raise ValueError(f"{wanted}: found {most / 2**30:.2f} GiB for one in the state store (--store-entry-gb, --cache-budget-gb)")


def ask(engine: Engine, prompt: list[int], max_tokens: int = ANSWER) -> Turn:
    begin = time.perf_counter()
    generation = engine.generate(prompt, max_tokens=max_tokens)
    steps = iter(generation)
    next(steps, None)
    seconds = time.perf_counter() - begin
    for _ in steps:
        pass
    record = engine.caches.ledger.records[-1] if engine.caches else None
    return Turn(seconds, record, generation.tokens, generation.sequence)


def forward_seconds(engine: Engine, sequence: State, new: list[int]) -> float:
    """Seconds of the forwards that `generate` runs for new tokens after a sequence, in a slot that is open, up to the logits."""
    tokens = np.array(new, np.int32)
    slot = engine.open(sequence)
    try:
        engine.make_room(slot)
        slot.step(tokens[:1])  # not taken: by now the slot has its own page to write in, and its state is there
        slot.accept([])
        end = slot.length + tokens.size
        begin = time.perf_counter()
        while slot.length < end:
            rest = tokens[slot.length - end :]
            if n := slot.prompt_step(rest.size):
                slot.step(rest[:n], logits=n == rest.size)
                if n == rest.size:
                    break
                slot.accept(rest[:n])
                engine.make_room(slot)
                continue
            n, shape = slot.plan(rest.size)
            hidden, _ = slot.prefill(rest[:n], shape)
            if n == rest.size:
                slot.logits(hidden, n - 1)
            else:
                engine.make_room(slot)
                hidden.block_until_ready()
        return time.perf_counter() - begin
    finally:
        slot.close()


def expect(name: str, turn: Turn, source: str, new: int) -> None:
    """RuntimeError where a request was not served as its case says."""
    record = turn.record
    found = record.source, record.prompt_tokens - record.start
    if found != (source, new):
        raise RuntimeError(
            f"{name}, {record.prompt_tokens:,} tokens: expected {new:,} new ones and source {source}, found {found[1]:,} and {found[0]}: {record}"
        )


def paired(over: list[float], under: list[float]) -> float:
    """The median of the rounds' ratios: what slows the machine down for a while slows both of a round."""
    return median(a / b for a, b in zip(over, under, strict=True))


class Length:
    """The measurements at one length of the prompt."""

    def __init__(self, engine: Engine, tokens: int):
        self._engine, self._tokens, self._random = engine, tokens, np.random.default_rng(tokens)
        self._talks: dict[str, Conversation] = {}
        self.cold: dict[bool, list[float]] = {True: [], False: []}  # with the caches, and without
        self.cases = {name: Case() for name in CASES}

    def _words(self, count: int) -> list[int]:
        # below the special tokens, which some models answer with an end
        return self._random.integers(0, min(256, self._engine.model.tokenizer.size), count).tolist()

    def _say(self, talk: str, prompt: list[int]) -> Turn:
        """Asks with a prompt of a conversation, which goes on from it."""
        turn = ask(self._engine, prompt)
        before, self._talks[talk] = self._talks.get(talk), Conversation(prompt, prompt + turn.tokens, turn.sequence)
        if before is not None:
            self._engine.release(before.sequence)
        return turn

    def prefill(self, rounds: int, progress: Callable[[str], None]) -> None:
        """Cold prefills, with the caches and without in turn. The last leaves the first conversation."""
        engine, prompt = self._engine, self._words(self._tokens)
        order = [i % 4 in (0, 3) for i in range(2 * rounds)][::-1]  # in turn who goes first, so that a drift hits both alike
        for i, cached in enumerate(order):
            progress(f"{self._tokens:,} tokens, cold {i + 1} of {len(order)}")
            self.close()
            caches, engine.caches = engine.caches, engine.caches if cached else None
            try:
                turn = self._say("first", prompt)
            finally:
                engine.caches = caches
            self.cold[cached].append(turn.seconds)
            if cached:
                expect("cold", turn, "cold", self._tokens)

    def round(self) -> None:
        """Every case once. The first of them starts the other conversation."""
        there = "second" in self._talks
        turn = self._next("second", 20) if there else self._say("second", self._words(self._tokens))
        expect("the other conversation", turn, *(("parked", 20) if there else ("cold", self._tokens)))
        self._turn("parked", "parked")
        turn = self._say("first", self._talks["first"].prompt)
        expect("same_prompt", turn, "prompt", 0)
        self.cases["same_prompt"].add(turn)
        self._turn("next_turn_20")
        self._turn("next_turn_200")
        guest = ask(self._engine, self._words(max(1, min(512, self._tokens // 8))))
        self._engine.release(guest.sequence)
        self._turn("guest_between")
        expect("the other conversation", self._next("second", 20), "parked", 20)
        self._from_store()

    def _following(self, talk: str, new: int) -> list[int]:
        before = self._talks[talk]
        return before.tokens + self._words(int(before.sequence.length) + new - len(before.tokens))

    def _next(self, talk: str, new: int) -> Turn:
        return self._say(talk, self._following(talk, new))

    def _turn(self, name: str, source: str | None = None) -> None:
        """A turn of the first conversation, and after it the bare forward from where it began: it has the page as its own.

        Where the other conversation had its turn before, a bare forward of it comes before the bare one too: else its rows would lie in
        the processor's cache, as those of the turn did not.
        """
        engine, case, end, other = self._engine, self.cases[name], self._talks["first"].end, self._talks["second"]
        before = engine.hold(self._talks["first"].sequence)
        try:
            turn = self._next("first", CASES[name])
            expect(name, turn, source or end, CASES[name])
            case.add(turn)
            if name == "parked":
                forward_seconds(engine, other.sequence, self._words(CASES[name]))
            case.bare.append(forward_seconds(engine, before, self._talks["first"].prompt[int(before.length) :]))
        finally:
            engine.release(before)

    def _from_store(self) -> None:
        """A turn of the first conversation, which is parked, after the pool gave it up. The bare forward runs before that."""
        engine, case = self._engine, self.cases["store"]
        prompt, before = self._following("first", CASES["store"]), self._talks.pop("first").sequence
        try:
            case.bare.append(forward_seconds(engine, before, prompt[int(before.length) :]))
        finally:
            engine.release(before)
        resident = engine.caches.resident
        engine.caches.make_room(lambda: all(session is resident.resident for session in resident.sessions))
        turn = self._say("first", prompt)
        expect("store", turn, "store", CASES["store"])
        case.add(turn)
        case.copied = snapshot_bytes(engine.layout, turn.record.start) - turn.record.start * ID_BYTES

    def close(self) -> None:
        for talk in self._talks.values():
            self._engine.release(talk.sequence)
        self._talks = {}
        self._engine.caches.clear()

    def found(self) -> dict:
        cold = median(self.cold[True])
        cases = [
            {
                "name": name,
                "source": " ".join(sorted(case.sources)),
                "new_tokens": CASES[name],
                "read_again": case.read_again,
                "copied_bytes": case.copied,
                "lookup_s": median(case.lookup),
                "warm_s": median(case.warm),
                "ratio": cold / median(case.warm),
                "over_forward": median(case.warm) / median(case.bare) if case.bare else None,
            }
            for name, case in self.cases.items()
        ]
        return {"tokens": self._tokens, "cold_s": cold, "cases": cases, "caching_cost": paired(self.cold[True], self.cold[False])}


def measure(engine: Engine, tokens: Sequence[int] = (8192, 32768), rounds: int = 3, *, progress: Callable[[str], None] = lambda text: None) -> dict:
    """What `qjax bench resume --json` prints; times in seconds, medians over the rounds.

    tokens: lengths of the cold prompts. With one length its figures stand at the top as well. lookup_s: of the search in all tiers
    and the taking of what was found, which from the store copies copied_bytes into the pool. ValueError where the engine is too
    small, RuntimeError where a case was not served from where it should be. Leaves the caches empty.
    """
    check(engine, tokens, rounds)
    runs = []
    for n in tokens:
        at = Length(engine, n)
        try:
            engine.caches.clear()
            engine.release(ask(engine, at._words(min(n, engine.layout.grid + BLOCK + 1))).sequence)  # the programs' first calls
            at.prefill(min(rounds, COLD_ROUNDS), progress)
            for i in range(rounds):
                progress(f"{n:,} tokens, warm round {i + 1} of {rounds}")
                at.round()
            runs.append(at.found())
        finally:
            at.close()
    return {"model": engine.model.name, "rounds": rounds, "runs": runs, **(runs[0] if len(runs) == 1 else {})}
