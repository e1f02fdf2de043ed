"""The `qjax` command: what it takes, and how it fails. What a subcommand does is in qjax/commands, imported only when it runs."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from qjax import cli_bench, config_file, process
from qjax.cli_flags import MODEL, engine, positive
from qjax.flags import WrongSetting

# Whatever imports JAX, which takes seconds, is imported by the functions that need it: `entry` runs before.

SAMPLING = {
    "temperature": (float, "0 takes the most likely token"),
    "top_k": (int, "draw from this many tokens only; 0 is off"),
    "top_p": (float, "draw from the fewest tokens with this much probability together"),
    "min_p": (float, "draw from tokens with at least this share of the largest probability"),
    "presence_penalty": (float, "subtracted from the logits of tokens that were generated"),
    "repetition_penalty": (float, "divides the logits of tokens that were read or generated"),
    "seed": (int, "the same seed draws the same tokens"),
}


def _layout(parser):
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL}, or a preset's bare name (27b, qwen3.8-flash-next)")
    parser.add_argument("--grid", type=int, metavar="N", help="tokens of a page (default 1024, for Flash-Next 4096)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _convert(parser):
    parser.add_argument("source", metavar="SRC", help="directory of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json")
    parser.add_argument("target", metavar="DST", help="directory to make, or an empty one")


def _certify(parser):
    parser.add_argument("--model", default="embedded", help=f"{MODEL} (default embedded)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, metavar="N", help="length of the prompt that is cut up, above a grid and 64 (default a grid and 300)")
    # what the command starts of itself: one outcome in a process of its own, into a file
    parser.add_argument("--dump", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--one-core", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--files", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    engine(parser)


def _demo(parser):
    parser.add_argument("--tokens", metavar="N", type=positive, default=16384, help="length of the first prompt, at least (default 16384)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--restarted", metavar="DIR", help=argparse.SUPPRESS)  # what the command starts of itself
    engine(parser, caches=True)


def _chat(parser):
    _generation(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, default=True, help="whether an answer begins with reasoning (default yes)"
    )


def _generate(parser):
    prompts = "file with a prompt, or - for standard input (the default); several are answered side by side, --parallel of them at once"
    parser.add_argument("files", metavar="FILE", nargs="*", default=["-"], help=prompts)
    _generation(parser)
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be given more than once")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, of several files a list of them, instead of the text as it comes"
    )


def _ledger(parser):
    from qjax.ledger import SOURCES, Why

    parser.add_argument("file", metavar="FILE", help="file of a ledger: a line of JSON a request")
    parser.add_argument("--last", metavar="N", type=positive, help="show the last N requests only; the totals stay those of the whole file")
    parser.add_argument("--json", action="store_true", help="print one JSON object: records and totals")

    def teach(title: str, meanings: dict[str, str]) -> None:
        parser.add_argument_group(title, "\n".join(f"{name:<12}{meaning}" for name, meaning in meanings.items()))

    columns = {
        "prompt": "tokens of the prompt",
        "reused": "those of them that needed no forward",
        "again": "tokens read again although something kept agreed with them",
        "ttft": "seconds to the first token",
        "decode": "seconds of all after the prompt",
        "difference": "the first token at which the nearest kept prompt differs, and what could not be taken",
    }
    teach("columns", columns)
    teach("source, what the reused tokens came from", SOURCES)
    teach("why tokens were read that might have been kept", {why.value: why.meaning for why in Why})


def _cache(parser):
    import dataclasses

    from qjax.config import DiskConfig

    reads = {f.name: f.metadata["type"] for f in dataclasses.fields(DiskConfig) if "type" in f.metadata}

    def place(text: str) -> str:
        if (found := text if Path(text).is_file() else reads["disk_cache"](text)) is None:  # of a file the command says what it lacks
            raise argparse.ArgumentTypeError(f"expected a directory or a bucket, found {text!r}")
        return found

    where = "directory of a disk cache, one model's or all, or a bucket, s3://BUCKET/PATH or gs://BUCKET/PATH (default ~/.cache/qjax/states)"
    parser.add_argument("disk_cache", metavar="DIR", nargs="?", type=place, help=where)
    parser.add_argument("--disk-endpoint", metavar="URL", help="server of an s3:// bucket that is not Amazon's")
    parser.add_argument("--all", action="store_true", help="show every line of a long list")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with everything")
    parser.add_argument("--explain", metavar="KEY", help="say of one entry, named by the beginning of its key, what it is and why it is kept")
    parser.add_argument(
        "--verify", action="store_true", help="read every entry, check its sums and what it stands on; status 1 where something is damaged or missing"
    )
    group = parser.add_argument_group(
        "pruning", "Removes what no engine can use, and what these say; not while an engine has the directory. With --verify also what is damaged."
    )
    group.add_argument("--prune", action="store_true", help="remove entries; alone it removes only what the next engine would remove too")
    group.add_argument("--disk-days", type=reads["disk_days"], metavar="N", help="what was not used for N days")
    group.add_argument("--disk-gb", type=reads["disk_gb"], metavar="X", help="heads, the least valuable first, until X GiB are left of them")
    group.add_argument(
        "--spill-gb", type=reads["spill_gb"], metavar="X", help="conversations, those that are worth least first, until X GiB are left of them"
    )
    group.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    columns = {
        "key": "the beginning of the entry's key, as --explain takes it",
        "what": "head: a state that prompts begin with; conversation: a whole one, with its states, each a part",
        "tokens": "how many tokens' state it is",
        "bytes": "what would go with it: its own and the pages of rows that nothing else stands on; the summary counts shared ones too",
        "hits": "prompts that it served, as an engine noted last",
        "age": "time since its last use",
        "value": "tokens a day that it will save for each MiB, by its age alone; an engine, which learns from what comes, drops the least first",
    }
    parser.add_argument_group("columns", "\n".join(f"{name:<12}{meaning}" for name, meaning in columns.items()))


def _serve(parser):
    from qjax.config import ServeConfig
    from qjax.serving.limits import Limits

    parser.add_argument("--model", default="embedded", help=f"{MODEL} (default embedded)")
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these flags, as in kv-gb = 8; the command line goes before it")
    ServeConfig.add_flags(parser)
    engine(parser, caches=True, disk=True)
    Limits.add_flags(parser)
    parser.set_defaults(parallel=2)


def _generation(parser):
    parser.add_argument("--model", default="embedded", help=f"{MODEL} (default embedded)")
    parser.add_argument("--max-tokens", metavar="N", type=positive, default=512, help="longest answer in tokens (default 512)")
    group = parser.add_argument_group("sampling")
    for name, (read, text) in SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), type=read, metavar="N" if read is int else "X", default=argparse.SUPPRESS, help=text)
    engine(parser, caches=True, disk=True)


# name: (what it does, flags, examples)
COMMANDS = {
    "demo": ("shows on the embedded model what each cache answers, how much sooner, and that every bit is a cold run's", _demo, ["qjax demo"]),
    "chat": (
        "talks with a model in the terminal; each turn reads only what is new",
        _chat,
        ["qjax chat --no-thinking", "qjax chat --model ~/models/Qwen3.5-0.8B --temperature 0.7 --top-p 0.8 --top-k 20"],
    ),
    "serve": (
        "serves a model over HTTP, as OpenAI's API: for coding agents, chat pages and scripts; stops with nothing lost",
        _serve,
        [
            "qjax serve",
            "qjax serve --model ~/models/Qwen3.5-0.8B --port 8080 --kv-gb 8 --parallel 4",
            "qjax serve --config serve.toml --host 0.0.0.0 --key-file keys.txt",
            'curl http://127.0.0.1:8000/v1/chat/completions -d \'{"messages": [{"role": "user", "content": "hello"}]}\'',
        ],
    ),
    "generate": (
        "continues texts from files or standard input, as they stand, with no chat template",
        _generate,
        [
            "qjax generate prompt.txt --max-tokens 100",
            "qjax generate one.txt two.txt --parallel 2 --json",
            "printf 'Once upon a time' | qjax generate --model ~/models/Qwen3.5-0.8B --stop '.'",
        ],
    ),
    "certify": (
        "measures on this machine where a resume is bit-exact, and prints the certificate",
        _certify,
        ["qjax certify", "qjax certify --model random:0.8b@4 --json"],
    ),
    "layout": (
        "prints what a model keeps of a sequence, in bytes; reads no weights",
        _layout,
        ["qjax layout 27b", "qjax layout qwen3.8-flash-next", "qjax layout ~/models/Qwen3.5-0.8B --json"],
    ),
    "convert": (
        "rewrites a Hugging Face checkpoint in the form that the engine loads without any work on it",
        _convert,
        ["qjax convert ~/models/Qwen3.5-0.8B ~/models/Qwen3.5-0.8B-qjax"],
    ),
    "bench": (
        "measures the engine by length, its rates as shares of what this machine can do, what a resume, a restart and a trace save, the disk",
        cli_bench.flags,
        [
            "qjax bench engine",
            "qjax bench engine --model random:0.8b --tokens 1024,4096,16384 --rounds 10 --json",
            "qjax bench resume --tokens 8192",
            "qjax bench replay agent:8",
            "qjax bench replay trace.jsonl --resident-park-gb 12 --json",
            "qjax bench storage --directory /mnt/nvme --json",
        ],
    ),
    "ledger": (
        "shows what each request reused, what it read again, and why",
        _ledger,
        ["qjax ledger requests.jsonl --last 20", "qjax ledger requests.jsonl --json"],
    ),
    "cache": (
        "lists what the caches keep on NVMe, checks it, explains it and removes it; loads no model",
        _cache,
        [
            "qjax cache",
            "qjax cache --explain a-3f09",
            "qjax cache ~/states --verify",
            "qjax cache --prune --disk-days 2 --disk-gb 20 --dry-run",
            "qjax cache --prune --disk-gb 0 --spill-gb 0",
            "qjax cache s3://bucket/states --disk-endpoint http://127.0.0.1:9000 --json",
        ],
    ),
}


def sampling_flags(args: argparse.Namespace) -> dict:
    """The sampling settings that were given on the command line, by the names of Sampling's fields."""
    return {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}


def parser() -> argparse.ArgumentParser:
    from importlib.metadata import version

    top = argparse.ArgumentParser(
        prog="qjax",
        description="JAX inference with functional state for the hybrid Qwen models: a prompt is prefilled once, and warm equals cold bit for bit.",
        epilog="`qjax COMMAND --help` says more, with examples.",
    )
    top.add_argument("--version", action="version", version=f"qjax {version('qjax')}")
    top.add_argument("--debug", action="store_true", help="show where an error came from")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (what, flags, examples) in COMMANDS.items():
        flags(
            commands.add_parser(
                name,
                help=what,
                description=f"{what[0].upper()}{what[1:]}.",
                epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]),
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, what the command says, 2 for wrong input, 130 after Ctrl-C. SystemExit after SIGTERM."""
    try:
        args = parser().parse_args(config_file.expanded(sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        print(f"qjax: error: {error}", file=sys.stderr)
        return 2
    from qjax.pages import PoolFull

    command = importlib.import_module(f"qjax.commands.{args.command}")
    try:
        with process.signals():
            return command.run(args)
    except BrokenPipeError:
        # The reader of the output has gone, as `head` does: no fault. The interpreter's own flush at exit would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, PoolFull) as error:
        if args.debug:
            raise
        print(f"qjax: error: {error.of_flag if isinstance(error, WrongSetting) else error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nqjax: interrupted; nothing that was saved is lost", file=sys.stderr)
        return 130


def entry() -> int:
    """What the `qjax` command starts."""
    process.begin()
    process.tune()
    try:
        return main()
    except process.Ended as ended:
        signal.signal(ended.number, signal.SIG_IGN)  # a shell may send it twice
        raise


if __name__ == "__main__":
    sys.exit(entry())
