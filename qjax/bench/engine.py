"""Measures an engine: cold prefill and decode by length, as shares of what the machine can do, and what row purity costs.

The machine is shared with whatever else runs on it, so everything is measured in rounds, each of which takes every
measurement once, decode steps in turn token by token: a neighbour's load hits all alike. A limit of the machine is the best
value of all rounds, a figure of the model the median. The order of the steps is shuffled. The plain step of one row takes its
turns alone: it widens every weight in memory, and who comes after it pays (the engine's step 92 ms instead of 80).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from qjax.bench.machine import Machine, decode_bytes, prefill_flops
from qjax.bench.plain import PlainStep, plain_state
from qjax.engine import Engine
from qjax.state import BLOCK
from qjax.state import Sequence as State

WIDTHS = (1, 2, 4, 8, 16)
CONTEXT = 1024
"""Context at which the cost of purity is measured."""
LEAD = 2
"""Tokens before a context at which decoding begins: the first is not timed, and a block is closed within every round."""
STEPS = 10
"""Decode steps of a round, LEAD among them."""


class Decoder:
    """The engine's own greedy steps, one token a call; `begin` goes back to the sequence. Takes over the hold on it."""

    def __init__(self, engine: Engine, sequence: State, logits: np.ndarray):
        self._engine, self._sequence, self._first = engine, sequence, int(logits.argmax())
        self._slot = None

    def begin(self) -> None:
        self.end()
        self._slot, self._token = self._engine.open(self._sequence), self._first

    def __call__(self) -> bool:
        """True where the step had to wait for the block before it to be closed."""
        closed = self._slot.length % BLOCK == 0
        logits = self._slot.step([self._token])[0]
        self._slot.accept([self._token])
        self._token = int(logits.argmax())
        return closed

    def end(self) -> None:
        if self._slot is not None:
            self._slot.close()
            self._slot = None

    def release(self) -> None:
        self.end()
        self._engine.release(self._sequence)


class PlainDecoder:
    """Greedy steps of the plain baseline at one width from a sequence at a block line, on rows and a state of its own."""

    def __init__(self, engine: Engine, sequence: State, logits: np.ndarray, width: int):
        self._length, self._first = int(sequence.length), int(logits.argmax())
        pages = np.array(sequence.pages)
        # the page after them takes the new rows where the sequence ends on the grid
        pool = {name: jnp.concatenate([view[pages], jnp.zeros_like(view[:1])]) for name, view in engine.pool.views.items()}
        self._kept = pool, plain_state(sequence)
        self._table = np.arange(len(pages) + 1, dtype=np.int32)
        self._tokens = np.zeros(width, np.int32)
        self._run = PlainStep(engine.forward, pool, self._table, width)

    def begin(self) -> None:
        self._running = jax.tree.map(jnp.copy, self._kept)
        self._at, self._token = self._length, self._first

    def __call__(self) -> bool:
        self.logits()
        return False

    def logits(self) -> np.ndarray:
        """One step: the logits float32 [V] after the greedy token of the step before."""
        tokens = self._tokens.copy()
        tokens[0] = self._token
        logits, *self._running = self._run(*self._running, self._table, tokens, np.int32(self._at), np.int32(1))
        logits = np.asarray(logits)[0]
        self._at, self._token = self._at + 1, int(logits.argmax())
        return logits


@dataclass
class Times:
    """Seconds of single steps, those apart that waited for a block to be closed."""

    steps: list[float] = field(default_factory=list)
    closing: list[float] = field(default_factory=list)

    def add(self, step: Callable[[], bool]) -> None:
        begin = time.perf_counter()
        closed = step()
        (self.closing if closed else self.steps).append(time.perf_counter() - begin)

    @property
    def seconds(self) -> float:
        """Of one token: the median step, and once in a block what closing it adds."""
        step = median(self.steps)
        return step + max(0.0, median(self.closing) - step) / BLOCK if self.closing else step


def measure(
    engine: Engine,
    tokens: Sequence[int] = (1024, 4096),
    rounds: int = 5,
    *,
    context: int = CONTEXT,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """What `qjax bench engine --json` prints; rates in tokens, 1e9 operations and 1e9 bytes a second.

    tokens: lengths of the cold prefills, and the contexts of the decode steps. context: a multiple of the block at which the
    engine's step is compared with the plain one. ValueError where a length does not fit the engine.
    """
    longest = engine.limit - STEPS
    for length in (*tokens, context):
        if not BLOCK <= length <= longest:
            raise ValueError(f"expected lengths of {BLOCK} to {longest:,} tokens for this engine, found {length:,}")
    c = engine.model.config
    prompts = {n: np.random.default_rng(n).integers(0, engine.model.tokenizer.size, n, dtype=np.int32) for n in sorted({*tokens, context})}

    progress("preparing")
    machine = Machine(c.dtype)
    decoders, plain = {}, {}
    prefills, steps = {n: [] for n in tokens}, {}
    try:
        for n, prompt in prompts.items():
            progress(f"reading {n:,} tokens")
            sequence, logits = engine.prefill(prompt[: n - LEAD])
            decoders[n] = Decoder(engine, sequence, logits)
            if n == context:
                sequence, logits = engine.prefill(prompt, sequence)
                progress("compiling the plain steps")
                try:
                    plain = {width: PlainDecoder(engine, sequence, logits, width) for width in WIDTHS}
                finally:
                    engine.release(sequence)
        running = decoders | {("plain", width): decoder for width, decoder in plain.items()}
        steps, shuffle = {name: Times() for name in running}, Random(0)
        for i in range(rounds):
            progress(f"round {i + 1} of {rounds}: machine")
            machine.measure()
            for n in prefills:
                progress(f"round {i + 1} of {rounds}: prefill of {n:,} tokens")
                begin = time.perf_counter()
                sequence, _ = engine.prefill(prompts[n])
                prefills[n].append(time.perf_counter() - begin)
                engine.release(sequence)
            progress(f"round {i + 1} of {rounds}: decode")
            for decoder in running.values():
                decoder.begin()
                decoder()
            alone = ("plain", 1)
            for _ in range(STEPS - 1):
                for name in shuffle.sample(sorted(running.keys() - {alone}, key=str), len(running) - 1):
                    steps[name].add(running[name])
            for _ in range(STEPS - 1):
                steps[alone].add(running[alone])
            for decoder in decoders.values():
                decoder.end()
    finally:
        for decoder in decoders.values():
            decoder.release()

    own, widths = steps[context].seconds, {width: steps["plain", width].seconds for width in WIDTHS}
    cold = {n: median(seconds) for n, seconds in prefills.items()}
    return {
        "model": engine.model.name,
        "rounds": rounds,
        "peak_gflops": machine.peak_gflops,
        "read_gb_s": machine.read_gb_s,
        "prefill": [
            {"tokens": n, "tokens_per_s": n / seconds, "of_peak": prefill_flops(c, n) / seconds / 1e9 / machine.peak_gflops}
            for n, seconds in cold.items()
        ],
        "decode": [
            {
                "context": n,
                "tokens_per_s": 1 / steps[n].seconds,
                "of_bandwidth": decode_bytes(c, n) / steps[n].seconds / 1e9 / machine.read_gb_s,
            }
            for n in tokens
        ],
        "purity_cost": own / min(widths.values()),
        "purity": {"context": context, "engine_ms": 1e3 * own, "plain_ms": [{"width": w, "ms": 1e3 * s} for w, s in widths.items()]},
    }
