"""`qjax generate [FILE|-]`: continues a plain text; no template."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from qjax.cli import sampling_flags
from qjax.commands.console import Interrupt, Reading, say, start
from qjax.config import CacheConfig, EngineConfig
from qjax.generation import Generation
from qjax.sampling import Sampling
from qjax.text import StopStrings

ENDS = {"stop": "the model or a stop text", "length": "--max-tokens or the end of the context", "cancelled": "Ctrl-C"}


def run(args: argparse.Namespace) -> int:
    """The text goes to standard output as it comes, all else to standard error; with --json one object and nothing else."""
    flags, config, caches = sampling_flags(args), EngineConfig.from_flags(args), CacheConfig.from_flags(args)
    Sampling(**flags), StopStrings(args.stop)  # a wrong flag is told before anything is loaded
    notes = Console(stderr=True, highlight=False, quiet=args.json)
    text = read(args.file, notes)
    engine = start(args.model, config, notes, caches)
    model, reading = engine.model, Reading(notes)
    with Interrupt() as interrupt:
        generation = engine.generate(
            model.tokenizer.encode(text),
            sampling=Sampling(**model.generation | flags),
            max_tokens=args.max_tokens,
            stop=args.stop,
            progress=reading,
            cancel=interrupt,
        )
        try:
            for token in generation:
                if not args.json:
                    print(token.text, end="", flush=True)
        finally:
            reading.close()
            generation.close()
            if generation.sequence is not None:
                engine.release(generation.sequence)
    if args.json:
        print(json.dumps(as_json(engine, generation)))
    else:
        if not generation.text.endswith("\n"):
            print(flush=True)
        say(notes, statistics(generation), "dim")
    return 130 if interrupt() else 0


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
        "load_seconds": engine.model.load_seconds,
        "compile_seconds": engine.compile_seconds,
        "prefill_seconds": generation.prefill_seconds,
        "first_token_seconds": generation.first_token_seconds,
        "decode_seconds": generation.decode_seconds,
    }


def statistics(generation: Generation) -> str:
    """Prompt, time to the first token, rates and the end, in one line."""
    count = len(generation.tokens)
    read = f"{generation.prompt_tokens:,} prompt tokens"
    if generation.prefill_seconds:
        read += f", {generation.prompt_tokens / generation.prefill_seconds:,.0f}/s, the first token after {generation.first_token_seconds:.2f} s"
    wrote = f"{count:,} tokens" + (f", {count / generation.decode_seconds:,.0f}/s" if count and generation.decode_seconds else "")
    return f"{read}; {wrote}; ended by {ENDS[generation.finish]}"
