"""The engine: prefill on the grid, decode, verify. One thread owns it and its page pool.

engine = Engine(load("embedded"))
sequence, logits = engine.prefill(tokens)
for token in (run := engine.generate(tokens, sequence, max_tokens=100)):
    print(token.text, end="")
longer = run.sequence
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from qjax.caches.lookup import Caches
from qjax.caches.nvme.disk import Nvme
from qjax.caches.nvme.place import open_storage
from qjax.caches.request import Request
from qjax.compile_cache import use_compile_cache
from qjax.config import GRID, TOKEN, CacheConfig, DiskConfig, EngineConfig
from qjax.forward import Forward
from qjax.generation import Cancelled, Full, Generation, Progress
from qjax.identity import identity
from qjax.interrupts import deferred
from qjax.model.qwen3_5 import layout
from qjax.model.source import Model
from qjax.pages import PagePool
from qjax.probe import Impure, golden, probe
from qjax.programs import MARKS, Programs, Shapes
from qjax.sampling import Sampling, is_whole
from qjax.slot import Slot
from qjax.state import Sequence
from qjax.thought import Thought
from qjax.transcript import Transcript
from storage import StorageError

log = logging.getLogger(__name__)


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
    """Runs one model. Sequences that it returns hold their pages until `release`.

    level: its exactness level. golden: 32 hex digits of the bits of a short prompt, the same at every start where `identity` is.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None, caches: CacheConfig | None = None, disk: DiskConfig | None = None):
        """Compiles every program, and finds the exactness level. caches: None for an engine that keeps nothing. disk: None for one whose
        caches have no tier on NVMe; with one, `close` writes the conversations. ValueError where the page pool cannot hold one page. Raises
        Impure where the level that was asked for does not hold here. A disk cache that can neither be written nor read is told in the log,
        and the engine goes on without it.
        """
        config = config or EngineConfig()
        self.parallel = config.parallel
        use_compile_cache(config.compile_cache)
        self.model, self.layout = model, layout(model.config, config.grid)
        pages, sequence_pages, self.limit = config.pages(self.layout, model.config.context)
        begin = time.perf_counter()
        self.programs = Programs(Shapes(model.config, self.layout, pages, sequence_pages))
        self.forward = Forward(self.programs, model.params)
        self.compile_seconds = time.perf_counter() - begin
        self.pool = PagePool(self.layout, pages)
        if config.exactness == GRID:
            self.level, self.golden = GRID, golden(self.forward, self.pool)
        else:
            self.level, self.golden = probe(self.forward, self.pool)
        if config.exactness == TOKEN != self.level:
            raise Impure("expected level token (--exactness), found grid: here a step's rows have other bits than a prefill's")
        self.caches = None
        if caches is not None:
            try:
                self.caches = self.new_caches(caches, disk and disk.of_model(model.name))
            except StorageError as error:
                log.warning("nothing is kept on NVMe (--disk-cache): %s", error)
                self.caches = self.new_caches(caches)

    def new_caches(self, config: CacheConfig, disk: DiskConfig | None = None) -> Caches:
        """Empty caches over this engine's pool, which it does not use by itself; disk: with what lies there. Raises StorageError."""
        nvme = None
        if disk is not None and disk.disk_cache is not None:
            nvme = Nvme(self.pool, open_storage(disk, self.identity, self.golden), disk, self.level)
        return Caches(self.pool, config, self.level, self.model.tokenizer.decode, nvme)

    @cached_property
    def identity(self) -> dict[str, str]:
        """What must be equal where this engine's bits are kept for another one: name -> text. Computed when it is asked for."""
        return identity(self.model, self.programs, self.level)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """A planned stop: what the caches write to NVMe is written. The engine runs nothing afterwards."""
        if self.caches:
            self.caches.close()

    def abandon(self) -> None:
        """Ends what the caches write to NVMe: what was begun is finished, and nothing else is written. Nothing where `close` was called."""
        if self.caches:
            self.caches.abandon()

    def empty(self) -> Sequence:
        """The sequence of no tokens."""
        return Sequence.empty(self.layout)

    def hold(self, sequence: Sequence) -> Sequence:
        """Keeps a sequence's pages for one more holder. ValueError for one that was released or is another engine's."""
        self.pool.check(sequence)
        self.pool.hold(sequence.pages)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Gives up one hold; pages that nobody holds are free. ValueError for one that was released or is another engine's."""
        self.pool.check(sequence)
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

    def make_room(self, slot: Slot) -> bool:
        """Gives up what the caches keep where the slot's next forward needs a page and none is free; whether it has what it needs."""

        def enough() -> bool:
            return self.pool.free > 0 or not slot.needs_page()

        return self.caches.make_room(enough) if self.caches else enough()

    def run_prompt(self, tokens: Tokens[int], sequence: Sequence | None = None, **options) -> Prefilled:
        """`prompt_steps` from beginning to end, with the same arguments. Raises Cancelled between forwards."""
        steps = self.prompt_steps(tokens, sequence, **options)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value

    def prompt_steps(
        self,
        tokens: Tokens[int],
        sequence: Sequence | None = None,
        *,
        request: Request | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Iterator[Full | None]:
        """Forwards what is not there yet of the prompt, one forward between two yields: None before each, and Full where it has no page.

        Returns Prefilled, whose slot the caller closes. Raises Cancelled where `cancel` says so, which is asked before each forward.
        sequence: a value whose tokens are a proper prefix of the prompt. request: in its place, what the caches found; it is given
        the anchors on the way, at the lines that it marks, every grid line and the prompt's end.
        """
        begin = time.perf_counter()
        restored, slot = request.restored if request else None, None
        logits = restored.logits if restored is not None else None
        try:
            with deferred():  # an interrupt finds the pages with the request or with the slot
                sequence = sequence if restored is None else restored.sequence
                tokens = tokens if logits is not None else self.check(tokens, sequence)
                slot = self.open(sequence)
                if restored is not None:
                    request.restored = None
                    self.release(restored.sequence)
                if request:
                    request.slot = slot
            start = slot.length

            def report():
                if progress:
                    progress(Progress(slot.length, tokens.size, start, time.perf_counter() - begin))

            report()
            while slot.length < tokens.size:
                yield None
                if cancel and cancel():
                    raise Cancelled(self.hold(slot.freeze()))
                if not self.make_room(slot):
                    yield Full(slot)
                    if cancel and cancel():
                        raise Cancelled(self.hold(slot.freeze()))
                rest = tokens[slot.length :]
                if n := slot.prompt_step(rest.size) if self.level == TOKEN else 0:
                    rows = slot.step(rest[:n], logits=n == rest.size)
                    logits = None if rows is None else rows[-1]
                    slot.accept(rest[:n])
                else:
                    n, shape = slot.plan(rest.size)
                    marks = request.marks(slot.length, slot.length + n)[-MARKS:] if request else ()
                    hidden, caught = slot.prefill(rest[:n], shape, marks)
                    if request:
                        request.caught(caught)
                    if n == rest.size:
                        logits = slot.logits(hidden, n - 1)
                    else:
                        hidden.block_until_ready()  # keeps the queue short: a cancel and the progress are then true
                if request and (kind := "prompt" if logits is not None else request.kind_at(slot.length)):
                    request.add(kind, slot.freeze(), logits)
                report()
        except BaseException:
            if slot is not None:
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
        stop: Tokens[str] | str = (),
        tenant: str = "",
        history: int | None = None,
        user: int | None = None,
        session: str | None = None,
        parent: str | None = None,
        parted: str | None = None,
        logprobs: int | None = None,
        thought: Thought | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> Generation:
        """An answer to a prompt, token by token as it is iterated; see Generation for what it then holds.

        With caches and no sequence it goes on from the best that they hold of this tenant. history, user: tokens of the prompt
        without the template's beginning of an answer, and those before the last user message, where the caller knows them: later
        prompts part there. session, parent, parted: as of `Caches.begin`. stop: texts before which it ends, or one. logprobs: with each
        token come its own, and so many of the likeliest's. thought: counts the reasoning and may bound it. ValueError names what is wrong,
        and nothing has been computed by then.
        """
        tokens = self.check(tokens, sequence)
        if not is_whole(max_tokens) or max_tokens < 1:
            raise ValueError(f"max_tokens must be a whole number, at least 1, found {max_tokens!r}")
        if not isinstance(tenant, str):
            raise ValueError(f"tenant must be a text, found {tenant!r}")
        for name, at in (("history", history), ("user", user)):
            if at is not None and not (is_whole(at) and 0 <= at <= tokens.size):
                raise ValueError(f"{name} must be a number of tokens of the prompt, 0 to {tokens.size}, found {at!r}")
        lookup = None
        if self.caches and sequence is None:
            names = {"session": session, "parent": parent, "parted": parted}
            lookup = {"tokens": tokens, "tenant": tenant, "history": history, "user": user} | names
        said, most = Transcript(self.model.tokenizer, stop, thought, logprobs), min(max_tokens, self.limit - tokens.size)
        return Generation(self, tokens, sequence, lookup, sampling or Sampling(), most, said, progress, cancel)
