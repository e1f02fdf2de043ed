"""The `qjax` command: what it takes, and how it fails. What a subcommand does is in qjax/commands, imported only when it runs."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from qjax import process

# Whatever imports JAX, which takes seconds, is imported by the functions that need it: `entry` runs before.

MODEL = "a directory (Hugging Face's, or one made by `qjax convert`), 'embedded', or 'random:PRESET' (random:0.8b; random:9b@8 is its first 8 layers)"
SAMPLING = {
    "temperature": (float, "0 takes the most likely token"),
    "top_k": (int, "draw from this many tokens only; 0 is off"),
    "top_p": (float, "draw from the fewest tokens with this much probability together"),
    "min_p": (float, "draw from tokens with at least this share of the largest probability"),
    "presence_penalty": (float, "subtracted from the logits of tokens that were generated"),
    "repetition_penalty": (float, "divides the logits of tokens that were read or generated"),
    "seed": (int, "the same seed draws the same tokens"),
}

# name: (what it measures, default model, lengths, rounds)
BENCHES = {
    "engine": ("cold prefill and decode rates by length, and what row purity costs a decode step", "embedded", [1024, 4096], 5),
    "resume": ("time to the first token cold and warm, by length and by where the state was kept", "random:0.8b@8", [8192, 32768], 5),
}

# what `qjax bench replay` runs a trace through: what it is
REPLAYS = {
    "infinite budgets": "the caches with all the room that they want",
    "default budgets": "the caches with the pool and the budgets of the flags",
    "infinite cache": "every row and a state after each kept for ever: what could be reused at all",
    "lru snapshots": "whole snapshots of requests' ends, the least recently used given up first, in as many bytes as pool and budgets have",
    "chapter rules": "one resident prompt with anchors on the grid, one parked session, one pinned head, a store of snapshots; the same budgets",
}

DISK = "~/.cache/qjax"

# what `qjax bench storage` measures: what it is
STORED = {
    "raw": "files of the same bytes, written and read with O_DIRECT by four threads: the limit",
    "write": "pages of random bits as the disk tier writes them, until they are durable",
    "restore": "the same pages into a page pool, their sums and key ids checked",
    "ratio": "the rate over raw's, taken one after the other: the median of the rounds",
}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, found {text!r}")
    return int(text)


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _engine(parser, caches: bool = False, disk: bool = False) -> None:
    from qjax.config import CacheConfig, DiskConfig, EngineConfig

    EngineConfig.add_flags(parser)
    if caches:
        CacheConfig.add_flags(parser)
    if disk:
        DiskConfig.add_flags(parser)


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
    _engine(parser)


def _demo(parser):
    parser.add_argument("--tokens", metavar="N", type=_positive, default=16384, help="length of the first prompt, at least (default 16384)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--restarted", metavar="DIR", help=argparse.SUPPRESS)  # what the command starts of itself
    _engine(parser, caches=True)


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
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text as it comes")


def _bench(parser):
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (what, model, tokens, rounds) in BENCHES.items():
        one = kinds.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        one.add_argument("--model", default=model, help=f"{MODEL} (default {model})")
        one.add_argument("--json", action="store_true", help="print one JSON object")
        listed = ",".join(map(str, tokens))
        one.add_argument("--tokens", metavar="N,N", type=_lengths, default=tokens, help=f"lengths of the prompts (default {listed})")
        one.add_argument("--rounds", metavar="N", type=_positive, default=rounds, help=f"how often everything is measured in turn (default {rounds})")
        _engine(one, caches=name == "resume")
    _replay(kinds)
    _storage(kinds)
    _restart(kinds)


def _restart(kinds):
    what = "time to the first token of a conversation after a restart, from its files, and what writing them costs a cold prompt"
    one = kinds.add_parser("restart", help=what, description=f"{what[0].upper()}{what[1:]}.")
    one.add_argument("--model", default="embedded", help=f"{MODEL} (default embedded)")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--tokens", metavar="N", type=_positive, default=32768, help="length of the prompt (default 32768)")
    one.add_argument("--rounds", metavar="N", type=_positive, default=5, help="cold prompts with the tier and without it (default 5)")
    one.add_argument("--restarted", metavar="DIR", help=argparse.SUPPRESS)  # what the command starts of itself
    _engine(one, caches=True)


def _storage(kinds):
    what = "how near the caches' files on NVMe come to what the disk gives, at the 27B model's sizes; runs no model"
    one = kinds.add_parser(
        "storage",
        help=what,
        description=f"{what[0].upper()}{what[1:]}. About a minute; writes some 4 GiB at a time to a directory of its own, and removes it.",
        epilog="\n".join(["what is measured:", *(f"  {name:<12}{meaning}" for name, meaning in STORED.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("--directory", metavar="DIR", default=DISK, help=f"a directory on the disk to measure (default {DISK})")
    one.add_argument("--pages", metavar="N", type=_positive, default=15, help="pages of the chain (default 15)")
    one.add_argument("--rounds", metavar="N", type=_positive, default=5, help="how often everything is measured in turn (default 5)")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def _replay(kinds):
    from qjax.config import CacheConfig

    what = "a trace through the caches' lookup and placement at the 27B model's sizes, with modelled seconds; runs no model"
    one = kinds.add_parser(
        "replay",
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog="\n".join(["runs:", *(f"  {name:<18}{meaning}" for name, meaning in REPLAYS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument(
        "trace",
        metavar="TRACE",
        help="a file of JSON lines in Mooncake's or Qwen-Bailian's format, or agent[:SESSIONS[:SEED]] for generated agent traffic (agent:32:0)",
    )
    one.add_argument("--first", metavar="N", type=_positive, help="replay the first N requests only")
    one.add_argument("--write", metavar="FILE", help="write the trace in Mooncake's format too")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--kv-gb", metavar="X", type=float, default=16.0, help="page pool in GiB (default 16: 262,144 tokens)")
    CacheConfig.add_flags(one)


def _ledger(parser):
    from qjax.ledger import SOURCES, Why

    parser.add_argument("file", metavar="FILE", help="file of a ledger: a line of JSON a request")
    parser.add_argument("--last", metavar="N", type=_positive, help="show the last N requests only; the totals stay those of the whole file")
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
        if (found := reads["disk_cache"](text)) is None:
            raise argparse.ArgumentTypeError(f"expected a directory or a bucket, found {text!r}")
        return found

    where = "directory of a disk cache, one model's or all, or a bucket, s3://BUCKET/PATH or gs://BUCKET/PATH (default ~/.cache/qjax/states)"
    parser.add_argument("disk_cache", metavar="DIR", nargs="?", type=place, help=where)
    parser.add_argument("--disk-endpoint", metavar="URL", help="server of an s3:// bucket that is not Amazon's")
    parser.add_argument("--all", action="store_true", help="show every line of a long list")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with everything")
    parser.add_argument("--explain", metavar="KEY", help="say of one entry, named by the beginning of its key, what it is and why it is kept")
    parser.add_argument("--verify", action="store_true", help="read every entry and check its sums; status 1 where one is damaged")
    group = parser.add_argument_group(
        "pruning", "Removes what no engine can use, and what these say; not while an engine has the directory. With --verify also what is damaged."
    )
    group.add_argument("--prune", action="store_true", help="remove entries; alone it removes only what the next engine would remove too")
    group.add_argument("--disk-days", type=reads["disk_days"], metavar="N", help="what was not used for N days")
    group.add_argument("--disk-gb", type=reads["disk_gb"], metavar="X", help="heads, the least valuable first, until X GiB are left of them")
    group.add_argument(
        "--spill-gb", type=reads["spill_gb"], metavar="X", help="conversations, the longest unused first, until X GiB are left of them"
    )
    group.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    columns = {
        "key": "the beginning of the entry's key, as --explain takes it",
        "what": "head: a state that prompts begin with; conversation: a whole one, with its states, each a part",
        "tokens": "how many tokens' state it is",
        "bytes": "what would go with it: its own and the pages of rows that nothing else stands on; the summary counts shared ones too",
        "hits": "prompts that it served, as an engine noted last",
        "age": "time since its last use",
        "value": "its hits plus one, times the tokens that it saves a MiB, halved for every day unused; the least valuable head goes first",
    }
    parser.add_argument_group("columns", "\n".join(f"{name:<12}{meaning}" for name, meaning in columns.items()))


def _generation(parser):
    parser.add_argument("--model", default="embedded", help=f"{MODEL} (default embedded)")
    parser.add_argument("--max-tokens", metavar="N", type=_positive, default=512, help="longest answer in tokens (default 512)")
    group = parser.add_argument_group("sampling")
    for name, (read, text) in SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), type=read, metavar="N" if read is int else "X", default=argparse.SUPPRESS, help=text)
    _engine(parser, caches=True, disk=True)


# name: (what it does, flags, examples)
COMMANDS = {
    "demo": ("shows on the embedded model what each cache answers, how much sooner, and that every bit is a cold run's", _demo, ["qjax demo"]),
    "chat": (
        "talks with a model in the terminal; each turn reads only what is new",
        _chat,
        ["qjax chat --no-thinking", "qjax chat --model ~/models/Qwen3.5-0.8B --temperature 0.7 --top-p 0.8 --top-k 20"],
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
        _bench,
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
    args = parser().parse_args(argv)
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
        print(f"qjax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nqjax: interrupted; nothing that was saved is lost", file=sys.stderr)
        return 130


def entry() -> int:
    """What the `qjax` command starts."""
    process.begin()
    process.tune()
    return main()


if __name__ == "__main__":
    sys.exit(entry())
