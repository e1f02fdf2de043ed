"""The flags of `qjax bench`, by what it measures."""

import argparse
import dataclasses

from qjax.cli_flags import MODEL, engine, lengths, positive

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
# and those of them with files on a modelled drive
NVME_REPLAYS = {
    "nvme": "the default budgets, the disk tier and the session spill",
    "nvme, no spill": "the same without the session spill",
    "nvme, lru": "what the tiers write, given up by its last use alone, in the bytes of both their budgets",
    "nvme, all, lru": "every grid line and every request's end written, given up so",
}
ON_NVME = ("disk_gb", "disk_min_tokens", "admit_after", "session_spill", "spill_gb", "spill_min_tokens", "staging_gb")

DISK = "~/.cache/qjax"

# what `qjax bench storage` measures: what it is
STORED = {
    "raw": "files of the same bytes, written and read with O_DIRECT by four threads: the limit",
    "write": "pages of random bits as the disk tier writes them, until they are durable",
    "restore": "the same pages into a page pool, their sums and key ids checked",
    "ratio": "the rate over raw's, taken one after the other: the median of the rounds",
}


def flags(parser):
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (what, model, tokens, rounds) in BENCHES.items():
        one = kinds.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        one.add_argument("--model", default=model, help=f"{MODEL} (default {model})")
        one.add_argument("--json", action="store_true", help="print one JSON object")
        listed = ",".join(map(str, tokens))
        one.add_argument("--tokens", metavar="N,N", type=lengths, default=tokens, help=f"lengths of the prompts (default {listed})")
        one.add_argument("--rounds", metavar="N", type=positive, default=rounds, help=f"how often everything is measured in turn (default {rounds})")
        engine(one, caches=name == "resume")
    _replay(kinds)
    _storage(kinds)
    _restart(kinds)


def _restart(kinds):
    what = "time to the first token of a conversation after a restart, from its files, and what writing them costs a cold prompt"
    one = kinds.add_parser("restart", help=what, description=f"{what[0].upper()}{what[1:]}.")
    one.add_argument("--model", default="embedded", help=f"{MODEL} (default embedded)")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--tokens", metavar="N", type=positive, default=32768, help="length of the prompt (default 32768)")
    one.add_argument("--rounds", metavar="N", type=positive, default=5, help="cold prompts with the tier and without it (default 5)")
    one.add_argument("--restarted", metavar="DIR", help=argparse.SUPPRESS)  # what the command starts of itself
    engine(one, caches=True)


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
    one.add_argument("--pages", metavar="N", type=positive, default=15, help="pages of the chain (default 15)")
    one.add_argument("--rounds", metavar="N", type=positive, default=5, help="how often everything is measured in turn (default 5)")
    one.add_argument("--json", action="store_true", help="print one JSON object")


def _replay(kinds):
    from qjax.config import CacheConfig, DiskConfig

    what = "a trace through the caches' lookup and placement at the 27B model's sizes, with modelled seconds; runs no model"
    one = kinds.add_parser(
        "replay",
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog="\n".join(["runs:", *(f"  {name:<18}{meaning}" for name, meaning in (REPLAYS | NVME_REPLAYS).items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument(
        "trace",
        metavar="TRACE",
        help="a file of JSON lines in Mooncake's or Qwen-Bailian's format, or agent[:SESSIONS[:SEED]] for generated agent traffic (agent:32:0)",
    )
    one.add_argument("--first", metavar="N", type=positive, help="replay the first N requests only")
    one.add_argument("--write", metavar="FILE", help="write the trace in Mooncake's format too")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--kv-gb", metavar="X", type=float, default=16.0, help="page pool in GiB (default 16: 262,144 tokens)")
    one.add_argument("--memory-only", action="store_true", help="leave the runs with files out")
    one.add_argument("--restart-every", metavar="N", type=positive, help="a planned stop and a new start after every N requests")
    CacheConfig.add_flags(one)
    group = one.add_argument_group("caches on NVMe, modelled: no file is written or read")
    for f in dataclasses.fields(DiskConfig):
        if f.name in ON_NVME:
            group.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **f.metadata)
