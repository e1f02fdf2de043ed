"""`qjax chat`: a conversation in the terminal. Each turn goes on from the state of the last one."""

import argparse
import contextlib
import importlib
import sys

from rich.console import Console

from qjax.cli import sampling_flags
from qjax.commands.console import Answer, Interrupt, Reading, say, start
from qjax.commands.conversation import Conversation, Turn
from qjax.config import CacheConfig, DiskConfig, EngineConfig
from qjax.engine import Engine
from qjax.sampling import Sampling

HELP = """/new    begin again
/back   take the last question and its answer back
/help   this list
/quit   leave, as Ctrl-D does; Ctrl-C stops an answer"""


def run(args: argparse.Namespace) -> int:
    flags, config, caches = sampling_flags(args), EngineConfig.from_flags(args), CacheConfig.from_flags(args)
    Sampling(**flags)  # a wrong flag is told before anything is loaded
    disk = DiskConfig.from_flags(args)
    console = Console(highlight=False)
    with start(args.model, config, console, caches, disk) as engine:
        talk(args, engine, flags, console)
    return 0


def talk(args: argparse.Namespace, engine: Engine, flags: dict, console: Console) -> None:
    """Questions and answers until the end of the input."""
    sampling = Sampling(**engine.model.generation | flags)
    conversation = Conversation(engine, system=args.system, thinking=args.thinking, sampling=sampling, max_tokens=args.max_tokens)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # gives `input` its line editing and history; not on every platform
            importlib.import_module("readline")
    say(console, "/help lists the commands, Ctrl-D leaves", "dim")
    with Interrupt() as interrupt:
        while (line := ask(console, interrupt)) is not None:
            if line.startswith("/") and " " not in line:
                if line == "/quit":
                    break
                say(console, command(conversation, line), "dim")
            elif line:
                answer(console, conversation, line, interrupt)


def ask(console: Console, interrupt: Interrupt) -> str | None:
    """The user's next line without its edges, None at the end."""
    try:
        with interrupt.lifted():
            line = input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        say(console, "\nCtrl-D or /quit leaves", "dim")
        return ""
    if not sys.stdin.isatty():
        print(line)  # a terminal shows what is typed by itself
    return line.strip()


def command(conversation: Conversation, line: str) -> str:
    """Does what a line with a slash says; returns what to tell the user."""
    if line == "/help":
        return HELP
    if line == "/new":
        conversation.clear()
        return "a new conversation"
    if line == "/back":
        return "taken back" if conversation.back() else "there is nothing to take back"
    return f"there is no {line}; /help lists the commands"


def answer(console: Console, conversation: Conversation, text: str, interrupt: Interrupt) -> None:
    """One turn, streamed, and a line on what it took. A text that cannot be answered is told and leaves the conversation as it was."""
    reading, shown = Reading(console), Answer(console)
    try:
        turn = conversation.say(text, progress=reading, cancel=interrupt)
        for piece in turn:
            shown.show(*piece)
    except ValueError as e:
        say(console, f"{e}; /new begins again, /back takes the last turn back", "red")
        return
    finally:
        reading.close()
        shown.close()
    say(console, summary(turn, interrupt.name), "dim")


def summary(turn: Turn, signal: str) -> str:
    """What a turn took, in one line: tokens read again, time to the first token, rate, and whatever was out of the ordinary.

    signal: what stopped it, where something did.
    """
    if turn.finish == "cancelled" and not turn.tokens:
        return "stopped while reading; the question is taken back"
    parts = [f"{turn.read:,} of {turn.prompt.size:,} prompt tokens read", f"the first token after {turn.first_token_seconds:.2f} s"]
    if turn.decode_seconds and len(turn.tokens) > 1:
        parts.append(f"{len(turn.tokens):,} tokens, {(len(turn.tokens) - 1) / turn.decode_seconds:,.0f}/s")
    if turn.rewritten is not None:
        parts.append(f"the template writes the last answer otherwise from token {turn.rewritten:,} on")
    if not turn.tokens:
        parts.append("an empty answer")
    if turn.finish != "stop":
        parts.append({"length": "ended by --max-tokens or the end of the context", "cancelled": f"stopped by {signal}"}[turn.finish])
    return "; ".join(parts)
