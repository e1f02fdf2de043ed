"""The engine: prefill on the grid, decode, verify. One thread owns it and its page pool.

engine = Engine(load("embedded"))
sequence, logits = engine.prefill(tokens)
for token in (run := engine.generate(tokens, sequence, max_tokens=100)):
    print(token.text, end="")
longer = run.sequence
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from qjax.config import EngineConfig
from qjax.forward import Forward
from qjax.generation import Cancelled, Generation, Progress
from qjax.model.qwen3_5 import layout
from qjax.model.source import Model
from qjax.pages import PagePool
from qjax.programs import Programs, Shapes, use_compile_cache
from qjax.sampling import Sampling
from qjax.slot import Slot
from qjax.state import Sequence


class ContextOverflow(ValueError):
    """A prompt that leaves no room for an answer; raised before any work."""

    def __init__(self, tokens: int, limit: int):
        super().__init__(f"the prompt has {tokens:,} tokens; this engine's limit is {limit:,} with the answer's (--context-tokens, --kv-gb)")
        self.tokens, self.limit = tokens, limit


@dataclass(frozen=True)
class Prefilled:
    """A slot after a prompt's last row, and that row's logits: float32 [V]. start: tokens that were not read again."""

    slot: Slot
    logits: np.ndarray
    start: int
    seconds: float


class Engine:
    """Runs one model. Sequences that it returns hold their pages until `release`."""

    def __init__(self, model: Model, config: EngineConfig | None = None):
        """Compiles every program; ValueError where the page pool cannot hold one page."""
        config = config or EngineConfig()
        use_compile_cache(config.compile_cache)
        self.model, self.layout = model, layout(model.config, config.grid)
        pages, sequence_pages, self.limit = config.pages(self.layout, model.config.context)
        begin = time.perf_counter()
        self.programs = Programs(Shapes(model.config, self.layout, pages, sequence_pages))
        self.forward = Forward(self.programs, model.params)
        self.compile_seconds = time.perf_counter() - begin
        self.pool = PagePool(self.layout, pages)

    def empty(self) -> Sequence:
        """The sequence of no tokens."""
        return Sequence.empty(self.layout)

    def hold(self, sequence: Sequence) -> Sequence:
        """Keeps a sequence's pages for one more holder."""
        self.pool.hold(sequence.pages)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Gives up one hold; pages that nobody holds are free."""
        self.pool.release(sequence.pages)

    def open(self, sequence: Sequence | None = None) -> Slot:
        """A slot that goes on from a sequence, which stays as it is."""
        return Slot(self.forward, self.pool, self.empty() if sequence is None else sequence)

    def check(self, tokens: Tokens[int], sequence: Sequence | None = None) -> np.ndarray:
        """The prompt as int32 [n], or a ValueError that says what is wrong with it; nothing has been computed by then."""
        tokens = np.asarray(tokens)
        if tokens.size == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"a prompt is a list of token ids, found {tokens.dtype} {list(tokens.shape)}")
        vocabulary = self.model.config.vocab
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            bad = int(np.argmax((tokens < 0) | (tokens >= vocabulary)))
            raise ValueError(f"token ids are 0 to {vocabulary - 1}: found {tokens[bad]} at {bad}")
        if tokens.size >= self.limit:
            raise ContextOverflow(tokens.size, self.limit)
        if sequence is not None:
            have = sequence.tokens
            same = have[: tokens.size] == tokens[: have.size]
            if not same.all():
                at = int(np.argmin(same))
                raise ValueError(f"the sequence is no prefix of the prompt: at {at} it has token {have[at]}, the prompt {tokens[at]}")
            if have.size >= tokens.size:
                raise ValueError(f"the sequence has {have.size} tokens and the prompt {tokens.size}: the prompt's last token must be forwarded")
        return tokens.astype(np.int32)

    def run_prompt(
        self,
        tokens: Tokens[int],
        sequence: Sequence | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Prefilled:
        """Forwards what `sequence` does not have of the prompt, in a slot that the caller closes. Raises Cancelled between forwards."""
        tokens = self.check(tokens, sequence)
        begin = time.perf_counter()
        slot = self.open(sequence)
        try:
            start = slot.length
            logits = None

            def report():
                if progress:
                    progress(Progress(slot.length, tokens.size, start, time.perf_counter() - begin))

            report()
            while slot.length < tokens.size:
                if cancel and cancel():
                    raise Cancelled(self.hold(slot.freeze()))
                rest = tokens[slot.length :]
                if rest.size <= slot.verify_room():
                    logits = slot.step(rest)[-1]
                    slot.accept(rest)
                else:
                    n, shape = slot.plan(rest.size)
                    hidden = slot.prefill(rest[:n], shape)
                    if n == rest.size:
                        logits = slot.logits(hidden, n - 1)
                    else:
                        hidden.block_until_ready()  # keeps the queue short: a cancel and the progress are then true
                report()
        except BaseException:
            slot.close()
            raise
        return Prefilled(slot, logits, start, time.perf_counter() - begin)

    def prefill(self, tokens: Tokens[int], sequence: Sequence | None = None, *, progress=None, cancel=None) -> tuple[Sequence, np.ndarray]:
        """The sequence after a whole prompt, held for the caller, and its last row's logits: float32 [V].

        sequence: a value whose tokens are a proper prefix of the prompt; it is not read again and stays as it is.
        """
        done = self.run_prompt(tokens, sequence, progress=progress, cancel=cancel)
        try:
            return self.hold(done.slot.freeze()), done.logits
        finally:
            done.slot.close()

    def generate(
        self,
        tokens: Tokens[int],
        sequence: Sequence | None = None,
        *,
        sampling: Sampling | None = None,
        max_tokens: int = 512,
        stop: Tokens[str] = (),
        progress: Callable[[Progress], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Generation:
        """An answer to a prompt, token by token as it is iterated; see Generation for what it then holds."""
        tokens = self.check(tokens, sequence)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {max_tokens}")
        return Generation(self, tokens, sequence, sampling or Sampling(), min(max_tokens, self.limit - tokens.size), stop, progress, cancel)
