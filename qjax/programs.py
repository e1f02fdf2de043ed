"""The compiled programs of one engine: a listed, countable set, lowered from shapes and compiled ahead."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import lax

from qjax.model import qwen3_5 as family
from qjax.model import weights
from qjax.model.config import ModelConfig
from qjax.model.gdn import SLACK
from qjax.state import BLOCK, Layout, held

CHUNKS = (BLOCK, 256)
"""Rows of the prefill forwards below the grid: the tail sizes."""
STEPS = (2, 4, 8, SLACK)
"""Rows of the forwards within one block: decode is 2 wide (one row takes another, impure and slow path), verify any of them."""
MARKS = 2
"""Block lines inside one prefill forward at which it can catch the state."""


@dataclass(frozen=True)
class Shapes:
    """What fixes every program's shapes: the model's sizes, the layout, pages in the pool and pages of the longest sequence."""

    config: ModelConfig
    layout: Layout
    pool_pages: int
    sequence_pages: int

    @property
    def chunks(self) -> tuple[int, ...]:
        """Rows of the prefill forwards, ascending; the last is the grid."""
        return (*(c for c in CHUNKS if c < self.layout.grid), self.layout.grid)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.sequence_pages * self.layout.grid

    def aligned(self, rows: int) -> bool:
        """True for the grid's forward, which starts at a page's first row and so needs no block for an unaligned start."""
        return rows == self.layout.grid > BLOCK


def copy_page(views, source, target):
    """Copies one page's rows in every view of the pool."""

    def one(view):
        return lax.dynamic_update_slice_in_dim(view, lax.dynamic_slice_in_dim(view, source, 1, axis=0), target, axis=0)

    return jax.tree.map(one, views)


class Programs:
    """The compiled set, by name and rows of the forward:

    ("embed", T), ("attention", T)                 of every forward
    ("gdn chunk", T), ("norm", T), ("head", T)     of a prefill forward
    ("gdn step", T), ("logits", T)                 of a step
    "close"                                        of a GDN layer, at a block line
    "place", "reopen"                              of all GDN layers: a sequence's value to the running state,
    "sections", "inputs", "caught"                 and back, from a slot or from the marks of a prefill forward
    "copy_page"
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self._digests = {}
        jobs = self._jobs(shapes)

        def build(key):
            lowered = _lower(jobs[key])
            if not _is_paged(key):
                self._digests[key] = _digest(lowered)  # 40 ms of 1.5 s for all: the modules themselves are not kept
            return lowered.compile()

        # XLA compiles outside the interpreter lock: on two cores two programs at once take 0.6 of the time
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.compiled = dict(zip(jobs, pool.map(build, jobs), strict=True))

    def __getitem__(self, key):
        return self.compiled[key]

    def digest(self) -> str:
        """32 hex digits of what the compiler was given: the StableHLO of the programs, the same in every process.

        How many pages there are moves no bit, and what is kept in files outlives another --kv-gb: the programs that see the pool are
        lowered here for two pages, and the attention at its least and its most rows only (0.1 s; all widths take 0.3).
        """
        jobs = self._jobs(replace(self.shapes, pool_pages=2, sequence_pages=2))
        paged = [("attention", STEPS[0]), ("attention", self.shapes.chunks[-1]), "copy_page"]
        digests = self._digests | {key: _digest(_lower(jobs[key])) for key in paged}
        return xxhash.xxh3_128_hexdigest(repr(sorted((str(key), digest) for key, digest in digests.items())).encode())

    @staticmethod
    def _jobs(shapes: Shapes) -> dict:
        c, layout = shapes.config, shapes.layout

        def array(shape, dtype=np.int32):
            return jax.ShapeDtypeStruct(shape, dtype)

        def program(function, *static, donate=()):
            return jax.jit(partial(function, *static), donate_argnums=donate)

        params = weights.spec(c)
        top = {name: leaf for name, leaf in params.items() if name not in ("gdn", "attention")}
        whole = {kind: weights.layer_spec(c, kind) for kind in ("gdn", "attention")}
        pool = {v.name: array((shapes.pool_pages, *v.page_shape(layout.grid)), held(v.dtype)) for v in layout.views}
        sections, inputs = ({s.name: array(s.shape, held(s.dtype)) for s in some} for some in (layout.sections, layout.open))
        opened, number, table = family.scratch_specs(c), array(()), array((shapes.sequence_pages,))
        S = array(sections["gdn.S"].shape[1:], np.float32)
        scratch, marks = (opened,) * c.gdn_layers, array((MARKS,))
        caught = array((MARKS, *S.shape), np.float32), array((MARKS, c.conv - 1, c.conv_channels), opened["u"].dtype)
        jobs = {}
        for rows in (*STEPS, *shapes.chunks):
            x, angle = array((rows, c.hidden), jnp.dtype(c.dtype)), array((rows, c.rotary_dims // 2), np.float32)
            jobs["embed", rows] = program(family.embed, c), (top, array((rows,)), number)
            arguments = (whole["attention"], x, pool, table, number, number, number, angle, angle)
            jobs["attention", rows] = program(family.attention_layer, c, donate=(1, 2)), arguments
            arguments = (whole["gdn"], x, S, opened, number, number)
            if rows in STEPS:
                jobs["gdn step", rows] = program(family.gdn_step, c, donate=(1, 3)), arguments
                jobs["logits", rows] = program(family.logits, c), (top, x)
            else:
                jobs["gdn chunk", rows] = program(family.gdn_chunk, c, shapes.aligned(rows), donate=(1, 3)), (*arguments, marks)
                jobs["norm", rows] = program(family.final_norm, c), (top, x)
                jobs["head", rows] = program(family.head_rows), (top, x, array((2,)))
        jobs["close"] = program(family.close_block, c, donate=2), (whole["gdn"], S, opened)
        jobs["reopen"] = program(family.reopen_block, c), (params, sections, inputs)
        jobs["place"] = program(family.place_block, c), (sections, inputs)
        jobs["sections"] = program(family.freeze_sections, c), ((S,) * c.gdn_layers, scratch)
        jobs["inputs"] = program(family.freeze_inputs, c), (scratch, number)
        jobs["caught"] = program(family.caught_sections), ((caught,) * c.gdn_layers, number)
        jobs["copy_page"] = program(copy_page, donate=0), (pool, number, number)
        return jobs


def _is_paged(key) -> bool:
    """Whether a program's shapes have the number of pages in them."""
    return key == "copy_page" or key[0] == "attention"


def _lower(job) -> jax.stages.Lowered:
    function, arguments = job
    return function.lower(*arguments)


def _digest(lowered: jax.stages.Lowered) -> str:
    return xxhash.xxh3_128_hexdigest(lowered.as_text().encode())
