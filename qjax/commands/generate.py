"""`qjax generate [FILE|-] ...`: continues plain texts; no template."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from qjax.cli import sampling_flags
from qjax.commands.console import Interrupt, Reading, say, start
from qjax.config import CacheConfig, DiskConfig, EngineConfig
from qjax.engine import Engine
from qjax.generation import Generation, Token
from qjax.parallel import Parallel
from qjax.sampling import Sampling
from qjax.text import StopStrings

ENDS = {"stop": "the model or a stop text", "length": "--max-tokens or the end of the context", "failed": "an error"}


def run(args: argparse.Namespace) -> int:
    """The text goes to standard output as it comes, all else to standard error; with --json one object and nothing else.

    Several files run side by side (--parallel); their answers come in the files' order, with --json as a list.
    """
    flags, config, caches = sampling_flags(args), EngineConfig.from_flags(args), CacheConfig.from_flags(args)
    disk = DiskConfig.from_flags(args)
    Sampling(**flags), StopStrings(args.stop)  # a wrong flag is told before anything is loaded
    notes = Console(stderr=True, highlight=False, quiet=args.json)
    texts = [read(file, notes) for file in args.files]
    with start(args.model, config, notes, caches, disk) as engine:
        return answer(args, engine, flags, texts, notes)


def answer(args: argparse.Namespace, engine: Engine, flags: dict, texts: list[str], notes: Console) -> int:
    """The answers to some prompts, on an engine that is there."""
    model, reading, runs = engine.model, Reading(notes), Parallel(engine)
    with Interrupt() as interrupt:
        answers = [
            runs.submit(
                model.tokenizer.encode(text),
                sampling=Sampling(**model.generation | flags),
                max_tokens=args.max_tokens,
                stop=args.stop,
                progress=reading if len(texts) == 1 else None,
                cancel=interrupt,
            )
            for text in texts
        ]
        shown = None if args.json else Shown(answers, args.files, notes, interrupt)
        try:
            for generation, token in runs:
                if token is None:
                    let_go(engine, generation)  # the others may need its pages
                if shown:
                    shown.show(generation, token)
        finally:
            reading.close()
            for generation in answers:
                let_go(engine, generation)
    failed = next((generation.error for generation in answers if generation.error is not None), None)
    if args.json and (len(answers) > 1 or failed is None):
        objects = [as_json(engine, generation) for generation in answers]
        print(json.dumps(objects if len(objects) > 1 else objects[0]))
    if failed is not None:
        raise failed
    if interrupt.ends:
        interrupt.end()
    return 130 if interrupt() else 0


def let_go(engine, generation: Generation) -> None:
    generation.close()
    if generation.sequence is not None:
        engine.release(generation.sequence)
        generation.sequence = None


class Shown:
    """Prints answers in order: the first that has not ended as it comes, then what the next one has said until now."""

    def __init__(self, answers: list[Generation], files: list[str], notes: Console, interrupt: Interrupt):
        self._interrupt = interrupt
        self._left, self._several, self._notes, self._ended = list(zip(files, answers, strict=True)), len(files) > 1, notes, set()
        self._begin("")

    def show(self, generation: Generation, token: Token | None) -> None:
        if token is None:
            self._ended.add(generation)
        elif generation is self._left[0][1]:
            print(token.text, end="", flush=True)
        while self._left and self._left[0][1] in self._ended:
            file, now = self._left.pop(0)
            if not now.text.endswith("\n"):
                print(flush=True)
            if now.error is None:
                say(self._notes, (f"{file}: " if self._several else "") + statistics(now, self._interrupt.name), "dim")
            self._begin("\n")

    def _begin(self, above: str) -> None:
        if self._left and self._several:
            file, now = self._left[0]
            print(f"{above}==> {file} <==\n{now.text}", end="", flush=True)


def read(file: str, notes: Console) -> str:
    """The prompt. ValueError where it is empty or not UTF-8; OSError names a file that cannot be read."""
    name = "standard input" if file == "-" else file
    if file == "-" and sys.stdin.isatty():
        say(notes, "reading the prompt from the keyboard; Ctrl-D ends it", "dim")
    try:
        text = sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_bytes().decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{name}: expected UTF-8 text, found byte {e.object[e.start]:#04x} at {e.start}") from e
    if not text:
        raise ValueError(f"{name}: the prompt is empty")
    return text


def as_json(engine, generation: Generation) -> dict:
    return {
        "model": engine.model.name,
        "text": generation.text,
        "tokens": generation.tokens,
        "finish": generation.finish,
        "prompt_tokens": generation.prompt_tokens,
        "start": generation.start,
        "load_seconds": engine.model.load_seconds,
        "compile_seconds": engine.compile_seconds,
        "prefill_seconds": generation.prefill_seconds,
        "first_token_seconds": generation.first_token_seconds,
        "decode_seconds": generation.decode_seconds,
    } | ({} if generation.error is None else {"error": str(generation.error)})


def statistics(generation: Generation, signal: str) -> str:
    """Prompt, time to the first token, rates and the end, in one line. signal: what cancelled it, where something did."""
    count = len(generation.tokens)
    read = f"{generation.prompt_tokens:,} prompt tokens"
    if generation.prefill_seconds:
        fresh = generation.prompt_tokens - generation.start
        read += (
            f", {fresh:,} of them read at {fresh / generation.prefill_seconds:,.0f}/s"
            if generation.start
            else f", {fresh / generation.prefill_seconds:,.0f}/s"
        )
        read += f", the first token after {generation.first_token_seconds:.2f} s"
    wrote = f"{count:,} tokens" + (f", {count / generation.decode_seconds:,.0f}/s" if count and generation.decode_seconds else "")
    return f"{read}; {wrote}; ended by {ENDS.get(generation.finish, signal)}"
