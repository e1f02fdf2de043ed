"""`qjax layout MODEL`: what a model keeps of a sequence, in bytes. Reads config.json at the most."""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path

from qjax.config import LARGEST_GRID
from qjax.model import qwen3_5, qwen4_exp
from qjax.model.config import ModelConfig
from qjax.model.source import EMBEDDED
from qjax.model.values import CheckpointError, read_json, shortened
from qjax.state import BLOCK, GRIDS, Layout, Section, View, is_grid


def run(args: argparse.Namespace) -> int:
    if args.grid is not None and not is_grid(args.grid):
        raise ValueError(f"--grid must be {GRIDS}, not {args.grid}")
    if args.grid is not None and args.grid > LARGEST_GRID:
        raise ValueError(f"--grid must be at most {LARGEST_GRID:,}, not {args.grid}")
    family, layout = find(args.model)
    if args.grid is not None:
        layout = dataclasses.replace(layout, grid=args.grid)
    print(json.dumps(as_json(args.model, family, layout)) if args.json else table(args.model, family, layout))
    return 0


def find(spec: str) -> tuple[str, Layout]:
    """The model_type and layout of a directory, "embedded", a preset's name, or random:PRESET[@LAYERS]. Raises CheckpointError."""
    directory = EMBEDDED if spec == "embedded" else Path(spec)
    if os.path.isdir(directory) and spec:  # Path's own raises for a name too long; Path("") is the current directory
        path = directory / "config.json"
        values = read_json(path)
        if values.get("model_type") not in qwen4_exp.MODEL_TYPES:
            return _dense(ModelConfig.from_file(path))
        try:
            return values["model_type"], qwen4_exp.layout(values)
        except CheckpointError as e:
            raise CheckpointError(f"{path}: {e}") from e
    if os.path.exists(directory) and spec:
        raise CheckpointError(f"{shortened(spec)}: expected a directory with a config.json, found a file")
    name, layers = re.fullmatch(r"(?:random:)?(.*?)(?:@(\d{1,9}))?", spec, re.DOTALL).groups()
    known = {alias: values for full, values in qwen4_exp.PRESETS.items() for alias in (full, full.split("-", 1)[1])}
    if name.lower() in known:
        if layers is not None:
            raise CheckpointError(f"{spec}: expected the whole model, found a number of layers")
        values = known[name.lower()]
        return values["model_type"], qwen4_exp.layout(values)
    try:
        config = ModelConfig.preset(name)
    except CheckpointError as e:
        raise CheckpointError(f'{e}; a layout also has {", ".join(qwen4_exp.PRESETS)}, "embedded", and a directory with a config.json') from None
    return _dense(config if layers is None else config.with_layers(int(layers)))


def _dense(config: ModelConfig) -> tuple[str, Layout]:
    return config.model_type, qwen3_5.layout(config)


def as_json(model: str, family: str, layout: Layout) -> dict:
    def section(s: Section) -> dict:
        return {"name": s.name, "shape": list(s.shape), "dtype": s.dtype, "bytes": s.nbytes}

    def view(v: View) -> dict:
        return {"name": v.name, "shape": [v.layers, v.heads, v.dim], "dtype": v.dtype, "bytes": v.nbytes}

    return {
        "model": model,
        "model_type": family,
        "grid": layout.grid,
        "block": BLOCK,
        "sections": [section(s) for s in layout.sections],
        "open": [section(s) for s in layout.open],
        "views": [view(v) for v in layout.views],
        "section_bytes": layout.section_bytes,
        "open_bytes": layout.open_bytes,
        "row_bytes": layout.row_bytes,
        "page_bytes": layout.page_bytes,
    }


def table(model: str, family: str, layout: Layout) -> str:
    """The layout as lines of text: name, shape, dtype, bytes."""
    groups = [
        ("sections, copied whole", layout.sections, lambda s: s.shape, layout.section_bytes, "an anchor at a line"),
        (f"open block, the inputs of up to {BLOCK - 1} tokens", layout.open, lambda s: s.shape, layout.open_bytes, "added off a line"),
        ("views, layers × heads × dim of each token", layout.views, lambda v: (v.layers, v.heads, v.dim), layout.row_bytes, "a token"),
    ]
    rows = [
        (title, [(s.name, " × ".join(map(str, shape(s))), s.dtype, s.nbytes) for s in specs], total, what)
        for title, specs, shape, total, what in groups
    ]
    page = f"a page of {layout.grid:,} tokens"
    # at least two blanks between columns, whatever sizes a config names
    name, shape, dtype = (max(least, *(len(row[i]) + 2 for _, leaves, _, _ in rows for row in leaves)) for i, least in enumerate((12, 24, 10)))
    left = max(name + shape + dtype, len(page) + 2)
    number = max(15, len(f"{layout.page_bytes:,}"), len(f"{layout.section_bytes:,}"), len(f"{layout.open_bytes:,}"))
    lines = [f"{model} ({family}), grid of {layout.grid:,} tokens, blocks of {BLOCK}"]
    for title, leaves, total, what in rows:
        lines.extend(["", title])
        lines.extend(f"  {f'{n:<{name}}{s:<{shape}}{d:<{dtype}}':<{left}}{size:>{number},}" for n, s, d, size in leaves)
        lines.append(f"  {what:<{left}}{total:>{number},}{_binary(total)}")
    lines.append(f"  {page:<{left}}{layout.page_bytes:>{number},}{_binary(layout.page_bytes)}")
    return "\n".join(lines)


def _binary(count: int) -> str:
    """A byte count in its largest binary unit, in brackets; nothing below one KiB."""
    unit = next(((2**power, name) for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")) if count >= 2**power), None)
    return f"  ({count / unit[0]:.4g} {unit[1]})" if unit else ""
