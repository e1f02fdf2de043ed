"""What several subcommands' flags have in common."""

import argparse

MODEL = "a directory (Hugging Face's, or one made by `qjax convert`), 'embedded', or 'random:PRESET' (random:0.8b; random:9b@8 is its first 8 layers)"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, found {text!r}")
    return int(text)


def lengths(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def engine(parser, caches: bool = False, disk: bool = False) -> None:
    from qjax.config import CacheConfig, DiskConfig, EngineConfig

    EngineConfig.add_flags(parser)
    if caches:
        CacheConfig.add_flags(parser)
    if disk:
        DiskConfig.add_flags(parser)
