"""`qjax convert SRC DST`: a Hugging Face checkpoint in the form that loads without any work on it."""

import argparse
import sys

from qjax.model.convert import convert


def run(args: argparse.Namespace) -> int:
    report = convert(args.source, args.target, say=lambda line: print(line, file=sys.stderr))
    print(f"{args.target}: {report.bytes:,} bytes of weights, read back bit for bit")
    print(f"loading took {report.safetensors_seconds:.2f} s from {args.source} and {report.orbax_seconds:.2f} s from {args.target}")
    return 0
