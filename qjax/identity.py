"""The identity of an engine's bits, as named texts: whoever finds all of them equal would compute the same bits again.

One field for one thing, so that a difference is told in words. Nothing here stands for how much may be kept, or where.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import re
from pathlib import Path

import jax
import jaxlib
import numpy as np
import xxhash
from jax.extend.backend import get_backend, get_compile_options

from qjax.model.source import Model
from qjax.programs import Programs
from qjax.state import Layout

PACKAGES = ("qjax", "storage")
OPTIONS = ("jax_default_matmul_precision", "jax_enable_x64")
"""Of JAX's options those that a program might be traced with. Whatever another one changes in a program is in the programs' digest."""
BUILD = ("exec_time_optimization_effort", "memory_fitting_effort", "optimization_level", "memory_fitting_level", "use_shardy_partitioner")
IDLE = re.compile(r"dump|cuda_data_dir|cache_dir|cache_file|cache_mode|timeout|warn|logging|_log_|print_|xprof|host_platform_device_count")
"""XLA's flags that say where something is written or read, when to give up and what to report."""
VECTORS = re.compile(r"s?sse|avx|fma|f16c|amx|xop|3dnow")
"""x86 names what arithmetic can be done with among a hundred other features, which a new kernel adds to."""


def identity(model: Model, programs: Programs, level: str) -> dict[str, str]:
    """Name -> text, all of it equal in every process that computes the same bits. Reads the weights where their digest is not kept."""
    template = model.template.source if model.template else ""
    fields = {
        "weights": model.weights_digest(),
        "tokenizer": model.tokenizer.digest,
        "template": xxhash.xxh3_128_hexdigest(template.encode()) if template else "none",
        "exactness": level,
        "source": source([Path(importlib.util.find_spec(name).origin).parent for name in PACKAGES]),
        "programs": programs.digest(),
    }
    return fields | _config(model) | _layout(programs.shapes.layout) | _software() | _hardware() | _flags()


def source(packages: list[Path]) -> str:
    """32 hex digits of the Python files below some directories: of their paths there and of their contents."""
    found = xxhash.xxh3_128()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            found.update(f"{package.name}/{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _config(model: Model) -> dict[str, str]:
    return {f"model.{name}": str(value) for name, value in dataclasses.asdict(model.config).items()}


def _layout(layout: Layout) -> dict[str, str]:
    sections = {f"section {s.name}": f"{s.dtype} {list(s.shape)}" for s in (*layout.sections, *layout.open)}
    views = {f"view {v.name}": f"{v.dtype} {[v.layers, v.heads, v.dim]}" for v in layout.views}
    return {"grid": str(layout.grid)} | sections | views


def _software() -> dict[str, str]:
    backend = get_backend()
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": np.__version__}
    return versions | {"backend": backend.platform, "backend version": backend.platform_version}


def _hardware() -> dict[str, str]:
    """Not the number of threads: it moves no bit of a row (`qjax certify` runs on one core too), and a notebook has another than the command."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return {"device": device.device_kind}
    name, features = processor()
    return {"device": device.device_kind, "processor": name, "processor features": features}


def processor(path: Path = Path("/proc/cpuinfo")) -> tuple[str, str]:
    """The model of the first processor, and what it can do arithmetic with. What Python knows of it where the system has no such file."""
    try:
        first = path.read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip(), ""
    known = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in first.splitlines()) if colon}
    names = ("vendor_id", "cpu family", "model", "stepping", "model name", "CPU implementer", "CPU variant", "CPU part", "CPU revision")
    features = known.get("Features", "").split() or filter(VECTORS.match, known.get("flags", "").split())
    return " ".join(known[name] for name in names if name in known) or platform.machine(), " ".join(sorted(features))


def _flags() -> dict[str, str]:
    """JAX's options, and XLA's flags as they are in force, whoever set them."""
    options = get_compile_options(1, 1)
    build = options.executable_build_options  # the flags lie in it: it must outlive them
    flags = xla_flags(str(build.debug_options))
    return {name: str(getattr(jax.config, name)) for name in OPTIONS} | {name: str(getattr(build, name)) for name in BUILD} | flags


def xla_flags(text: str) -> dict[str, str]:
    """Name -> value, from the text of XLA's flags: `name: value`, `name {` and lines to a `}`; a name may come again.

    All of it as one field where it does not look like that.
    """
    found = re.findall(r"^(xla_\w+)(?:: (.*)| (\{[^}]*\}))$", text, re.MULTILINE)
    flags: dict[str, str] = {}
    for name, value, block in found:
        if not IDLE.search(name):
            flags[name] = " ".join(filter(None, (flags.get(name), value, *block.split())))
    return flags or {"XLA flags": " ".join(text.split())}
