"""What the commands share on a terminal: starting an engine, Ctrl-C as a request, a prefill's progress, an answer as it streams."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from qjax import generation
from qjax.compile_cache import faults
from qjax.config import CacheConfig, DiskConfig, EngineConfig
from qjax.engine import Engine
from qjax.model.qwen3_5 import layout
from qjax.model.source import find, load
from qjax.process import ENDING, Ended

HANG_UP = getattr(signal, "SIGHUP", None)
SHORT = 512  # tokens to read that need no progress: they take less than a line takes to read


def say(console: Console, text: str, style: str = "", end: str = "\n") -> None:
    """Prints text as it stands: nothing in it is markup, and no line is broken."""
    console.print(Text(text, style=style), end=end, soft_wrap=True)


def check(spec: str, config: EngineConfig, caches: CacheConfig | None = None) -> None:
    """ValueError, before any weights are read, where there is no such model or the settings do not fit it."""
    if caches is not None:
        caches.check(config.grid)
    _, model = find(spec)
    if model.attention_layers:  # without one `load` refuses it
        config.pages(layout(model, config.grid), model.context)


def start(spec: str, config: EngineConfig, console: Console, caches: CacheConfig | None = None, disk: DiskConfig | None = None) -> Engine:
    """Loads a model and compiles its programs; two dim lines say how long that took. caches, disk: None for an engine that keeps nothing there.

    A third line says what an earlier program left on NVMe, where it left anything.
    """
    check(spec, config, caches)
    model = load(spec)
    say(console, f"{model.name}: loaded in {model.load_seconds:.1f} s", "dim")
    with Waiting():
        say(console, "compiling (a minute or two the first time) ... ", "dim", end="")
        try:
            engine = Engine(model, config, caches, disk)
        except (Exception, SystemExit):  # the error begins a line; Ctrl-C ends this one by itself
            say(console, "")
            raise
        kept = "".join(f", {part}" for part in (config.compile_cache and f"kept in {_short(config.compile_cache)}", faults()) if part)
        say(console, f"{len(engine.programs.compiled)} programs in {engine.compile_seconds:.1f} s{kept}", "dim")
    if engine.limit < (wanted := config.context_tokens or model.config.context):
        say(console, f"the longest sequence is {engine.limit:,} tokens, not {wanted:,}: the page pool holds no more (--kv-gb)", "dim")
    if found := on_nvme(engine):
        say(console, found, "dim")
    return engine


class Waiting(logging.Handler):
    """Inside the `with` what is logged waits for the end of a line that is being shown, where it would go to standard error by itself."""

    def __enter__(self) -> "Waiting":
        self._records: list[logging.LogRecord] = []
        self._root = logging.getLogger()
        self._root.addHandler(self)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        if self._root.handlers == [self] and logging.lastResort and record.levelno >= logging.lastResort.level:
            self._records.append(record)

    def __exit__(self, *error) -> None:
        self._root.removeHandler(self)
        for record in self._records:
            logging.lastResort.handle(record)


def on_nvme(engine: Engine) -> str:
    """What lies on NVMe for this engine, in a line; empty where nothing does."""
    if engine.caches is None or engine.caches.nvme is None:
        return ""
    found, resident = engine.caches.nvme.stats(), engine.caches.resident.resident
    if not found["anchors"]:
        return ""
    back, size = f", the last one with {resident.length:,} tokens is read back" if resident else "", found["disk_bytes"] + found["spill_bytes"]
    return f"on NVMe: {found['sessions']} conversations and {found['anchors']} states in {size / 2**30:.2f} GiB{back}"


def _short(path: Path) -> str:
    with contextlib.suppress(RuntimeError, ValueError):  # no home, or not in it
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


class Interrupt:
    """A signal as a request to stop: inside the `with` the first one makes calls of this object True, and a second one ends it at once.

    Ctrl-C, SIGTERM, and a hang-up, which is no second one: a shell passes it on to its jobs when its terminal goes, and so they get it twice.
    One that is ignored, as Ctrl-C is in a shell's background job, stays so.

    An interrupt in the middle of a forward would lose the page pool, which the forward has taken over by then.
    """

    def __init__(self):
        self._asked: int | None = None
        self._lifted = False

    def __call__(self) -> bool:
        return self._asked is not None

    @property
    def ends(self) -> bool:
        """Whether it is the program that is to end, and not what runs alone."""
        return self._asked in ENDING

    @property
    def name(self) -> str:
        """Of what was asked."""
        return "Ctrl-C" if self._asked in (None, signal.SIGINT) else signal.Signals(self._asked).name

    def end(self) -> NoReturn:
        """Raises what the signal that asked raises elsewhere: KeyboardInterrupt, or process.Ended."""
        raise Ended(self._asked) if self.ends else KeyboardInterrupt

    def __enter__(self) -> "Interrupt":
        self._asked, self._before = None, {}
        if threading.current_thread() is threading.main_thread():  # which alone takes signals in Python
            self._before = {n: handler for n in (signal.SIGINT, *ENDING) if (handler := signal.getsignal(n)) is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._ask)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, a signal raises at once, as does one that asked before, unless it is Ctrl-C; afterwards nothing has been asked yet."""
        self._lifted = True
        try:
            if self.ends:
                self.end()
            self._asked = None
            yield
        finally:
            self._lifted = False

    def _ask(self, number, frame) -> None:
        if number == HANG_UP:
            self._before[number] = signal.SIG_IGN  # after the block too, where what was computed is being kept
        if self._lifted or (self._asked is not None and number != HANG_UP):
            raise Ended(number) if number in ENDING else KeyboardInterrupt
        if self._asked in (None, signal.SIGINT):
            self._asked = number


class Reading:
    """Shows a long prefill: a bar on a terminal, else a line at each quarter. Give it as `progress`; `close` it whatever happened."""

    def __init__(self, console: Console):
        self._console, self._bar, self._shown = console, None, 0

    def __call__(self, now: generation.Progress) -> None:
        wanted, done = now.total - now.start, now.done - now.start
        if wanted < SHORT:
            return
        if not self._console.is_terminal:
            quarter = 4 * done // wanted
            if quarter > self._shown:
                self._shown = quarter
                say(self._console, f"  read {done:,} of {wanted:,} tokens, {now.rate:,.0f} tokens/s", "dim")
            return
        if self._bar is None:
            columns = "reading", BarColumn(40), TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens, {task.fields[rate]:,.0f} tokens/s")
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._task = self._bar.add_task("", total=wanted, rate=0)
            self._bar.start()
        self._bar.update(self._task, completed=done, rate=now.rate, refresh=True)
        if done == wanted:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Answer:
    """Prints an answer as its pieces come: the reasoning dim, then a blank line and the content, neither with blank lines at its edges.

    speaker: printed before the first text.
    """

    def __init__(self, console: Console, speaker: str = ""):
        self._console, self._speaker, self._part, self._blank = console, speaker, None, ""

    def show(self, reasoning: str, content: str) -> None:
        self._put("reasoning", reasoning, "dim italic")
        self._put("content", content, "")

    def _put(self, part: str, text: str, style: str) -> None:
        if part != self._part:
            text = text.lstrip()
            if not text:
                return
            if self._part is None:
                say(self._console, self._speaker, "cyan", end="")
            else:
                say(self._console, "\n")
            self._part, self._blank = part, ""
        text = self._blank + text
        bare = text.rstrip()
        self._blank = text[len(bare) :]  # shown only if more follows
        if bare:
            say(self._console, bare, style, end="")

    def close(self) -> None:
        """Ends the last line."""
        if self._part is not None:
            say(self._console, "")
