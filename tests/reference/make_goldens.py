"""Make the golden files: what transformers computes for the tiny models of configs.py, in float32 with eager attention.

    python -m tests.reference.make_goldens            write tests/reference/*.npz
    python -m tests.reference.make_goldens --check    compute again and compare with the files

One file for each model and prompt length: tokens [T], rows [R] and logits [R, V] of these rows, S [Lg, Hv, dk, dv], conv [Lg, C, 3],
K and V [La, kv_heads, T, head_dim], all after one whole forward. Every run also repeats the prompt in chunks and token by token: how far
transformers then is from itself is its noise floor, printed and bounded. Needs torch and transformers (`make reference` installs both and
does the same as --check, as tests); tests/test_reference.py, which reads the files, needs neither.
"""

import argparse
import sys

import numpy as np
import torch
import transformers

from tests.reference import reference
from tests.reference.configs import CASES
from tests.reference.distance import distance, faults


def run(model, case, length, pairs):
    """The prompt in the forwards `pairs` of (start, stop): logits of the rows that are kept [R, V] and the state, float32 arrays by name."""
    cache = reference.empty_cache(model)
    tokens = case.tokens(length)
    logits = [reference.forward(model, tokens[start:stop], cache) for start, stop in pairs]
    return {"logits": torch.cat(logits).numpy()[case.rows(length)], **reference.state(cache, case.config["layer_types"])}


def measure(model, case, length):
    """One whole forward, and the distances from it of the same prompt in other cuts: (arrays by name, {cut: distances by name})."""
    whole = run(model, case, length, [(0, length)])
    cuts = {"in chunks": case.chunks(length), "token by token": [(at, at + 1) for at in range(length)]}
    return whole, {name: distance(run(model, case, length, pairs), whole) for name, pairs in cuts.items()}


def stored(case, length):
    """The arrays of a golden file by name. Raises ValueError where it was made for other tokens or rows."""
    with np.load(case.golden(length)) as file:
        arrays = dict(file)
    for name, expected in {"tokens": case.tokens(length), "rows": case.rows(length)}.items():
        if not np.array_equal(arrays.pop(name), expected):
            raise ValueError(f"{case.golden(length).name}: its {name} are not those of configs.py; make the golden files again")
    return arrays


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the stored files instead of writing them")
    options = parser.parse_args()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; largest difference as a share of the largest value")
    found = []
    for case in CASES:
        model = reference.build(case.config, case.tensors())
        for length in case.lengths:
            whole, distances = measure(model, case, length)
            if options.check:
                distances["stored"] = distance(whole, stored(case, length))
            else:
                np.savez_compressed(case.golden(length), tokens=case.tokens(length), rows=case.rows(length), **whole)
            for way, values in distances.items():
                print(f"{case.name}-{length} {way}:".ljust(28), "  ".join(f"{name} {value:.1e}" for name, value in values.items()))
                found += [f"{case.name}-{length} {way}: {fault}" for fault in faults(values)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
